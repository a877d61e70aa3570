"""The three stages of the leakage check, in order: `test-sets`, `leakage` and `overlap`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from crosscut.config.corpora import LeakageConfig
from crosscut.corpus.documents import Lineage
from crosscut.corpus.execution.stages import CorpusStage, PlannedStage, StageTask, Yields
from crosscut.corpus.leakage.grams import FILES, gather
from crosscut.corpus.leakage.overlap import add_up
from crosscut.corpus.leakage.removal import HITS_SUFFIX, LEAKAGE, MATCHES_SUFFIX, remove_leaks
from crosscut.corpus.leakage.test_sets import read_test_set
from crosscut.corpus.parts import PartStage, find_parts
from crosscut.data.hashing import sha256
from crosscut.data.text.sources import unreadable

GATHERING, OVERLAP = "test-sets", "overlap"
"""Names of the stages before and after `LEAKAGE`."""


def leakage_stages(config: LeakageConfig, work: Path, lineage: Lineage) -> Sequence[CorpusStage]:
    """List the stages that search a corpus for text of test sets. Without test sets, the list is empty.

    The stages process documents of the given lineage. Only the stage `leakage` drops documents. Raises
    `DataError` if a test set cannot be read.
    """
    if not config.test_sets:
        return ()
    folder = work / GATHERING
    removal = PartStage(
        name=LEAKAGE,
        version=1,
        function=remove_leaks,
        arguments=(folder, config),
        settings={name: getattr(config, name) for name in ("ngram", "action", "margin", "min_matches", "max_cuts")},
        inputs=tuple(folder / name for name in FILES),
        lineage=lineage,
        yields=Yields.DROPS,
    )
    return (
        PlannedStage(name=GATHERING, version=1, plan=partial(_plan_gathering, config, _digests(config))),
        removal,
        PlannedStage(name=OVERLAP, version=1, plan=partial(_plan_overlap, config)),
    )


def _digests(config: LeakageConfig) -> tuple[str, ...]:
    for file in config.test_sets:  # report a faulty test set now, instead of hours later
        read_test_set(Path(file), text_key=config.text_key)
    try:
        return tuple(sha256(Path(file)) for file in config.test_sets)
    except OSError as error:
        raise unreadable(str(error.filename), error) from None


def _plan_gathering(config: LeakageConfig, digests: tuple[str, ...], _work: Path) -> Sequence[StageTask]:
    """Return the single task, which gathers all test sets. `digests` are the SHA-256 hashes of their files."""
    return [
        StageTask(
            name=GATHERING,
            function=partial(gather, config.test_sets, config.text_key, config.ngram, config.false_positives),
            settings={
                **{name: getattr(config, name) for name in ("test_sets", "text_key", "ngram", "false_positives")},
                "digests": digests,
            },
            size=sum(Path(file).stat().st_size for file in config.test_sets),
        )
    ]


def _plan_overlap(config: LeakageConfig, work: Path) -> Sequence[StageTask]:
    """Return the single task, which reads the results of the stage `leakage` for all parts."""
    parts = [part for part, _ in find_parts(work)]
    files = [part.file(LEAKAGE, suffix) for part in parts for suffix in (HITS_SUFFIX, MATCHES_SUFFIX)]
    return [
        StageTask(
            name=OVERLAP,
            function=partial(add_up, work / GATHERING, config.ngram, parts),
            inputs=(*(work / GATHERING / name for name in FILES), *files),
            settings={"ngram": config.ngram},
            size=sum(file.stat().st_size for file in files),
        )
    ]
