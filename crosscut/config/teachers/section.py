"""Settings of a run's teacher."""

from dataclasses import dataclass, fields, replace

from crosscut.config.checks import (
    Choice,
    LocalPath,
    check_section,
    require_at_least,
    require_one_of,
    require_value,
    shown,
)
from crosscut.config.errors import ConfigError
from crosscut.config.precision import OF_MODELS, PRECISIONS, Precision

_COLDEST, _HOTTEST = 0.01, 100
"""Limits of the temperature. Outside, the divided logits or the divergence lose their digits in float32."""

_LEAST_BETA = 1e-6
"""Smallest difference of beta from its ends. Below, 1 - beta is 1 in float32, and a term of the divergence is infinite.
"""


class TeacherLoss(Choice):
    """The choices for `teacher.loss`."""

    FORWARD_KL = "forward_kl"
    REVERSE_KL = "reverse_kl"
    JSD = "jsd"


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """A trained model whose predictions the run's model learns, beside the data (docs/distillation.md)."""

    folder: LocalPath = ""
    """Folder of the teacher: of a run, of a checkpoint, or a Hugging Face folder. The teacher must have the vocabulary,
    the tokenizer and the kind of head of the run's model, and for a task its labels in the same order. Empty trains
    without a teacher."""

    tensor: int = 0
    """Number of tensor ranks of the teacher. The ranks are those of the run, in a pipeline those of the last stage, and
    this number must divide theirs. 0 means `layout.tensor`."""

    precision: Precision = Precision.AUTO
    """Element type of the teacher's weights and activations: `float32`, `bfloat16`, `float16` or `float64`. `auto`
    means that of the run's activations."""

    cache: LocalPath = ""
    """Folder of stored logits, which `crosscut prepare teacher` writes. The run reads the logits of the teacher from
    this folder, and does not compute the teacher. `folder` may then be empty; if it is not, the logits must be those of
    this teacher. Empty computes the teacher in every step."""

    k: int = 64
    """Number of likeliest tokens whose logits `cache` holds for each token of the data. All other tokens of the
    vocabulary count as one token in the loss, whose probability is the rest."""

    loss: TeacherLoss = TeacherLoss.FORWARD_KL
    """Divergence of the model's distribution s from the teacher's distribution t, over the whole vocabulary:
    `forward_kl` is KL(t || s), `reverse_kl` is KL(s || t), and `jsd` is KL(t || m) / (1 - beta) + KL(s || m) / beta
    with the mixture m = beta t + (1 - beta) s. This is the generalised Jensen-Shannon divergence, divided by beta (1 -
    beta) so that it goes from `forward_kl` at beta = 0 to `reverse_kl` at beta = 1 without a jump."""

    beta: float = 0.5
    """Weight of the teacher in the mixture of `loss = "jsd"`: 0, 1 or from 1e-6 to 0.999999."""

    temperature: float = 1.0
    """Number T from 0.01 to 100 by which the logits of both models are divided in the teacher's loss. The loss is
    multiplied by T^2, so that its gradient keeps its size."""

    alpha: float = 0.5
    """Share of the teacher's loss, above 0 and up to 1: the loss is (1 - alpha) x the data's loss + alpha x the
    teacher's loss."""

    def __post_init__(self) -> None:
        check_section(self, "teacher", tensor=0, k=1)
        require_one_of("teacher.precision", self.precision, [Precision.AUTO, *OF_MODELS])
        for name in ("alpha", "beta"):
            require_at_least(f"teacher.{name}", getattr(self, name), 0, maximum=1)
        if not self.alpha:
            raise ConfigError("`teacher.alpha` must be above 0, but is 0. Remove `teacher.alpha`.")
        require_at_least("teacher.temperature", self.temperature, _COLDEST, maximum=_HOTTEST)
        if self.beta not in (0, 1) and not _LEAST_BETA <= self.beta <= 1 - _LEAST_BETA:
            raise ConfigError(
                f"`teacher.beta` must be 0, 1 or from {_LEAST_BETA:g} to {1 - _LEAST_BETA:g}, but is {self.beta}. "
                f"Set teacher.beta={round(self.beta)}."
            )
        if self.loss is not TeacherLoss.JSD and self.beta != TeacherConfig.beta:
            raise ConfigError(
                f'`teacher.beta` must be left out with `teacher.loss` = "{self.loss}", but is {self.beta}. Set '
                'teacher.loss="jsd", or remove `teacher.beta`.'
            )
        if not self.cache:
            when = "without `teacher.cache`"
            require_value("teacher.k", self.k, TeacherConfig.k, when, "Set `teacher.cache`, or remove `teacher.k`.")
        self._require_folder()

    def _require_folder(self) -> None:
        """Raise `ConfigError` for settings of a teacher that is not given."""
        if self.teaches:
            return
        for field in fields(self):
            if (value := getattr(self, field.name)) != field.default:
                raise ConfigError(
                    f"`teacher.folder` must name the teacher if `teacher.{field.name}` is {shown(value)}, but is "
                    f"empty. Set `teacher.folder`, or remove `teacher.{field.name}`."
                )

    @property
    def teaches(self) -> bool:
        """Whether the run has a teacher."""
        return bool(self.folder or self.cache)

    @property
    def is_computed(self) -> bool:
        """Whether the run computes its teacher, and does not read stored logits."""
        return bool(self.folder) and not self.cache

    @property
    def loss_settings(self) -> tuple[object, ...]:
        """Settings that change the loss of the same teacher. Ranks and precision do not."""
        return self.mixed_beta, self.temperature, self.alpha, self.cache and self.k

    @property
    def computed(self) -> "TeacherConfig":
        """Settings of the same teacher without stored logits."""
        return replace(self, cache="", k=TeacherConfig.k)

    @property
    def mixed_beta(self) -> float:
        """Weight of the teacher in the mixture, from 0 (forward KL) to 1 (reverse KL)."""
        return {TeacherLoss.FORWARD_KL: 0.0, TeacherLoss.REVERSE_KL: 1.0}.get(self.loss, self.beta)

    def precision_in(self, precision: str) -> str:
        """Precision of the teacher in a run of this precision."""
        return PRECISIONS[precision].compute if self.precision is Precision.AUTO else str(self.precision)
