"""Mark of a finished run: a file in the run's `work` folder.

A run removes the file when it begins, and writes it again when it succeeds. A `work` folder with this file is complete
and holds only the stages of the finished run. Later runs that name this run in `duplicates.against` require the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from crosscut.config import ConfigError, CorpusConfig, DataError, load_corpus
from crosscut.config.conventions import CONFIG_FILE
from crosscut.config.system.deletion import remove_file
from crosscut.config.system.files import parse_json, read_small, write_json
from crosscut.config.system.records import from_json, to_json
from crosscut.corpus.documents import Lineage
from crosscut.corpus.sites.pages import PageFinder

WORK_FOLDER = "work"
"""Name of the folder inside a corpus's folder that contains the stages' files."""

FINISHED_FILE = "line.json"

LOCK_FILE = ".lock"
"""Lock file in a corpus's folder. The run that prepares the corpus holds an exclusive lock. Later runs that name this
folder in `duplicates.against` hold shared locks."""


def mark_finished(work: Path, lineage: Lineage) -> None:
    """Mark the run in this `work` folder as finished. Later runs need its `lineage` to read the folder."""
    write_json(work / FINISHED_FILE, to_json(lineage), indent=None)


def read_finished(work: Path) -> Lineage | None:
    """Read the lineage of the finished run in this `work` folder. Return None if there is no finished run in it."""
    try:
        content = parse_json(read_small(work / FINISHED_FILE))
        lineage = from_json(Lineage, content)
    except (OSError, ValueError):
        return None
    return lineage if to_json(lineage) == content else None


def mark_unfinished(work: Path) -> None:
    """Remove the mark of a finished run, because a new run begins."""
    path = work / FINISHED_FILE
    if not remove_file(path):
        raise DataError(
            f"`{path}` must not exist, or must be a file that Crosscut wrote, but is not. Move it away, or choose "
            "another `folder`."
        )


def cleaned_otherwise(config: CorpusConfig) -> Iterator[str]:
    """Yield a warning for each earlier run in `duplicates.against` whose text-cleaning settings differ from the
    settings of this run. Earlier runs without a readable config are skipped.
    """
    ours = _settings_of_texts(config)
    for folder in config.duplicates.against:
        try:
            theirs = _settings_of_texts(load_corpus(Path(folder) / CONFIG_FILE))
        except ConfigError:
            continue
        keys = [f"`{key}` {json.dumps(theirs[key])}" for key in ours if theirs.get(key, ours[key]) != ours[key]]
        if keys:
            yield (
                f"`{folder}` in `duplicates.against` was cleaned with {', '.join(keys)}, unlike this corpus. Where "
                "these settings change a text, the two corpora differ. If the texts must match, set the same values."
            )


def _settings_of_texts(config: CorpusConfig) -> dict[str, object]:
    """Settings that change the texts of documents, keyed by name."""
    cleaning = {f"cleaning.{key}": value for key, value in asdict(config.cleaning).items()}
    has_pages = PageFinder.of(config.sources) is not None
    return {**cleaning, **({"html.site_boilerplate": config.html.site_boilerplate} if has_pages else {})}
