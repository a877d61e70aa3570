"""Interface of a task that models are scored on: texts, windows over the texts, and figures from the scores."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from crosscut.config import DataError
from crosscut.data.hashing import sha256
from crosscut.evaluation.scoring import Ids, WindowScores
from crosscut.evaluation.windows import Window


class Encoder(Protocol):
    """A tokenizer, as far as a task needs one."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""

    def encode(self, text: str) -> list[int]:
        """Ids of one text."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures and counts that a task computes from its scores."""

    figures: Mapping[str, float]
    """Figures by name; the figure that the task is known for comes first."""
    counts: Mapping[str, int]
    documents: Sequence[Mapping[str, Any]] = ()
    """The figures of single documents, where the task has them."""


class Task(Protocol):
    """Something that models are scored on."""

    name: str
    texts: list[Ids]
    windows: list[Window]
    protocol: dict[str, Any]
    """Settings that tell two ways of doing the task apart, in words and numbers; `first_id` stands before each text."""
    data: list[dict[str, str]]
    """The files and their hashes."""

    def figures(self, scores: WindowScores) -> Figures:
        """Figures from the scores of the windows."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A task done."""

    task: str
    found: Figures
    protocol: Mapping[str, Any]
    data: Sequence[Mapping[str, str]]
    seconds: float
    tokens_read: int
    """Tokens that the model read over all windows, without the padding of batches."""

    def to_json(self) -> dict[str, Any]:
        """As plain values; infinite figures are null, which JSON has."""
        documents = [_finite(document) for document in self.found.documents]
        return {
            "figures": _finite(self.found.figures),
            "counts": dict(self.found.counts),
            "protocol": dict(self.protocol),
            "data": list(self.data),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_read / self.seconds if self.seconds else None,
            **({"documents": documents} if documents else {}),
        }


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}


def exponential(loss: float) -> float:
    """Exponential of a mean loss; infinite where it overflows."""
    return math.inf if loss > 700 else math.exp(loss)


def as_ids(ids: Sequence[int]) -> Ids:
    """Ids as a text of a task."""
    return np.array(ids, dtype=np.int64)


def read_text(path: Path, key: str) -> str:
    """A file's text, its line ends as they are. Raises `DataError`, which calls the file `key`."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"`{key}` must be a readable file, but `{path}` is not: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"`{key}` must be UTF-8, but `{path}` is not at byte {error.start}.") from None


def hashed(name: str, path: Path) -> dict[str, str]:
    """A file of a task, as its result names it."""
    return {"file": name, "sha256": sha256(path)}
