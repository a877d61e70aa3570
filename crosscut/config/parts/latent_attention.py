"""Settings of attention of the kind `latent_attention`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from crosscut.config.checks import require_at_least
from crosscut.config.parts.limits import Limit
from crosscut.config.parts.section import Gathered, OwnMatrices

_MOST = 1 << 16
"""Maximum of each size."""


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(OwnMatrices):
    """Attention of the kind `latent_attention`, whose queries, keys and values are computed from vectors that are
    narrower than the hidden states (multi-head latent attention; DeepSeek-AI 2024, arXiv 2405.04434). Only a model with
    `latent_attention` in `model.layers` uses this section. It has `model.num_heads` heads. The defaults are those of
    DeepSeek-V2 Lite.
    """

    query_rank: int = 0
    """Width of the latent vector from which the queries of all heads are computed. 0 means that queries are computed
    from the hidden states."""

    key_value_rank: int = 512
    """Width of the latent vector from which the keys and values of all heads are computed. Generation keeps this
    vector and the shared part of the keys of each token, and no keys and values of heads."""

    nope_size: int = 128
    """Number of elements of a head's queries and keys that are not rotated."""

    rope_size: int = 64
    """Number of elements of a head's queries and keys that rotary positions rotate. All heads share this part of a
    token's key."""

    value_size: int = 128
    """Number of elements of a head's values."""

    mscale_all_dim: float = 0.0
    """Coefficient m of YaRN in DeepSeek's files: scores are multiplied by (0.1 m ln(`model.rotary_factor`) + 1)^2. 0
    leaves the scores unchanged."""

    norm_epsilon: float = 1e-6
    """Constant that the norms of the latent vectors add to the mean square."""

    def __post_init__(self) -> None:
        require_at_least("model.latent_attention.query_rank", self.query_rank, 0, maximum=_MOST)
        for name in ("key_value_rank", "nope_size", "rope_size", "value_size"):
            require_at_least(f"model.latent_attention.{name}", getattr(self, name), 1, maximum=_MOST)
        for name in ("mscale_all_dim", "norm_epsilon"):
            require_at_least(f"model.latent_attention.{name}", getattr(self, name), 0)

    @property
    def rotated(self) -> Mapping[str, int]:
        """Number of elements of a head that rotary positions rotate, by the name of its setting."""
        return {"rope_size": self.rope_size}

    @property
    def head_size(self) -> int:
        """Width of a head's queries and keys."""
        return self.nope_size + self.rope_size

    @property
    def kept_size(self) -> int:
        """Number of elements of a token from which the keys and values of all heads are computed."""
        return self.key_value_rank + self.rope_size

    @property
    def gathered(self) -> Gathered:
        """Elements of a token's latents, and of the keys and values of each head."""
        return Gathered(self.kept_size, self.head_size + self.value_size)

    def score_factor(self, rotary_factor: float, multiplier: float = 0.0) -> float:
        """Factor by which products of queries and keys are multiplied, for a model with this `model.rotary_factor` and
        this `model.attention_multiplier`.
        """
        factor = 0.1 * self.mscale_all_dim * math.log(rotary_factor) + 1.0
        return factor * factor * (multiplier or 1.0 / math.sqrt(self.head_size))

    def resolved(self, hidden_size: int) -> "LatentAttentionConfig":
        """Return the settings, which do not depend on the hidden size."""
        del hidden_size
        return self

    def resized(self, hidden_size: int, new_size: int) -> "LatentAttentionConfig":
        """Return the settings, which do not depend on the hidden size."""
        del hidden_size, new_size
        return self

    def num_parameters(self, hidden_size: int, num_heads: int) -> int:
        """Return the number of parameters in the matrices of one mixer."""
        queries, rank = num_heads * self.head_size, self.query_rank
        of_queries = rank * (hidden_size + queries) if rank else hidden_size * queries
        of_heads = self.key_value_rank * num_heads * (self.nope_size + self.value_size)
        return of_queries + of_heads + hidden_size * (self.kept_size + num_heads * self.value_size)

    def limits(self) -> tuple[Limit, ...]:
        """Return no numbers: the heads are those of the model."""
        return ()

    def widths(self, tensor: int) -> dict[str, int]:
        """Return the widths of the latent vectors, and those of a head, which all ranks have."""
        del tensor
        per_head = {
            "nope_size` + `rope_size": self.head_size,
            "nope_size` + `value_size": self.nope_size + self.value_size,
        }
        names = ("query_rank", "key_value_rank", "rope_size", "value_size")
        widths = {**{name: getattr(self, name) for name in names}, **per_head}
        return {f"`model.latent_attention.{name}`": width for name, width in widths.items()}


LATENT_ATTENTION = LatentAttentionConfig()
"""Defaults of the section [model.latent_attention]."""
