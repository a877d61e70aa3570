"""Settings of a run's optimizer: AdamW, and the learning rate of each group of parameters (paper, section 4.1.1)."""

from dataclasses import dataclass

from crosscut.config.checks import Choice, require_at_least, require_fraction
from crosscut.config.errors import ConfigError


class ParameterGroup(Choice):
    """Groups of parameters that may have a learning rate of their own. The role of a parameter decides its group
    (`architecture.Role.group`).
    """

    EMBEDDING = "embedding"
    HEAD = "head"
    MATRIX = "matrix"
    SCALAR = "scalar"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with warm-up and cosine decay (paper, section 4.1.1)."""

    learning_rate: float = 1.5e-4
    """Maximum learning rate, reached at the end of the warm-up."""

    embedding_learning_rate: float = 0.0
    """Maximum learning rate of the embeddings of tokens and positions. A vocabulary that is tied to the output
    projection is an embedding. The schedule multiplies all learning rates by the same factor. 0 means
    `learning_rate`."""

    head_learning_rate: float = 0.0
    """Maximum learning rate of the output projection, if `model.tied` is false. 0 means `learning_rate`."""

    matrix_learning_rate: float = 0.0
    """Maximum learning rate of the matrices inside the layers. 0 means `learning_rate`."""

    scalar_learning_rate: float = 0.0
    """Maximum learning rate of biases and of norms. 0 means `learning_rate`."""

    min_learning_rate: float = 1e-5
    """Learning rate at the end of the cosine decay."""

    warmup_steps: int = 3000
    """Number of steps of linear warm-up."""

    weight_decay: float = 0.01
    """Coefficient of the decoupled weight decay. Biases and norms are not decayed."""

    beta1: float = 0.9
    """Decay rate of the first moment."""

    beta2: float = 0.999
    """Decay rate of the second moment."""

    epsilon: float = 1e-8
    """Constant added to the square root of the second moment."""

    clip_norm: float = 1.0
    """Maximum global gradient norm. Larger gradients are scaled down to this norm."""

    def __post_init__(self) -> None:
        own = [rate_field(group) for group in ParameterGroup]
        for name in ("learning_rate", "min_learning_rate", "weight_decay", *own):
            require_at_least(f"optimizer.{name}", getattr(self, name), 0)
        require_at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        for name in ("beta1", "beta2"):
            require_fraction(f"optimizer.{name}", getattr(self, name))
        for name in ("epsilon", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"`optimizer.{name}` must be above 0, but is {getattr(self, name)}.")
        if self.min_learning_rate > self.learning_rate:
            raise ConfigError(
                f"`optimizer.min_learning_rate` must be at most `optimizer.learning_rate` ({self.learning_rate}), "
                f"but is {self.min_learning_rate}."
            )
        for name in own:
            if getattr(self, name) and not self.learning_rate:
                raise ConfigError(
                    f"`optimizer.learning_rate` must be above 0 if `optimizer.{name}` is set, but is "
                    f"{self.learning_rate}. Set the rate of the other parameters, or remove `optimizer.{name}`."
                )

    def rate_factor(self, group: ParameterGroup) -> float:
        """Factor between the learning rate of a group of parameters and `learning_rate`. The factor is the same at
        every step, and exactly 1 for a group without a learning rate of its own.
        """
        own: float = getattr(self, rate_field(group))
        return own / self.learning_rate if own else 1.0


def rate_field(group: ParameterGroup) -> str:
    """Field of `OptimizerConfig` with the learning rate of a group of parameters."""
    return f"{group}_learning_rate"
