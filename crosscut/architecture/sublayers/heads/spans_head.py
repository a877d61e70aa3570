"""Head that finds the span of an answer in a text. The span has two logits per token. Under sequence parallelism, each
rank computes the logits of its own tokens, and the ranks gather the logits:

    X --> classifier --gather--> logits of the start and of the end
"""

from dataclasses import dataclass, replace

from crosscut.architecture.inputs import Element, Read
from crosscut.architecture.parameters import Matrix, Parameter, Role
from crosscut.architecture.steps import Message, Multiply, Operation, Rows, Step, Value
from crosscut.architecture.sublayers.heads.abilities import Ability, abilities
from crosscut.architecture.sublayers.heads.head import final_norm
from crosscut.architecture.sublayers.heads.task_head import NAME, TaskHead
from crosscut.architecture.target import Target
from crosscut.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class SpansHead(TaskHead):
    """Classifier of every token. Every rank computes it for its own tokens."""

    matrix: Matrix

    @classmethod
    def of(cls, model: ModelConfig, _tokens: Parameter) -> "SpansHead":
        """Describe the head of a model."""
        weight = Parameter(name=f"{NAME}.classifier.weight", shape=(2, model.hidden_size), role=Role.HEAD)
        # A bias has no effect on the softmax over the tokens. Its gradient would consist of rounding errors.
        bias = Parameter(name=f"{NAME}.classifier.bias", shape=(2,), role=Role.BIAS, is_frozen=True)
        return cls(
            name=model.head,
            hidden=model.hidden_size,
            norm=final_norm(model),
            abilities=abilities(Ability.SOLVE, is_causal=model.is_causal),
            hides_padding=True,
            labels=Read("labels", width=2, element=Element.PLACE),
            matrix=Matrix(weight, bias),
        )

    def logits(self, x: Value) -> tuple[Value, list[Step]]:
        """Return the logits of each token, and the steps that compute them from the hidden states `x`."""
        own = Value("own logits", self.matrix.out_features, Rows.STREAM)
        logits, kept = replace(own, name="logits", rows=Rows.TOKENS), replace(x, is_cheap=False)
        parameters = self.matrix.parameters
        return logits, [
            Multiply(reads=(x,), gives=(own,), keeps=(kept,), parameters=parameters, matrix=self.matrix),
            GatherLogits(reads=(own,), gives=(logits,), name="logits of tokens"),
        ]


@dataclass(frozen=True, kw_only=True)
class GatherLogits(Step):
    """Gather the logits of all tokens, if the tensor ranks split the sequence. The backward pass sends nothing, because
    every rank computes the whole loss.
    """

    def on(self, target: Target) -> Step:
        """Return the step with its message."""
        gather = (Message(Operation.ALL_GATHER, self.gives[0].elements(target)),)
        return replace(self, forward=gather if target.split else ())
