"""Settings of a kind of mixer that has a section of its own in the config, such as [model.mamba2]."""

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from crosscut.config.parts.limits import Limit


class MixerSection(ABC):
    """Settings of one kind of mixer. The section's name is the kind's name. Its class is a frozen dataclass, and only
    models with this kind in `model.layers` use it.
    """

    why_causal: ClassVar[str] = ""
    """Reason why the kind needs `model.attention = "causal"`; empty if it does not."""

    @abstractmethod
    def resolved(self, hidden_size: int) -> Self:
        """Return the settings of a model of this hidden size, without zeros that stand for a default. Raises
        `ConfigError` if the settings contradict each other.
        """

    def resized(self, hidden_size: int, new_size: int) -> Self:  # noqa: ARG002 - for kinds whose sizes follow it
        """Return the settings for the hidden size `new_size` in place of `hidden_size`."""
        return self

    @abstractmethod
    def limits(self) -> tuple[Limit, ...]:
        """Return the numbers that ranks must divide."""

    @abstractmethod
    def widths(self, tensor: int) -> dict[str, int]:
        """Return the widths of the kind's matrices on one of `tensor` ranks, by the words for them in messages."""
