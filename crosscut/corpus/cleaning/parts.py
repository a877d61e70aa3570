"""The stage `cleaning`: repair the texts of each part (an Arrow file of documents), and write a file of new texts.

First, the boilerplate of sites is cut from pages. Then the texts are repaired by the steps of ftfy that `[cleaning]`
switches on. Finally, the cleaners of each source run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version

from crosscut.config.corpora import CleaningConfig
from crosscut.corpus.cleaning.paragraphs import JOIN_LINES_VERSION, join_lines
from crosscut.corpus.cleaning.repair import repair
from crosscut.corpus.documents import TEXTS, Drop, Part, count_bytes, write_drops, write_table
from crosscut.corpus.execution.stages import Counts, Output
from crosscut.corpus.filters.judging import count_drops
from crosscut.corpus.sites.cutting import cut_pages
from crosscut.corpus.sites.stages import SiteBoilerplate

CUT = "site boilerplate"
"""Name of the counter for pages from which the boilerplate of their site was cut."""

REPAIRED = "unicode"
"""Name of the counter for documents that ftfy's steps changed. The name must stay as it is, because the records of
finished tasks contain it."""

CLEANERS: Mapping[str, Callable[[str], str]] = {"join_lines": join_lines}
"""Cleaner functions by name. `sources.cleaners` names the cleaners of a source."""


def clean_part(
    part: Part,
    config: CleaningConfig,
    cleaners: Mapping[str, tuple[str, ...]],
    boilerplate: SiteBoilerplate | None,
    output: Output,
) -> Counts:
    """Run a task: clean the texts of a part. `cleaners` maps the name of a source to the names of its additional
    cleaners. `boilerplate` is None if the part has no pages.

    Writes `PART.arrow` (columns `TEXTS`) with the texts of the remaining documents, and `PART.drops.arrow` with the
    documents that contain only white space (rule `empty`). The returned counts include the number of documents that
    each cleaner changed.
    """
    documents = list(part.documents())
    cut = cut_pages(boilerplate.finder.among(documents), boilerplate.files) if boilerplate else {}
    changed = {**({CUT: len(cut)} if boilerplate else {}), **dict.fromkeys((REPAIRED, *CLEANERS), 0)}
    rows: list[int] = []
    texts: list[str] = []
    drops: list[Drop] = []
    for document in documents:
        text = cut.get(document.row, document.text)
        for name, cleaner in _cleaners_of(document.id, config, cleaners):
            cleaned = cleaner(text)
            changed[name] += cleaned != text
            text = cleaned
        if text.isspace() or not text:
            drops.append(Drop(document.row, "empty"))
        else:
            rows.append(document.row)
            texts.append(text)
    write_table(output.path(f"{part.name}.arrow"), {"row": rows, "text": texts}, TEXTS)
    write_drops(output, part.name, drops)
    num_bytes = sum(map(count_bytes, texts))
    return {**count_drops(documents, drops), "bytes_out": num_bytes, "changed": changed}


def _cleaners_of(
    document: str, config: CleaningConfig, cleaners: Mapping[str, tuple[str, ...]]
) -> list[tuple[str, Callable[[str], str]]]:
    source = document.partition("/")[0]
    common: list[tuple[str, Callable[[str], str]]] = (
        [(REPAIRED, partial(repair, config=config))] if config.repairs else []
    )
    return [*common, *((name, CLEANERS[name]) for name in cleaners.get(source, ()))]


def cleaning_settings(config: CleaningConfig, cleaners: Mapping[str, tuple[str, ...]]) -> dict[str, object]:
    """Return the settings on which the result of `clean_part` depends, as JSON values.

    The version of ftfy counts only if a repair is switched on, and the version of the cleaners only if a source has
    one.
    """
    ftfy = version("ftfy") if config.repairs else ""
    rules = JOIN_LINES_VERSION if any(cleaners.values()) else 0
    return {**asdict(config), "ftfy": ftfy, "cleaners": dict(cleaners), "join_lines": rules}
