"""Heads of a BERT between its last hidden states and its losses (Devlin et al. 2018, arXiv 1810.04805, section 3.1; the
order of segments as in ALBERT, arXiv 1909.11942, section 3.1).

Both heads are inside one parallel region, which f (the entry) starts. The head for masked tokens first selects the
tokens to predict, so that only their logits are computed:

    X --f--> rows to predict --> dense --> GeLU --> norm --> logits W_i^T + b_i, and the loss

Every rank computes the dense layer and the norm whole. In the backward pass, every rank starts from its own part of the
vocabulary, so the gradients of the dense layer and the norm are summed over the ranks. The head for the order of
segments is a small MLP on the first token, A cut by columns and B cut by rows:

    X --f--> first token A_i --tanh--> Y_i B_i --sum--> logits of both orders, and the loss
"""

from dataclasses import dataclass, replace

from crosscut.architecture.parameters import Cut, Matrix, Parameter, Role, columns
from crosscut.architecture.steps import Message, Multiply, Operation, Passes, Pointwise, Rows, Step, Value
from crosscut.architecture.sublayers.norm import Norm, region_norm
from crosscut.architecture.target import Kind, Target
from crosscut.config import ModelConfig

NUM_ORDERS = 2
"""Number of orders of two segments: that of their text, and swapped."""


@dataclass(frozen=True)
class MaskedPrediction:
    """Layers between the hidden states of masked tokens and the output projection, and the bias of the logits."""

    dense: Matrix
    norm: Norm
    bias: Parameter

    @classmethod
    def of(cls, model: ModelConfig) -> "MaskedPrediction":
        """Describe the layers of a model."""
        hidden = model.hidden_size
        weight = Parameter("prediction.dense.weight", (hidden, hidden), Role.MATRIX, inside=True)
        return cls(
            dense=Matrix(weight, Parameter("prediction.dense.bias", (hidden,), Role.BIAS, inside=True)),
            norm=region_norm(model, "prediction.norm"),
            bias=Parameter("prediction.bias", (model.vocab_size,), Role.BIAS, Cut.VOCABULARY),
        )

    def steps(self, entered: Value) -> tuple[Value, list[Step]]:
        """Return the normed hidden states of the tokens to predict, and the steps that compute them."""
        index = Value("index of tokens to predict", 1, Rows.PREDICTED, kind=Kind.POSITION)
        selected = replace(entered, name="selected", rows=Rows.PREDICTED)
        dense = replace(selected, name="prediction")
        activated = replace(selected, name="activated prediction", is_cheap=True)
        normed, normalise = self.norm.step("prediction.norm", activated)
        steps = [
            Pointwise(reads=(entered,), gives=(selected,), keeps=(index,)),
            Multiply(
                reads=(selected,),
                gives=(dense,),
                keeps=(selected,),
                parameters=self.dense.parameters,
                matrix=self.dense,
            ),
            Pointwise(reads=(dense,), gives=(activated,), keeps=(dense,)),
            normalise,
        ]
        return normed, steps


@dataclass(frozen=True)
class SentenceOrder:
    """Pooler of the first token, and classifier of the order of two segments."""

    pooler: Matrix
    classifier: Matrix

    @classmethod
    def of(cls, model: ModelConfig) -> "SentenceOrder":
        """Describe the head of a model."""
        hidden = model.hidden_size
        weight = Parameter("order.classifier.weight", (NUM_ORDERS, hidden), Role.MATRIX, Cut.ROWS)
        bias = Parameter("order.classifier.bias", (NUM_ORDERS,), Role.BIAS, on_whole=True)
        return cls(columns("order.pooler", hidden, hidden, bias=True), Matrix(weight, bias))

    def steps(self, entered: Value) -> list[Step]:
        """Steps that compute the logits of both orders."""
        first = replace(entered, name="first tokens", rows=Rows.SEQUENCES)
        pooled = replace(first, name="pooled", cut=True)
        bent = replace(pooled, name="pooled, tanh")
        orders = replace(first, name="orders", width=NUM_ORDERS)
        summed = replace(orders, name="orders, summed")
        return [
            Multiply(
                reads=(first,), gives=(pooled,), keeps=(first,), parameters=self.pooler.parameters, matrix=self.pooler
            ),
            Pointwise(reads=(pooled,), gives=(bent,), keeps=(bent,)),
            Multiply(reads=(bent,), gives=(orders,), parameters=(self.classifier.weight,), matrix=self.classifier),
            SumOrders(
                reads=(orders,), gives=(summed,), parameters=self.classifier.parameters[1:], name="segment order"
            ),
        ]


@dataclass(frozen=True, kw_only=True)
class SumOrders(Step):
    """Sum the logits of both orders over the tensor ranks, on every layout, and add the bias."""

    def on(self, target: Target) -> Step:
        """Return the step with its message."""
        return replace(self, forward=(Message(Operation.ALL_REDUCE, self.gives[0].elements(target)),))

    def passes(self, target: Target) -> Passes:
        """Bytes that the sum reads and writes: 0, because two numbers per sequence do not count."""
        del target
        return Passes()
