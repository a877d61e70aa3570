"""A short description of a collection for tasks, a few bytes long however many parts the collection has.

The number of tasks grows with the number of parts. If each task held all parts, or each key named all files, the total
would grow with the square of the corpus. Therefore everything that the tasks of a stage have in common is hashed once
for all keys, and each process gathers the collection once.
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
    """Everything that a collection is gathered from. Instances can be pickled."""

    work: Path
    earlier: tuple[str, ...]
    filters: tuple[str, ...]
    cleaned: bool
    digest: str
    """Hash of the collection, so that a long-lived process never uses an older collection by mistake."""

    @property
    def collection(self) -> Collection:
        """The collection. A process gathers it once and keeps it."""
        return _gather(self)


@lru_cache(maxsize=1)
def _gather(gathered: Gathered) -> Collection:
    return collect(gathered.work, gathered.earlier, filters=gathered.filters, cleaned=gathered.cleaned)


class Gather(NamedTuple):
    """The rule that says which parts form the collection of some stages."""

    earlier: tuple[str, ...]
    """Output folders of earlier runs."""

    filters: tuple[str, ...]
    cleaned: bool

    def now(self, work: Path) -> Collection:
        """Gather the collection from the present state of a work folder."""
        return collect(work, self.earlier, filters=self.filters, cleaned=self.cleaned)

    def described(self, work: Path, collection: Collection) -> Gathered:
        """Describe the collection for tasks."""
        return Gathered(work, *self, digest=_sha256(repr(collection)))


def with_collection(gathered: Gathered, function: Callable[..., Counts], *arguments: Any) -> Counts:
    """Run a task: call a function with a collection and its other arguments."""
    return function(gathered.collection, *arguments)


def common_digest(work: Path, collection: Collection, *stages: str) -> str:
    """Hash all files of the given stages and of earlier runs, for the keys of tasks that depend on all of them."""
    files = [[stage, record.task, record.files] for stage in stages for record in read_records(work, stage)]
    return _sha256(json.dumps([files, collection.earlier_digests()], sort_keys=True))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
