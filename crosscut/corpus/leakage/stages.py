"""The stages of the leakage check, in order: `test-sets`, `leakage`, `corpus-filter` (with the actions that leave text
of test sets in the corpus) and `overlap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from crosscut.config.corpora import LeakageAction, LeakageConfig
from crosscut.config.errors import DataError
from crosscut.corpus.documents import Lineage
from crosscut.corpus.execution.stages import CorpusStage, PlannedStage, StageTask, Yields, read_records
from crosscut.corpus.leakage.corpus_filter import CORPUS_FILTER, MARKS_SUFFIX, FilterSize, fill
from crosscut.corpus.leakage.grams import FILES, gather
from crosscut.corpus.leakage.overlap import add_up
from crosscut.corpus.leakage.removal import HITS_SUFFIX, LEAKAGE, MATCHES_SUFFIX, remove_leaks
from crosscut.corpus.leakage.test_sets import read_test_set
from crosscut.corpus.parts import PartStage, find_parts
from crosscut.data.hashing import sha256
from crosscut.data.text.sources import unreadable

GATHERING, OVERLAP = "test-sets", "overlap"
"""Names of the stages before and after `LEAKAGE`."""

_LEAVES = (LeakageAction.ARTICLES, LeakageAction.REPORT)
"""Actions that leave n-grams of test sets in the corpus."""


def leakage_stages(config: LeakageConfig, work: Path, lineage: Lineage) -> Sequence[CorpusStage]:
    """List the stages that search a corpus for text of test sets. Without test sets, the list is empty.

    The stages process documents of the given lineage. Only the stage `leakage` drops documents. Raises
    `DataError` if a test set cannot be read, or if only articles are to be removed and no test set has articles.
    """
    if not config.test_sets:
        return ()
    folder = work / GATHERING
    removal = PartStage(
        name=LEAKAGE,
        version=2,
        function=remove_leaks,
        arguments=(folder, config),
        settings={name: getattr(config, name) for name in ("ngram", "action", "margin", "min_matches", "max_cuts")},
        inputs=tuple(folder / name for name in FILES),
        lineage=lineage,
        yields=Yields.DROPS,
    )
    gathering = PlannedStage(name=GATHERING, version=1, plan=partial(_plan_gathering, config, _digests(config)))
    overlap = PlannedStage(name=OVERLAP, version=2, plan=partial(_plan_overlap, config))
    if config.action not in _LEAVES:
        return (gathering, removal, overlap)
    plan = partial(_plan_filter, config, lineage.after((removal,)))
    return (gathering, removal, PlannedStage(name=CORPUS_FILTER, version=1, plan=plan), overlap)


def _digests(config: LeakageConfig) -> tuple[str, ...]:
    # report a faulty test set now, instead of hours later
    items = [item for file in config.test_sets for item in read_test_set(Path(file), text_key=config.text_key)]
    if config.action is LeakageAction.ARTICLES and not any(item.title for item in items):
        raise DataError(
            '`leakage.test_sets` must name a test set with articles for `leakage.action` = "articles", such as '
            f"WikiText's, but names {', '.join(f'`{file}`' for file in config.test_sets)}, whose texts have no titles. "
            'Nothing would be removed. Set leakage.action="passage", or "report" to remove nothing.'
        )
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


def _filter_size(config: LeakageConfig, work: Path) -> FilterSize:
    """Size of the filter for the n-grams of all documents that the stage `leakage` kept."""
    kept = sum(record.counts["grams_kept"] for record in read_records(work, LEAKAGE))
    return FilterSize(kept, config.false_positives)


def _plan_filter(config: LeakageConfig, lineage: Lineage, work: Path) -> Sequence[StageTask]:
    """Return one task for each part of the corpus that is left after the stage `leakage`."""
    size = _filter_size(config, work)
    return [
        StageTask(
            name=part.name,
            function=partial(fill, part, work / GATHERING, config.ngram, size),
            inputs=(*part.files, *(work / GATHERING / name for name in FILES)),
            settings={"ngram": config.ngram, "size": size},
            size=num_bytes,
        )
        for part, num_bytes in find_parts(work, lineage)
    ]


def _plan_overlap(config: LeakageConfig, work: Path) -> Sequence[StageTask]:
    """Return the single task, which reads the results of the stages before it for all parts."""
    parts = [part for part, _ in find_parts(work)]
    files = [part.file(LEAKAGE, suffix) for part in parts for suffix in (HITS_SUFFIX, MATCHES_SUFFIX)]
    size = _filter_size(config, work) if config.action in _LEAVES else None
    files += [part.file(CORPUS_FILTER, MARKS_SUFFIX) for part in parts if size]
    return [
        StageTask(
            name=OVERLAP,
            function=partial(add_up, work / GATHERING, config.ngram, parts, size),
            inputs=(*(work / GATHERING / name for name in FILES), *files),
            settings={"ngram": config.ngram, "size": size},
            size=sum(file.stat().st_size for file in files),
        )
    ]
