"""Settings of gated delta nets, mixers of the kind `gated_delta`."""

from dataclasses import dataclass, replace
from typing import ClassVar

from crosscut.config.checks import divisors, listed, require_at_least
from crosscut.config.errors import ConfigError
from crosscut.config.parts.limits import Limit
from crosscut.config.parts.section import OwnMatrices

_MOST = 1 << 16
"""Maximum of each size."""


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(OwnMatrices):
    """Gated delta nets, mixers of the kind `gated_delta` (Yang et al. 2024, arXiv 2412.06464). Only a model with
    `gated_delta` in `model.layers` uses this section. The defaults are those of Qwen3-Next.
    """

    why_causal: ClassVar[str] = "a state holds only earlier tokens"

    num_value_heads: int = 0
    """Number of value heads. Each value head has a state of `key_head_size` x `value_head_size` elements. 0 means that
    the value heads together are twice as wide as `model.hidden_size`."""

    num_key_heads: int = 0
    """Number of heads of queries and keys. Adjacent value heads share a key head. Must divide `num_value_heads`. 0
    means that the key heads together are as wide as `model.hidden_size`."""

    value_head_size: int = 128
    """Width of one value head."""

    key_head_size: int = 128
    """Number of elements of a query and of a key."""

    conv_size: int = 4
    """Number of taps of the causal convolution of queries, keys and values."""

    negative_eigenvalues: bool = False
    """Whether a change of the state may be twice as strong, so that a token can also reverse what the state holds, as
    in OLMo hybrid (Grazzi et al. 2024, arXiv 2411.12537)."""

    norm_epsilon: float = 0.0
    """Constant that the norm of the heads adds to the mean square. 0 means `model.norm_epsilon`."""

    chunk_size: int = 64
    """Number of tokens whose changes of the state are computed together. It changes the speed and the memory, and the
    result only by rounding."""

    def __post_init__(self) -> None:
        for name in ("num_value_heads", "num_key_heads"):
            require_at_least(f"model.gated_delta.{name}", getattr(self, name), 0, maximum=_MOST)
        for name in ("value_head_size", "key_head_size", "conv_size", "chunk_size"):
            require_at_least(f"model.gated_delta.{name}", getattr(self, name), 1, maximum=_MOST)
        require_at_least("model.gated_delta.norm_epsilon", self.norm_epsilon, 0)

    def resolved(self, hidden_size: int) -> "GatedDeltaConfig":
        """Return the settings of a model of this hidden size, without zeros that stand for a default. Raises
        `ConfigError` if the heads do not fit.
        """
        values = self.num_value_heads or _number("value", 2 * hidden_size, self.value_head_size, "twice ")
        keys = self.num_key_heads or _number("key", hidden_size, self.key_head_size)
        if values % keys:
            raise ConfigError(
                f"`model.gated_delta.num_key_heads` must divide the {values} value heads of `model.gated_delta`, but "
                f"is {keys}. Try {listed(divisors(values))}."
            )
        return replace(self, num_value_heads=values, num_key_heads=keys)

    def resized(self, hidden_size: int, new_size: int) -> "GatedDeltaConfig":
        """Return the settings for another hidden size, with as many key heads in proportion."""
        shared = self.num_value_heads // max(self.num_key_heads, 1)
        keys = max(self.num_key_heads * new_size // hidden_size, 1) if self.num_key_heads else 0
        return replace(self, num_key_heads=keys, num_value_heads=keys * shared if keys else self.num_value_heads)

    def num_parameters(self, hidden_size: int, num_heads: int) -> int:
        """Return the number of parameters in the matrices of one mixer."""
        del num_heads
        values, keys = self.num_value_heads * self.value_head_size, self.num_key_heads * self.key_head_size
        return hidden_size * (3 * values + 2 * keys + 2 * self.num_value_heads)

    def limits(self) -> tuple[Limit, ...]:
        """Return the numbers of value heads and of key heads."""
        return (
            Limit(
                setting="model.gated_delta.num_value_heads",
                number=self.num_value_heads,
                subject="{} value heads of gated delta nets",
                over_context=True,
            ),
            Limit(
                setting="model.gated_delta.num_key_heads",
                number=self.num_key_heads,
                subject="{} key heads of gated delta nets",
                may_share=True,
            ),
        )

    def widths(self, tensor: int) -> dict[str, int]:
        """Return the widths of the input projections on one of `tensor` ranks."""
        heads = self.num_value_heads // tensor
        return {
            "`model.gated_delta.num_value_heads` / `layout.tensor`": heads,
            "The width of the values on one rank": heads * self.value_head_size,
            "The width of queries and keys on one rank": 2 * max(self.num_key_heads // tensor, 1) * self.key_head_size,
        }


def _number(kind: str, width: int, size: int, times: str = "") -> int:
    """Return how many heads of `size` columns are `width` columns. Raises `ConfigError` if the size does not divide the
    width.
    """
    if width % size:
        raise ConfigError(
            f"`model.gated_delta.{kind}_head_size` must divide {times}`model.hidden_size` ({width}), but is {size}. "
            f"Choose another size, or set `model.gated_delta.num_{kind}_heads`."
        )
    return width // size


GATED_DELTA = GatedDeltaConfig()
"""Defaults of the section [model.gated_delta]."""
