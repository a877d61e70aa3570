"""Messages from the first rank to the other ranks of a server: the texts to begin and to cancel before a step.

The messages are JSON, which holds only data. A process that intercepts and changes a message therefore cannot make a
rank run code. JSON represents every number in these messages exactly.
"""

import json
from dataclasses import dataclass
from typing import Any

from crosscut.config.generation.sampling import Sampling


@dataclass(frozen=True)
class Order:
    """One text to generate or to embed."""

    prompt: tuple[int, ...]
    sampling: Sampling | None
    """Sampling options; None for a text to embed."""
    sample: int
    """Index of the text among the texts with the same prompt and seed; 0 for a text to embed."""
    index: int
    """Index of the text in its request."""


@dataclass(frozen=True)
class News:
    """Changes that all ranks apply before a step."""

    orders: tuple[Order, ...] = ()
    """Texts to begin."""
    cancelled: tuple[int, ...] = ()
    """Numbers of the texts to cancel, as assigned by the decoder or the embedder."""
    end: bool = False
    """Whether the server stops now."""

    def to_json(self) -> bytes:
        """Encode the changes for the other ranks."""
        orders = [{**vars(one), "sampling": one.sampling and vars(one.sampling)} for one in self.orders]
        return json.dumps({"orders": orders, "cancelled": self.cancelled, "end": self.end}).encode()

    @classmethod
    def from_json(cls, content: bytes) -> "News":
        """Decode the changes that `to_json` encoded."""
        table = json.loads(content)
        orders = (
            Order(**{**one, "prompt": tuple(one["prompt"]), "sampling": sampling_of(one["sampling"])})
            for one in table["orders"]
        )
        return cls(tuple(orders), tuple(table["cancelled"]), table["end"])


def sampling_of(table: dict[str, Any] | None) -> Sampling | None:
    """Convert a JSON object to sampling options. JSON has no tuples, so lists become tuples."""
    if table is None:
        return None
    return Sampling(**{**table, "bias": tuple(map(tuple, table["bias"])), "stop": tuple(table["stop"])})
