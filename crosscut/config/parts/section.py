"""Settings of a kind of mixer that has a section of its own in the config, such as [model.mamba2]."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Self

from crosscut.config.parts.limits import Limit


class MixerSection(ABC):
    """Settings of one kind of mixer. The section's name is the kind's name. Its class is a frozen dataclass, and only
    models with this kind in `model.layers` use it.
    """

    why_causal: ClassVar[str] = ""
    """Reason why the kind needs `model.attention = "causal"`; empty if it does not."""

    @property
    def rotated(self) -> Mapping[str, int]:
        """Number of elements of a head that rotary positions rotate, by the name of its setting. Empty for a kind
        without rotary positions.
        """
        return {}

    def gathered_size(self, num_heads: int) -> int:  # noqa: ARG002 - for kinds of attention
        """Number of elements of a token that a rank with `num_heads` heads holds for the keys and values of a layer if
        context ranks gather; 0 for a kind that gathers none.
        """
        return 0

    @abstractmethod
    def resolved(self, hidden_size: int) -> Self:
        """Return the settings of a model of this hidden size, without zeros that stand for a default. Raises
        `ConfigError` if the settings contradict each other.
        """

    def resized(self, hidden_size: int, new_size: int) -> Self:  # noqa: ARG002 - for kinds whose sizes follow it
        """Return the settings for the hidden size `new_size` in place of `hidden_size`."""
        return self

    def num_parameters(self, hidden_size: int, num_heads: int) -> int:  # noqa: ARG002 - for kinds with own matrices
        """Return the number of parameters in the matrices of one mixer, for `model.num_heads` heads. 0 if they are
        those of `attention`.
        """
        return 0

    @abstractmethod
    def limits(self) -> tuple[Limit, ...]:
        """Return the numbers that ranks must divide."""

    @abstractmethod
    def widths(self, tensor: int) -> dict[str, int]:
        """Return the widths of the kind's matrices on one of `tensor` ranks, by the words for them in messages."""
