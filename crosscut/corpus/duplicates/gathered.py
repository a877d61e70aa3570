"""Short references to a collection (the numbered parts of a corpus). Tasks hold a reference instead of the collection.

The number of tasks grows with the number of parts. If each task held a list of all parts, the total size of the tasks
would grow with the square of the number of parts. A reference has only a few bytes, and each process builds the
collection once. For the same reason, `common_digest` computes a single hash for all files on which every task of a
stage depends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from crosscut.corpus.collection import Collection, collect
from crosscut.corpus.documents import Lineage
from crosscut.corpus.execution.stages import Counts, read_records


class Gathered(NamedTuple):
    """Data that `collect` needs to build a collection. Instances can be pickled."""

    work: Path
    earlier: tuple[str, ...]
    """Output folders of earlier runs."""

    lineage: Lineage
    digest: str
    """Hash of the collection, so that a long-lived process never uses an outdated collection."""

    @classmethod
    def now(cls, work: Path, earlier: tuple[str, ...], lineage: Lineage) -> Gathered:
        """Make a reference to the collection of the current files."""
        return cls(work, earlier, lineage, _sha256(repr(collect(work, earlier, lineage))))

    @property
    def collection(self) -> Collection:
        """The collection. Each process builds the collection once and caches it."""
        return _gather(self)


@lru_cache(maxsize=1)
def _gather(gathered: Gathered) -> Collection:
    return collect(gathered.work, gathered.earlier, gathered.lineage)


def with_collection(gathered: Gathered, function: Callable[..., Counts], *arguments: object) -> Counts:
    """Run a task: build the collection from its reference, and call `function(collection, *arguments)`."""
    return function(gathered.collection, *arguments)


def common_digest(work: Path, collection: Collection, *stages: str) -> str:
    """Hash all files of the given stages and of earlier runs, for tasks that depend on all these files."""
    files = [[stage, record.task, record.files] for stage in stages for record in read_records(work, stage)]
    return _sha256(json.dumps([files, collection.earlier_digests()], sort_keys=True))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
