"""Settings of attention with a sliding window, the kind `sliding_attention`."""

from dataclasses import dataclass
from typing import ClassVar

from crosscut.config.checks import MOST, require_at_least
from crosscut.config.errors import ConfigError
from crosscut.config.parts.section import MixerSection


@dataclass(frozen=True, kw_only=True)
class SlidingAttentionConfig(MixerSection):
    """Attention of the kind `sliding_attention`, in which a token attends only to the last tokens. Only a model with
    `sliding_attention` in `model.layers` uses this section. All other settings are those of `attention`.
    """

    why_causal: ClassVar[str] = "a window holds a token and the tokens before it"

    window: int = 4096
    """Number of tokens to which a token attends: itself and the tokens before it."""

    rotary_base: float = 0.0
    """Base of the rotary frequencies in these layers. 0 means `model.rotary_base`."""

    rotary_scaled: bool = True
    """Whether `model.rotary_scaling` and `model.rotary_factor` reduce the frequencies in these layers, too. False in
    OLMo 3 and Gemma 3."""

    def __post_init__(self) -> None:
        require_at_least("model.sliding_attention.window", self.window, 1, maximum=MOST)
        if not 0 <= self.rotary_base < float("inf"):
            raise ConfigError(
                f"`model.sliding_attention.rotary_base` must be at least 0 and finite, but is {self.rotary_base}."
            )


SLIDING_ATTENTION = SlidingAttentionConfig()
"""Defaults of the section [model.sliding_attention]."""
