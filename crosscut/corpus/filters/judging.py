"""Task that all filters share: judge the documents of a part (an Arrow file), and write the dropped documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import pyarrow as pa

from crosscut.corpus.documents import MARKS_SUFFIX, Document, Drop, Judgement, Part, write_drops, write_table
from crosscut.corpus.execution.stages import Counts, Output

Judge = Callable[[Sequence[Document]], Judgement]
"""Type of a filter: a function that takes the documents of a part and decides which documents to drop."""


def judge_part(
    part: Part, make: Callable[..., Judge], arguments: tuple[object, ...], depends: str, output: Output
) -> Counts:
    """Run a filter's task: judge the documents of a part with the filter that `make(*arguments)` returns.

    Writes the dropped documents to `PART.drops.arrow`, and the measurements, if the filter makes any, to
    `PART.marks.arrow`. A process calls `make` only once for the same `arguments` and `depends`. `arguments` must be
    hashable. `depends` describes everything else on which the filter depends, such as the content of a file.
    """
    documents = list(part.documents())
    judgement = _made(make, arguments, depends)(documents)
    write_drops(output, part.name, judgement.drops)
    if judgement.marks:
        columns = {"row": pa.array([document.row for document in documents], pa.uint32()), **judgement.marks}
        write_table(output.path(f"{part.name}{MARKS_SUFFIX}"), columns, pa.table(columns).schema)
    return {**count_drops(documents, judgement.drops), **judgement.counts}


@lru_cache(maxsize=8)
def _made(
    make: Callable[..., Judge],
    arguments: tuple[object, ...],
    depends: str,  # noqa: ARG001 - part of the cache key
) -> Judge:
    return make(*arguments)


def count_drops(documents: Sequence[Document], drops: Sequence[Drop]) -> Counts:
    """Count documents and bytes before and after a filter, and the documents and bytes that each rule dropped."""
    return count_rows({document.row: document.num_bytes for document in documents}, drops)


def count_rows(sizes: Mapping[int, int], drops: Sequence[Drop]) -> Counts:
    """Count documents and bytes as `count_drops` does, but use only the sizes of the documents.

    `sizes` maps the row of each document to the number of bytes of its text.
    """
    rules: dict[str, dict[str, int]] = {}
    for drop in drops:
        rule = rules.setdefault(drop.rule, {"documents": 0, "bytes": 0})
        rule["documents"] += 1
        rule["bytes"] += sizes[drop.row]
    num_bytes = sum(sizes.values())
    dropped = sum(rule["bytes"] for rule in rules.values())
    return {
        "documents_in": len(sizes),
        "documents_out": len(sizes) - len(drops),
        "bytes_in": num_bytes,
        "bytes_out": num_bytes - dropped,
        "rules": rules,
    }
