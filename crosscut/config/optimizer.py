"""Settings of a run's optimizer: AdamW or Muon, the learning rate of each group of parameters, and the schedule of the
learning rates (paper, section 4.1.1).
"""

from dataclasses import dataclass

from crosscut.config.checks import Choice, check_section, require_fraction, require_value
from crosscut.config.errors import ConfigError


class RateSchedule(Choice):
    """The choices for `optimizer.schedule`."""

    COSINE = "cosine"
    LINEAR = "linear"
    WSD = "wsd"
    CONSTANT = "constant"


class MatrixOptimizer(Choice):
    """The choices for `optimizer.matrices`."""

    ADAMW = "adamw"
    MUON = "muon"


class ParameterGroup(Choice):
    """Group of parameters that may have its own learning rate. The role of a parameter determines its group
    (`architecture.Role.group`).
    """

    EMBEDDING = "embedding"
    HEAD = "head"
    MATRIX = "matrix"
    SCALAR = "scalar"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Settings of AdamW and Muon, and the schedule of the learning rates (paper, section 4.1.1)."""

    learning_rate: float = 1.5e-4
    """Maximum learning rate, reached at the end of the warm-up."""

    matrices: MatrixOptimizer = MatrixOptimizer.ADAMW
    """Optimizer of the matrices inside the layers: `adamw`, or `muon` (Jordan et al. 2024), which makes the update of
    each matrix orthogonal (docs/recipe.md). AdamW updates all other parameters. Muon needs a
    `matrix_learning_rate`."""

    embedding_learning_rate: float = 0.0
    """Maximum learning rate of the embeddings of tokens and positions. A token embedding that is also the output
    projection belongs to this group. The schedule multiplies all learning rates by the same factor. 0 means
    `learning_rate`."""

    head_learning_rate: float = 0.0
    """Maximum learning rate of the output projection, if `model.tied` is false, or of the classifier of a model with
    `model.head` "classes", "number", "spans" or "choice". 0 means `learning_rate`."""

    matrix_learning_rate: float = 0.0
    """Maximum learning rate of the matrices inside the layers. 0 means `learning_rate`."""

    scalar_learning_rate: float = 0.0
    """Maximum learning rate of biases and of norms. 0 means `learning_rate`."""

    schedule: RateSchedule = RateSchedule.COSINE
    """Learning rate after the warm-up: `cosine` follows one cosine down to `min_learning_rate` at the last step (as in
    the paper); `linear` falls in a straight line; `wsd` (warm-up, stable, decay) stays at the maximum and falls in a
    straight line over the last `decay_steps` steps; `constant` stays at the maximum. A straight line reaches
    `min_learning_rate` one step after the last step, so the last step still learns. While the rate is at its maximum, a
    run can be extended without a jump in the rate (docs/recipe.md)."""

    min_learning_rate: float = 1e-5
    """Learning rate at the end of the decay. 0 means a decay to zero."""

    warmup_steps: int = 3000
    """Number of steps of linear warm-up."""

    decay_steps: int = 0
    """Number of steps of the decay at the end of the schedule `wsd`. Must be 0 for the other schedules."""

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

    gradient_rank: int = 0
    """Rank r of the matrices' gradients: the ranks that see different tokens send two factors of r columns instead of
    a whole gradient, and keep what is left for later steps (PowerSGD, docs/sharding.md#gradients-in-low-rank). This
    changes the trained model, in the same way on every layout. Usual values are 1 to 8. 0 sums whole gradients."""

    ema_decay: float = 0.0
    """Decay of an exponential moving average (EMA) of the weights. The average replaces the current weights for
    validation, evaluation, samples and the finished model. A usual value is 0.999. In the first steps, the decay is
    lower (docs/recipe.md). 0 keeps no average."""

    def __post_init__(self) -> None:
        own = [rate_field(group) for group in ParameterGroup]
        counts = (
            "learning_rate",
            "min_learning_rate",
            "weight_decay",
            *own,
            "warmup_steps",
            "decay_steps",
            "gradient_rank",
        )
        check_section(self, "optimizer", **dict.fromkeys(counts, 0))
        for name in ("beta1", "beta2", "ema_decay"):
            require_fraction(f"optimizer.{name}", getattr(self, name))
        for name in ("epsilon", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"`optimizer.{name}` must be above 0, but is {getattr(self, name)}.")
        if self.min_learning_rate > self.learning_rate:
            raise ConfigError(
                f"`optimizer.min_learning_rate` must be at most `optimizer.learning_rate` ({self.learning_rate}), "
                f"but is {self.min_learning_rate}."
            )
        self._check_decay()
        if self.matrices is MatrixOptimizer.MUON and not self.matrix_learning_rate:
            raise ConfigError(
                '`optimizer.matrix_learning_rate` must be above 0 with optimizer.matrices="muon", but is 0. Muon needs '
                "a higher rate than AdamW. Try 0.02."
            )
        if self.gradient_rank:
            remedy = "Muon gives all directions of an update the same size, and few are left. Remove one of the two."
            require_value("optimizer.matrices", self.matrices, "adamw", "with `optimizer.gradient_rank`", remedy)
        for name in own:
            if getattr(self, name) and not self.learning_rate:
                raise ConfigError(
                    f"`optimizer.learning_rate` must be above 0 if `optimizer.{name}` is set, but is "
                    f"{self.learning_rate}. Set the rate that the other parameters use, or remove `optimizer.{name}`."
                )

    def _check_decay(self) -> None:
        if self.schedule is RateSchedule.WSD and not self.decay_steps:
            raise ConfigError(
                '`optimizer.decay_steps` must be at least 1 with optimizer.schedule="wsd", but is 0. Set the number of '
                'steps of the decay, or set optimizer.schedule="constant" to decide on the decay later.'
            )
        if self.schedule is not RateSchedule.WSD:
            remedy = 'Set optimizer.schedule="wsd", or remove `optimizer.decay_steps`.'
            when = f'with optimizer.schedule="{self.schedule}"'
            require_value("optimizer.decay_steps", self.decay_steps, 0, when, remedy)

    def rate_factor(self, group: ParameterGroup) -> float:
        """Factor by which `learning_rate` is multiplied for a group of parameters. The factor is the same at every
        step. It is exactly 1 for a group without its own learning rate.
        """
        own: float = getattr(self, rate_field(group))
        return own / self.learning_rate if own else 1.0


def rate_field(group: ParameterGroup) -> str:
    """Field of `OptimizerConfig` with the learning rate of a group of parameters."""
    return f"{group}_learning_rate"
