"""Interface of an evaluation task: texts, windows over the texts, and figures computed from the scores."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict, TypeVar

import numpy as np

from crosscut.config import DataError
from crosscut.config.system import files
from crosscut.data.hashing import sha256
from crosscut.evaluation.scoring import Ids, MaskedTexts, WindowScores
from crosscut.evaluation.windows import Window

_Value = TypeVar("_Value")

Setting = str | int | float | None
"""Setting of a task, or figure of a document."""


class Encoder(Protocol):
    """Interface of the tokenizer that a task needs."""

    @property
    def vocab_size(self) -> int:
        """Highest id + 1."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures and counts that a task computes from its scores."""

    figures: Mapping[str, float]
    """Figures by name. The main figure of the task comes first."""
    counts: Mapping[str, int]
    """Numbers of documents, tokens and the like, by name."""
    documents: Sequence[Mapping[str, Setting]] = ()
    """Figures of each document. Empty if the task has no figures per document."""


class Task(Protocol):
    """A task on which models are scored."""

    name: str
    windows: list[Window]
    """Windows over the texts."""
    protocol: dict[str, Setting]
    """Settings that affect the task's figures. The value of an unused setting is None. `first_id` is the token id with
    which each text starts."""
    data: list[dict[str, str]]
    """Files of the task with their hashes."""

    @property
    def texts(self) -> list[Ids] | MaskedTexts:
        """Token ids of each text."""

    def figures(self, scores: WindowScores) -> Figures:
        """Compute the figures from the scores of the windows."""


class TaskReport(TypedDict):
    """Result of a task as values for JSON."""

    figures: Mapping[str, float | None]
    counts: Mapping[str, int]
    protocol: Mapping[str, Setting]
    data: Sequence[Mapping[str, str]]
    seconds: float
    tokens_per_second: float | None
    documents: NotRequired[Sequence[Mapping[str, Setting]]]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a task."""

    task: str
    found: Figures
    """Figures and counts of the task."""
    protocol: Mapping[str, Setting]
    data: Sequence[Mapping[str, str]]
    seconds: float
    """Seconds that the evaluation of the task took."""
    tokens_read: int
    """Number of tokens that the model read over all windows, without the padding of batches."""

    def to_json(self) -> TaskReport:
        """Return the result as plain values for JSON. Infinite and NaN figures become None, because JSON lacks such
        numbers.
        """
        report: TaskReport = {
            "figures": _finite(self.found.figures),
            "counts": dict(self.found.counts),
            "protocol": dict(self.protocol),
            "data": list(self.data),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_read / self.seconds if self.seconds else None,
        }
        if self.found.documents:
            report["documents"] = [_finite(document) for document in self.found.documents]
        return report


def _finite(values: Mapping[str, _Value]) -> dict[str, _Value | None]:
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}


def exponential(loss: float) -> float:
    """Return the exponential of a mean loss, or infinity if the exponential overflows."""
    return math.inf if loss > 700 else math.exp(loss)


def as_ids(ids: Sequence[int]) -> Ids:
    """Convert ids to an int64 array."""
    return np.array(ids, dtype=np.int64)


def read_text(path: Path, key: str) -> str:
    """Read a file's text with its line ends unchanged. `key` is the name of the file's option, for messages. Raises
    `DataError`.
    """
    try:
        return files.read_small(path)
    except OSError as error:
        raise DataError(
            f"`{key}` must be a readable file, but `{path}` is not: {error.strerror}. Check the path."
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(
            f"`{key}` must be UTF-8 text, but byte {error.start} of `{path}` is not. Convert the file to UTF-8."
        ) from None


def hashed(name: str, path: Path) -> dict[str, str]:
    """Return the name and the hash of a task's file, for the result."""
    return {"file": name, "sha256": sha256(path)}
