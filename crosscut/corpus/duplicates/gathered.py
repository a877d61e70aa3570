"""A collection as a task is given it: by what it is gathered from, in a few bytes however many parts it has.

There are more tasks the more parts there are. A task that held all parts, or a key that named the files of each, would
make both quadratic in the size of the corpus; so what all tasks of a stage have in common is hashed once for all keys,
and each process gathers the collection once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from crosscut.corpus.collection import Collection, collect
from crosscut.corpus.execution.stages import Counts, read_records


class Gathered(NamedTuple):
    """What a collection is gathered from. Pickles."""

    work: Path
    earlier: tuple[str, ...]
    filters: tuple[str, ...]
    cleaned: bool
    digest: str
    """Of the collection itself, so that a process that lives on never takes an older one for it."""

    @property
    def collection(self) -> Collection:
        """The collection, which a process that asks again already has."""
        return _gather(self)


@lru_cache(maxsize=1)
def _gather(gathered: Gathered) -> Collection:
    return collect(gathered.work, gathered.earlier, filters=gathered.filters, cleaned=gathered.cleaned)


class Gather(NamedTuple):
    """The parts that some stages look at together."""

    earlier: tuple[str, ...]
    """Output folders of earlier runs."""

    filters: tuple[str, ...]
    cleaned: bool

    def now(self, work: Path) -> Collection:
        """The collection in a work folder as it is."""
        return collect(work, self.earlier, filters=self.filters, cleaned=self.cleaned)

    def described(self, work: Path, collection: Collection) -> Gathered:
        """The same for tasks."""
        return Gathered(work, *self, digest=_sha256(repr(collection)))


def with_collection(gathered: Gathered, function: Callable[..., Counts], *arguments: Any) -> Counts:
    """Task: what a function makes of a collection and its other arguments."""
    return function(gathered.collection, *arguments)


def common_digest(work: Path, collection: Collection, *stages: str) -> str:
    """A hash of all files of stages, and of earlier runs: what every task that looks at all of them depends on."""
    files = [[stage, record.task, record.files] for stage in stages for record in read_records(work, stage)]
    return _sha256(json.dumps([files, collection.earlier_digests()], sort_keys=True))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
