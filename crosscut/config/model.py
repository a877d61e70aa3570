"""The shape of a GPT-2 model."""

from dataclasses import dataclass

from crosscut.config.checks import divisors, listed, require_at_least, require_fraction
from crosscut.config.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A GPT-2 of the paper's section 2.2: pre-layer-norm, GeLU, learned positions, tied embeddings."""

    num_layers: int
    """Transformer layers."""

    hidden_size: int
    """Width of the residual stream; a multiple of `num_heads`."""

    num_heads: int
    """Attention heads."""

    vocab_size: int = 0
    """Entries of the vocabulary; 0 takes the tokenizer's."""

    max_sequence_length: int = 1024
    """Learned positions, and so the longest sequence."""

    dropout: float = 0.1
    """Probability of dropping an element, at the paper's three places: embeddings, attention, residuals."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "max_sequence_length"):
            require_at_least(f"model.{name}", getattr(self, name), 1)
        require_at_least("model.vocab_size", self.vocab_size, 0)
        require_fraction("model.dropout", self.dropout)
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"`model.num_heads` must divide `model.hidden_size` ({self.hidden_size}), but is {self.num_heads}. "
                f"Try {listed(d for d in divisors(self.hidden_size) if d <= 2 * self.num_heads)}."
            )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def mlp_size(self) -> int:
        """Width between the two matrices of the MLP: four times the hidden size, as in GPT-2."""
        return 4 * self.hidden_size
