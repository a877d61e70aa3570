"""Pooler and classifier of BERT: a small MLP on the first token of each sequence, which stands for the whole sequence
(Devlin et al. 2018, arXiv 1810.04805, section 3.1).

The pooler A is cut by columns and the classifier B by rows, as the matrices of an MLP are:

    first token --> Y_i = tanh(first A_i) --> dropout --> Y_i B_i --sum--> logits

The ranks sum only a few numbers per sequence. This sum is an all-reduce even under sequence parallelism, because the
logits have no sequence dimension to split.
"""

from dataclasses import dataclass, replace

from crosscut.architecture.parameters import Cut, Matrix, Parameter, Role, columns
from crosscut.architecture.steps import Message, Multiply, Operation, Pointwise, Rows, Step, Value
from crosscut.architecture.target import Kind, Target


@dataclass(frozen=True)
class PooledHead:
    """Pooler of the first token, and classifier."""

    pooler: Matrix
    classifier: Matrix
    dropout: float
    """Dropout probability of the pooled vector."""

    @classmethod
    def of(
        cls, name: str, hidden: int, num_outputs: int, *, role: Role, dropout: float = 0.0, compares: bool = False
    ) -> "PooledHead":
        """Describe a head with `num_outputs` logits per sequence. `role` is the role of the classifier's weight.

        `compares` says that the loss compares sequences by a softmax over their logits. The bias has no effect on this
        softmax, so the gradient of the bias would consist of rounding errors. The bias is therefore frozen.
        """
        weight = Parameter(name=f"{name}.classifier.weight", shape=(num_outputs, hidden), role=role, cut=Cut.ROWS)
        bias = Parameter(
            name=f"{name}.classifier.bias", shape=(num_outputs,), role=Role.BIAS, on_whole=True, is_frozen=compares
        )
        return cls(columns(f"{name}.pooler", hidden, hidden, bias=True), Matrix(weight, bias), dropout)

    def steps(self, first: Value) -> tuple[Value, list[Step]]:
        """Return the logits, and the steps that compute them from the first tokens, inside a parallel region."""
        pooled = replace(first, name="pooled", cut=True)
        bent = replace(pooled, name="pooled, tanh")
        logits = Value("summed logits", self.classifier.out_features, Rows.SEQUENCES)
        parts = replace(logits, name="logits")
        steps: list[Step] = [
            Multiply(
                reads=(first,), gives=(pooled,), keeps=(first,), parameters=self.pooler.parameters, matrix=self.pooler
            ),
            Pointwise(reads=(pooled,), gives=(bent,), keeps=(bent,)),
        ]
        if self.dropout:
            mask = replace(pooled, name="pooled mask", kind=Kind.MASK)
            dropped = replace(pooled, name="pooled, dropped")
            steps.append(Pointwise(reads=(bent, mask), gives=(dropped,), keeps=(mask, dropped)))
            bent = dropped
        return logits, [
            *steps,
            Multiply(reads=(bent,), gives=(parts,), parameters=(self.classifier.weight,), matrix=self.classifier),
            SumLogits(
                reads=(parts,), gives=(logits,), parameters=self.classifier.parameters[1:], name="logits of sequences"
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class SumLogits(Step):
    """Sum the logits of the sequences over the tensor ranks, on every layout, and add the bias."""

    def on(self, target: Target) -> Step:
        """Return the step for a target, with the all-reduce of the logits."""
        return replace(self, forward=(Message(Operation.ALL_REDUCE, self.gives[0].elements(target)),))
