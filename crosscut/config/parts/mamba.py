"""Settings of state-space mixers of the kind `mamba`."""

from dataclasses import dataclass, replace
from typing import ClassVar

from crosscut.config.checks import require_at_least
from crosscut.config.parts.limits import Limit
from crosscut.config.parts.section import OwnMatrices

_MOST = 1 << 20
"""Maximum of each size."""


@dataclass(frozen=True, kw_only=True)
class MambaConfig(OwnMatrices):
    """State-space mixers of the kind `mamba` (Gu and Dao 2023, arXiv 2312.00752), as in Jamba. Only a model with
    `mamba` in `model.layers` uses this section. The defaults are those of the published models.
    """

    why_causal: ClassVar[str] = "a state holds only earlier tokens"

    inner_size: int = 0
    """Number of channels. Each channel has a state of `state_size` elements. 0 means twice `model.hidden_size`."""

    state_size: int = 16
    """Number of elements of the state of a channel."""

    step_rank: int = 0
    """Width of the vector from which the step sizes of all channels are computed. 0 means `model.hidden_size` / 16,
    rounded up."""

    conv_size: int = 4
    """Number of taps of the causal convolution before the scan."""

    vector_norms: bool = False
    """Whether the vector of the step sizes and the vectors B and C, through which tokens enter the state and are read
    from it, pass through RMS norms, as in Jamba."""

    chunk_size: int = 64
    """Number of tokens that the scan treats at once before it passes a state on. It changes the speed and the memory,
    and the result only by rounding."""

    def __post_init__(self) -> None:
        for name in ("inner_size", "step_rank"):
            require_at_least(f"model.mamba.{name}", getattr(self, name), 0, maximum=_MOST)
        for name in ("state_size", "conv_size", "chunk_size"):
            require_at_least(f"model.mamba.{name}", getattr(self, name), 1, maximum=_MOST)

    def resolved(self, hidden_size: int) -> "MambaConfig":
        """Return the settings of a model of this hidden size, without zeros that stand for a default."""
        rank = self.step_rank or -(-hidden_size // 16)
        return replace(self, inner_size=self.inner_size or 2 * hidden_size, step_rank=rank)

    def resized(self, hidden_size: int, new_size: int) -> "MambaConfig":
        """Return the settings for another hidden size, with channels and ranks in proportion."""
        inner, rank = (-(-size * new_size // hidden_size) for size in (self.inner_size, self.step_rank))
        return replace(self, inner_size=inner, step_rank=rank)

    def num_parameters(self, hidden_size: int, num_heads: int) -> int:
        """Return the number of parameters in the matrices of one mixer."""
        del num_heads
        return self.inner_size * (3 * hidden_size + self.selection_size + self.step_rank + self.state_size)

    def limits(self) -> tuple[Limit, ...]:
        """Return the number of channels."""
        channels = Limit(
            setting="model.mamba.inner_size",
            number=self.inner_size,
            subject="{} state-space channels",
            over_context=True,
        )
        return (channels,)

    def widths(self, tensor: int) -> dict[str, int]:
        """Return the widths of the projections on one of `tensor` ranks."""
        return {
            "`model.mamba.inner_size` / `layout.tensor`": self.inner_size // tensor,
            "`model.mamba.step_rank`": self.step_rank,
            "`model.mamba.step_rank` + 2 x `model.mamba.state_size`": self.selection_size,
        }

    @property
    def selection_size(self) -> int:
        """Width of the vector of the step sizes and of the vectors B and C together."""
        return self.step_rank + 2 * self.state_size


MAMBA = MambaConfig()
"""Defaults of the section [model.mamba]."""
