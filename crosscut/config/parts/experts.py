"""Settings of mixtures of experts, the kind `experts`."""

from dataclasses import dataclass, replace

from crosscut.config.checks import Choice, divisors, listed, require_at_least, resolve_choices
from crosscut.config.errors import ConfigError
from crosscut.config.parts.kinds import MLPS, FeedForward, gated
from crosscut.config.parts.limits import Limit
from crosscut.config.parts.section import OwnMatrices

_MOST = 1 << 20
"""Maximum of each size."""


class Scores(Choice):
    """Function that turns a router's logits into scores of the experts."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(OwnMatrices):
    """Mixtures of experts of the kind `experts` (Shazeer et al. 2017, arXiv 1701.06538). A router chooses some of many
    MLPs for each token, and the result is the sum of their results, weighted by the router's scores. No token is
    dropped. Only a model with `experts` in `model.layers` uses this section. Experts have no biases.
    """

    number: int = 8
    """Number of experts of a layer."""

    per_token: int = 2
    """Number of experts that each token passes through."""

    size: int = 0
    """Width between the matrices of an expert. 0 means 4 x `model.hidden_size` / `per_token`, so that the experts of a
    token are together as wide as an ordinary MLP."""

    mlp: FeedForward = FeedForward.SWIGLU
    """Kind of MLP that each expert is: one of the kinds of MLPs in `model.layers`."""

    shared_size: int = 0
    """Width between the matrices of an MLP that every token passes through besides its experts. 0 means no such MLP."""

    shared_gate: bool = False
    """Whether the result of the shared MLP is multiplied by a sigmoid of the token, as in Qwen3-Next."""

    scores: Scores = Scores.SOFTMAX
    """Scores of the experts: the `softmax` of the router's logits over all experts, or the `sigmoid` of each logit, as
    in DeepSeek-V3."""

    renormalise: bool = True
    """Whether the scores of a token's experts are divided by their sum, so that the weights of its experts add up to
    `scaling`."""

    scaling: float = 1.0
    """Factor of the weights of the experts."""

    groups: int = 1
    """Number of groups of experts. A token chooses its experts in only some of the groups (DeepSeek-AI 2024, arXiv
    2405.04434, section 2.1.2). 1 means that all experts are candidates."""

    groups_per_token: int = 1
    """Number of groups in which a token chooses its experts."""

    group_top: int = 2
    """Number of a group's highest scores whose sum is the score of the group: 1 in DeepSeek-V2, 2 in DeepSeek-V3."""

    balance_loss: float = 0.01
    """Coefficient of a loss that balances the experts' loads in each sequence. 0 means no such loss."""

    balance_bias: bool = False
    """Whether each expert has a bias that is added to its score for the choice of experts, but not for their weights.
    After each step, the bias of an expert with less than the mean load rises by `balance_rate`, and that of an expert
    with more falls (Wang et al. 2024, arXiv 2408.15664)."""

    balance_rate: float = 0.001
    """Change of a bias in one step."""

    router_z_loss: float = 0.0
    """Coefficient of a loss that keeps the router's logits small (Zoph et al. 2022, arXiv 2202.08906). 0 means no such
    loss."""

    def __post_init__(self) -> None:
        resolve_choices(self, "model.experts")
        for name in ("number", "per_token", "groups", "groups_per_token", "group_top"):
            require_at_least(f"model.experts.{name}", getattr(self, name), 1, maximum=1 << 16)
        for name in ("size", "shared_size"):
            require_at_least(f"model.experts.{name}", getattr(self, name), 0, maximum=_MOST)
        for name in ("balance_loss", "balance_rate", "router_z_loss"):
            require_at_least(f"model.experts.{name}", getattr(self, name), 0)
        if not 0 < self.scaling < float("inf"):
            raise ConfigError(f"`model.experts.scaling` must be above 0 and finite, but is {self.scaling}.")
        if self.mlp not in MLPS:
            raise ConfigError(f'`model.experts.mlp` must be {listed(MLPS)}, but is "{self.mlp}".')
        if self.shared_gate and not self.shared_size:
            raise ConfigError(
                "`model.experts.shared_size` must be at least 1 with `model.experts.shared_gate`, but is 0. Set the "
                "width of the shared MLP, or remove `model.experts.shared_gate`."
            )
        self._check_choice()

    def _check_choice(self) -> None:
        if self.number % self.groups:
            raise ConfigError(
                f"`model.experts.groups` must divide `model.experts.number` ({self.number}), but is {self.groups}. Try "
                f"{listed(divisors(self.number))}."
            )
        if self.groups_per_token > self.groups:
            raise ConfigError(
                f"`model.experts.groups_per_token` must be at most `model.experts.groups` ({self.groups}), but is "
                f"{self.groups_per_token}."
            )
        candidates = self.number // self.groups * self.groups_per_token
        if self.per_token > candidates:
            at_most = f"`model.experts.number` ({self.number})"
            if self.groups > 1:
                at_most = f"the {candidates} experts of `model.experts.groups_per_token` groups"
            raise ConfigError(
                f"`model.experts.per_token` must be at most {at_most}, but is {self.per_token}. Choose fewer experts "
                "per token, or have more experts."
            )
        if self.groups > 1 and self.group_top > self.number // self.groups:
            raise ConfigError(
                f"`model.experts.group_top` must be at most the {self.number // self.groups} experts of a group, but "
                f"is {self.group_top}."
            )

    @property
    def num_matrices(self) -> int:
        """Number of matrices of an expert."""
        return 3 if gated(self.mlp) else 2

    def resolved(self, hidden_size: int) -> "ExpertsConfig":
        """Return the settings of a model of this hidden size, without zeros that stand for a default."""
        return replace(self, size=self.size or max(4 * hidden_size // self.per_token, 1))

    def resized(self, hidden_size: int, new_size: int) -> "ExpertsConfig":
        """Return the settings for another hidden size, with widths in proportion. A width stays a multiple of the
        largest power of two, up to 16, that divides it, so that ranks can divide it as before.
        """

        def scaled(size: int) -> int:
            step = min(size & -size, 16)
            return step * -(-size * new_size // (hidden_size * step)) if size else 0

        return replace(self, size=scaled(self.size), shared_size=scaled(self.shared_size))

    def num_parameters(self, hidden_size: int, num_heads: int) -> int:
        """Return the number of parameters in the matrices of one mixture."""
        del num_heads
        inner = self.number * self.size + self.shared_size
        return hidden_size * (self.num_matrices * inner + self.number)

    def limits(self) -> tuple[Limit, ...]:
        """Return the widths of an expert and of the shared MLP."""
        sizes = (("size", self.size, "the experts'"), ("shared_size", self.shared_size, "the shared MLP's"))
        return tuple(
            Limit(setting=f"model.experts.{name}", number=size, subject=f"{whose} width of {{}}")
            for name, size, whose in sizes
            if size
        )

    def widths(self, tensor: int) -> dict[str, int]:
        """Return the width of the shared MLP on one of `tensor` ranks. The experts' products are never in float8."""
        shared = self.shared_size // tensor
        return {"`model.experts.shared_size` / `layout.tensor`": shared} if shared else {}


EXPERTS = ExpertsConfig()
"""Defaults of the section [model.experts]."""
