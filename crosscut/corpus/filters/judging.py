"""Filters: stages that look at the documents of a part and say which of them go, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa

from crosscut.corpus.documents import Document, Drop, Judgement, Part, drops_name, marks_name, write_drops
from crosscut.corpus.execution.stages import Counts, Output

Judge = Callable[[Sequence[Document]], Judgement]
"""What a filter is: a function of documents."""


def judge_part(
    part: Part, make: Callable[..., Judge], arguments: tuple[Any, ...], depends: str, output: Output
) -> Counts:
    """Task of a filter: what `make(*arguments)` thinks of the documents of a part.

    Writes `part.drops.arrow` and, where something was measured, `part.marks.arrow`. A process calls `make` once for the
    same arguments, which must be hashable, and the same `depends`: what else the judge follows from, such as a file.
    """
    documents = list(part.documents())
    judgement = _made(make, arguments, depends)(documents)
    write_drops(output.path(drops_name(part.name)), judgement.drops)
    if judgement.marks:
        columns = {"row": pa.array([document.row for document in documents], pa.uint32()), **judgement.marks}
        with pa.OSFile(str(output.path(marks_name(part.name))), "wb") as sink:
            table = pa.table(columns)
            with pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
    return count_drops(documents, judgement.drops)


@lru_cache(maxsize=8)
def _made(make: Callable[..., Judge], arguments: tuple[Any, ...], depends: str) -> Judge:  # noqa: ARG001 - it is a key
    return make(*arguments)


def count_drops(documents: Sequence[Document], drops: Sequence[Drop]) -> Counts:
    """What every filter counts: documents and bytes in and out, and both for each rule."""
    return count_rows({document.row: document.num_bytes for document in documents}, drops)


def count_rows(sizes: Mapping[int, int], drops: Sequence[Drop]) -> Counts:
    """The same where only the bytes of each document's text are known, by its row."""
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
