"""The work that every contender gets: the model and the batch, and how a step is to run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model and the batch."""

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
        """Width between the MLP's matrices: GPT-2's, or what makes a Llama's three about as large as those two."""
        return 4 * self.hidden_size if self.family == "GPT-2" else max(1, round(self.hidden_size / 48)) * 128


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a contender is to run."""

    compiled: bool = False
    device: str = "cpu"
    precision: str = "float32"
    overrides: tuple[str, ...] = ()
    """More settings of a Crosscut run, such as `training.recompute=full`."""


Step = Callable[[int, Sequence[tuple[Any, Any]]], Callable[[], float]]
"""Step number and micro-batches of (tokens, targets), each [B, S], to what gives the mean loss and waits for it."""


class NotActiveError(Exception):
    """What was asked for would not really run."""
