"""Settings of state-space mixers of the kind `mamba2`."""

from dataclasses import dataclass, replace
from math import lcm
from typing import ClassVar

from crosscut.config.checks import divisors, listed, require_at_least
from crosscut.config.errors import ConfigError
from crosscut.config.parts.limits import Limit
from crosscut.config.parts.section import OwnMatrices

_MOST = 1 << 16
"""Maximum of each size."""


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(OwnMatrices):
    """State-space mixers of the kind `mamba2` (Dao and Gu 2024, arXiv 2405.21060). Only a model with `mamba2` in
    `model.layers` uses this section. The defaults are those of the published models.
    """

    why_causal: ClassVar[str] = "a state holds only earlier tokens"

    num_heads: int = 0
    """Number of heads. Each head has a state of `head_size` x `state_size` elements. 0 means that the heads together
    are twice as wide as `model.hidden_size`."""

    head_size: int = 64
    """Width of one head."""

    state_size: int = 128
    """Number of elements of the state for each element of a head."""

    num_groups: int = 1
    """Number of groups of heads. The heads of a group share the vectors B and C, through which tokens enter the state
    and are read from it. Must divide `num_heads`."""

    norm_groups: int = 0
    """Number of groups of columns that the gated norm normalises one by one. Must divide `num_heads`. 0 means
    `num_groups`."""

    conv_size: int = 4
    """Number of taps of the causal convolution before the scan."""

    chunk_size: int = 128
    """Number of tokens that the scan treats like attention before it passes a state on. It changes the speed and the
    memory, and the result only by rounding."""

    least_time_step: float = 0.0
    """Minimum of the step size by which a token advances the state."""

    most_time_step: float = 0.0
    """Maximum of the step size. 0 means no maximum."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "norm_groups"):
            require_at_least(f"model.mamba2.{name}", getattr(self, name), 0, maximum=_MOST)
        for name in ("head_size", "state_size", "num_groups", "conv_size", "chunk_size"):
            require_at_least(f"model.mamba2.{name}", getattr(self, name), 1, maximum=_MOST)
        for name in ("least_time_step", "most_time_step"):
            require_at_least(f"model.mamba2.{name}", getattr(self, name), 0)
        if 0 < self.most_time_step <= self.least_time_step:
            raise ConfigError(
                f"`model.mamba2.most_time_step` must be above `model.mamba2.least_time_step` ({self.least_time_step}), "
                f"but is {self.most_time_step}. Set 0 for no maximum."
            )

    def resolved(self, hidden_size: int) -> "Mamba2Config":
        """Return the settings of a model of this hidden size, without zeros that stand for a default. Raises
        `ConfigError` if heads and groups do not fit.
        """
        if not self.num_heads and 2 * hidden_size % self.head_size:
            raise ConfigError(
                f"`model.mamba2.head_size` must divide twice `model.hidden_size` ({2 * hidden_size}), but is "
                f"{self.head_size}. Choose another size, or set `model.mamba2.num_heads`."
            )
        heads = self.num_heads or 2 * hidden_size // self.head_size
        groups = {"num_groups": self.num_groups, "norm_groups": self.norm_groups or self.num_groups}
        for name, number in groups.items():
            if heads % number:
                raise ConfigError(
                    f"`model.mamba2.{name}` must divide the {heads} heads of `model.mamba2`, but is {number}. "
                    f"Try {listed(divisors(heads))}."
                )
        return replace(self, num_heads=heads, **groups)

    def resized(self, hidden_size: int, new_size: int) -> "Mamba2Config":
        """Return the settings for another hidden size, with as many heads in proportion."""
        multiple = lcm(self.num_groups, self.norm_groups or 1)
        heads = self.num_heads * new_size // hidden_size // multiple * multiple
        return replace(self, num_heads=max(heads, multiple) if self.num_heads else 0)

    def num_parameters(self, hidden_size: int, num_heads: int) -> int:
        """Return the number of parameters in the matrices of one mixer."""
        del num_heads
        return hidden_size * (3 * self.inner_size + 2 * self.num_groups * self.state_size + self.num_heads)

    def limits(self) -> tuple[Limit, ...]:
        """Return the numbers of heads and groups."""
        groups = {"num_groups": "{} groups of state-space heads", "norm_groups": "{} groups of the gated norm"}
        heads = Limit(
            setting="model.mamba2.num_heads",
            number=self.num_heads,
            subject="{} state-space heads",
            over_context=True,
        )
        shared = (
            Limit(setting=f"model.mamba2.{name}", number=getattr(self, name), subject=subject, may_share=True)
            for name, subject in groups.items()
        )
        return heads, *shared

    def widths(self, tensor: int) -> dict[str, int]:
        """Return the widths of the input projections on one of `tensor` ranks."""
        return {
            "`model.mamba2.num_heads` / `layout.tensor`": self.num_heads // tensor,
            "The width of B and C on one rank": 2 * max(self.num_groups // tensor, 1) * self.state_size,
        }

    @property
    def inner_size(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_size


MAMBA2 = Mamba2Config()
"""Defaults of the section [model.mamba2]."""
