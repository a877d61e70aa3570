"""Settings of a kind of part that has a section of its own in the config, such as [model.mamba2]."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Self

from crosscut.config.parts.limits import Limit


class MixerSection:
    """Settings of one kind of part, most often of a mixer. The section's name is the kind's name. Its class is a frozen
    dataclass, and only models with this kind in `model.layers` use it.
    """

    why_causal: ClassVar[str] = ""
    """Reason why the kind needs `model.attention = "causal"`; empty if it does not."""
    why_whole: ClassVar[str] = ""
    """Reason why context ranks must exchange heads for the tokens of whole sequences; empty if they need not."""


class Gathered(NamedTuple):
    """Numbers of elements of a token that a rank holds for the keys and values of a layer if context ranks gather."""

    of_all_heads: int = 0
    of_head: int = 0


class OwnMatrices(MixerSection, ABC):
    """Settings of a kind of mixer whose matrices are not those of `attention`."""

    @property
    def rotated(self) -> Mapping[str, int]:
        """Number of elements of a head that rotary positions rotate, by the name of its setting. Empty for a kind
        without rotary positions.
        """
        return {}

    @property
    def gathered(self) -> Gathered:
        """Elements that context ranks may gather; none for a kind that exchanges parts of itself for tokens."""
        return Gathered()

    @abstractmethod
    def resolved(self, hidden_size: int) -> Self:
        """Return the settings of a model of this hidden size, without zeros that stand for a default. Raises
        `ConfigError` if the settings contradict each other.
        """

    @abstractmethod
    def resized(self, hidden_size: int, new_size: int) -> Self:
        """Return the settings for the hidden size `new_size` in place of `hidden_size`."""

    @abstractmethod
    def num_parameters(self, hidden_size: int, num_heads: int) -> int:
        """Return the number of parameters in the matrices of one part, for `model.num_heads` heads."""

    @abstractmethod
    def limits(self) -> tuple[Limit, ...]:
        """Return the numbers that ranks must divide."""

    @abstractmethod
    def widths(self, tensor: int) -> dict[str, int]:
        """Return the widths of the kind's matrices on one of `tensor` ranks, by the words for them in messages."""
