"""Messages from the first rank to the other ranks of a server: the texts to begin and to cancel before a step.

The messages are JSON, which holds only data. A process that intercepts and changes a message therefore cannot make a
rank run code. JSON represents every number in these messages exactly.
"""

import json
from dataclasses import dataclass

from crosscut.config.generation.sampling import Sampling
from crosscut.config.system.records import from_json, to_json


@dataclass(frozen=True)
class TextOrder:
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

    orders: tuple[TextOrder, ...] = ()
    """Texts to begin."""
    cancelled: tuple[int, ...] = ()
    """Numbers of the texts to cancel, as assigned by the decoder or the embedder."""
    end: bool = False
    """Whether the server stops now."""

    def to_json(self) -> bytes:
        """Encode the changes for the other ranks."""
        return json.dumps(to_json(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> "News":
        """Decode the changes that `to_json` encoded."""
        return from_json(cls, json.loads(content))
