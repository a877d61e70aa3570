"""Head that predicts the next token from each token: the final norm, the product with the vocabulary, and the loss
(paper, section 3).
"""

from dataclasses import dataclass

from crosscut.architecture.inputs import LossTerm, Read
from crosscut.architecture.parameters import Parameter
from crosscut.architecture.steps import Step, Value, enter
from crosscut.architecture.sublayers.heads.abilities import Ability, abilities
from crosscut.architecture.sublayers.heads.head import final_norm
from crosscut.architecture.sublayers.heads.projection import OutputProjection, TokenHead
from crosscut.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class NextTokenHead(TokenHead):
    """Head of a decoder. An encoder without a head of its own has this one, too, but cannot write."""

    @classmethod
    def of(cls, model: ModelConfig, tokens: Parameter) -> "NextTokenHead":
        """Describe the head of a model whose token embedding is `tokens`."""
        found = (Ability.WRITE,) if model.is_causal else ()
        return cls(
            name=model.head,
            hidden=model.hidden_size,
            norm=final_norm(model),
            abilities=abilities(*found, is_causal=model.is_causal),
            projection=OutputProjection.of(model, tokens),
        )

    @property
    def reads(self) -> dict[str, Read]:
        """The targets."""
        return {"targets": Read("targets", num_values=self.vocabulary.shape[0])}

    @property
    def loss_terms(self) -> tuple[LossTerm, ...]:
        """The cross entropies of the targets."""
        return (LossTerm("tokens", "targets"),)

    def after_norm(self, x: Value) -> list[Step]:
        """Enter the parallel region, and compute the loss."""
        entered, entering = enter(x, "output projection input", overlaps=False)
        return [entering, self.projection.loss(entered)]
