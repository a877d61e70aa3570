"""The task of a contender: the model and the batch, and the way in which a step runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and of the batch."""

    num_layers: int = 6
    hidden_size: int = 384
    num_heads: int = 6
    sequence_length: int = 256
    batch_size: int = 8
    vocab_size: int = 50_304
    family: Literal["GPT-2", "Llama"] = "GPT-2"
    """A `Llama` has rotary positions, root mean square norms, SwiGLU, no biases."""

    @property
    def mlp_size(self) -> int:
        """Width between the matrices of the MLP.

        A GPT-2 has four times the hidden size. A Llama has three matrices in place of two, so its width is chosen for
        about as many parameters.
        """
        return 4 * self.hidden_size if self.family == "GPT-2" else max(1, round(self.hidden_size / 48)) * 128


@dataclass(frozen=True, kw_only=True)
class Way:
    """Device, precision and compilation of a contender."""

    compiled: bool = False
    device: str = "cpu"
    precision: str = "float32"
    overrides: tuple[str, ...] = ()
    """Further settings of a Crosscut run, such as `training.recompute=full`."""


Step = Callable[[int, Sequence[tuple[Any, Any]]], Callable[[], float]]
"""A training step: from the step number and the micro-batches of (tokens, targets), each [B, S], to a function that
waits for the mean loss and returns it.
"""


class NotActiveError(Exception):
    """A setting was asked for but would have no effect in this contender."""
