"""Heads of a BERT model, between its last hidden states and its losses. One head predicts masked tokens (Devlin et al.
2018, arXiv 1810.04805, section 3.1). The other head predicts the order of two segments (ALBERT, arXiv 1909.11942,
section 3.1).

Both heads are inside one parallel region. f is the entry into the region. The head for masked tokens first selects the
tokens to predict, so that only their logits are computed:

    X --f--> rows to predict --> dense --> GeLU --> norm --> logits W_i^T + b_i, and the loss

Every rank computes the whole dense layer and the whole norm. In the backward pass, every rank starts from the logits of
its own part of the vocabulary, so the gradients of the dense layer and the norm are summed over the ranks. The head for
the order of segments is the pooler and the classifier of `pooled_head`, on the first token:

    X --f--> first token --> pooler and classifier --> logits of both orders, and the loss
"""

from dataclasses import dataclass, replace

from crosscut.architecture.inputs import LossTerm, Read
from crosscut.architecture.parameters import Cut, Matrix, Parameter, Role
from crosscut.architecture.steps import Multiply, Pointwise, Rows, Step, Value, enter
from crosscut.architecture.sublayers.heads.abilities import Ability, abilities
from crosscut.architecture.sublayers.heads.head import final_norm
from crosscut.architecture.sublayers.heads.pooled_head import PooledHead
from crosscut.architecture.sublayers.heads.projection import OutputProjection, TokenHead
from crosscut.architecture.sublayers.norm import Norm, region_norm
from crosscut.architecture.target import Kind
from crosscut.config import ModelConfig

NUM_ORDERS = 2
"""Number of possible orders of two segments: as in the text, or swapped."""


@dataclass(frozen=True)
class MaskedPrediction:
    """Layers between the hidden states of masked tokens and the output projection, and the bias of the logits."""

    dense: Matrix
    norm: Norm
    bias: Parameter

    @classmethod
    def of(cls, model: ModelConfig) -> "MaskedPrediction":
        """Describe the layers with which a model predicts masked tokens."""
        hidden = model.hidden_size
        weight = Parameter(name="prediction.dense.weight", shape=(hidden, hidden), role=Role.MATRIX, inside=True)
        cut, padded_to = Cut.VOCABULARY, model.vocab_multiple
        bias = Parameter(
            name="prediction.bias", shape=(model.vocab_size,), role=Role.BIAS, cut=cut, padded_to=padded_to
        )
        return cls(
            dense=Matrix(weight, Parameter(name="prediction.dense.bias", shape=(hidden,), role=Role.BIAS, inside=True)),
            norm=region_norm(model, "prediction.norm"),
            bias=bias,
        )

    def steps(self, entered: Value) -> tuple[Value, list[Step]]:
        """Return the normalised hidden states of the tokens to predict, and the steps that compute them."""
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


@dataclass(frozen=True, kw_only=True)
class MaskedHead(TokenHead):
    """Head of an encoder that predicts masked tokens and, if `order` is given, the order of two segments."""

    prediction: MaskedPrediction
    order: PooledHead | None

    @classmethod
    def of(cls, model: ModelConfig, tokens: Parameter) -> "MaskedHead":
        """Describe the head of a model whose token embedding is `tokens`."""
        hidden = model.hidden_size
        return cls(
            name=model.head,
            hidden=hidden,
            norm=final_norm(model),
            abilities=abilities(Ability.FILL, is_causal=model.is_causal),
            projection=OutputProjection.of(model, tokens),
            prediction=MaskedPrediction.of(model),
            order=PooledHead.of("order", hidden, NUM_ORDERS, role=Role.MATRIX) if model.sentence_order else None,
        )

    @property
    def reads(self) -> dict[str, Read]:
        """The targets, the indexes of the tokens to predict and, for the order of segments, the order."""
        found = [Read("targets", num_values=self.vocabulary.shape[0])]
        if self.order is not None:
            found.append(Read("order", num_values=NUM_ORDERS))
        found.append(Read("predicted"))
        return {read.name: read for read in found}

    @property
    def loss_terms(self) -> tuple[LossTerm, ...]:
        """The cross entropies of the masked tokens and, for the order of segments, those of the orders."""
        of_tokens = LossTerm("tokens", "targets")
        return (of_tokens,) if self.order is None else (of_tokens, LossTerm("order", "order"))

    def after_norm(self, x: Value) -> list[Step]:
        """Enter the parallel region, and compute both losses."""
        entered, entering = enter(x, "output projection input", overlaps=False)
        ordering: list[Step] = []
        if self.order is not None:
            _, ordering = self.order.steps(replace(entered, name="first tokens", rows=Rows.SEQUENCES))
        normed, predicting = self.prediction.steps(entered)
        return [entering, *ordering, *predicting, self.projection.loss(normed, self.prediction.bias)]
