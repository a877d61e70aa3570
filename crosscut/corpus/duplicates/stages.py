"""The stages that remove duplicates, in order.

exact-keys, exact-repeats, exact     drop every document whose text repeats an earlier text
sketches                             compute MinHash values of the remaining documents; a task for each part
candidates                           find documents with a band in common; a task for each share of the bands
ngrams                               save the n-grams of candidates; a task for each part
similar                              compute exact similarities of candidates; a task for about a thousand pairs
clusters                             connect near-duplicates, and choose the document that stays; one task
near                                 write the drops; a task for each part
planted                              measure the search on duplicates planted in the corpus's own text; one task
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from crosscut.config.corpora import CorpusConfig
from crosscut.config.errors import DataError
from crosscut.corpus.collection import Collection, first_number, require_finished_run
from crosscut.corpus.documents import INGEST, Lineage, read_table
from crosscut.corpus.duplicates.candidates import CANDIDATES, GROUPS_SUFFIX, PAIRS_SUFFIX, find_candidates, shares
from crosscut.corpus.duplicates.clusters import CLUSTERS, NEAR, join
from crosscut.corpus.duplicates.gathered import Gathered, common_digest, with_collection
from crosscut.corpus.duplicates.gram_sets import NGRAMS, sets_name, write_sets
from crosscut.corpus.duplicates.planted import PLANTED, measure_planted, spread_parts
from crosscut.corpus.duplicates.similarity import (
    PAIRS_PER_TASK,
    REFUSED_SUFFIX,
    SIMILAR,
    PairCheck,
    check_groups,
    check_pairs,
    search_settings,
    share_groups,
)
from crosscut.corpus.duplicates.sketches import SKETCHES, SketchSettings, read_settings, write_sketches
from crosscut.corpus.execution.stages import CorpusStage, Counts, PlannedStage, StageTask, Yields, read_records
from crosscut.corpus.finished import WORK_FOLDER
from crosscut.corpus.occurrences import drop_tasks, first_stages, text_key
from crosscut.corpus.parts import PartStage, find_parts, task_files

EXACT = "exact"
_SAMPLED = 16
"""One of every `_SAMPLED` pairs is sampled. The sample is used to divide all pairs evenly among the tasks."""


def duplicate_stages(config: CorpusConfig, lineage: Lineage) -> list[CorpusStage]:
    """List the stages that remove duplicates. The stages process documents of the given lineage.

    The stages that drop documents are `exact` and, if `duplicates.jaccard` is below 1, `near`. Raises `DataError` if a
    run in `duplicates.against` has not finished, was made with different `duplicates` settings, is this run, or is
    named twice.
    """
    wanted = config.duplicates
    check_earlier(config)
    exact = first_stages(EXACT, rule="same text", key=text_key, lineage=lineage, against=wanted.against)
    if wanted.jaccard == 1:
        return exact
    settings, check = search_settings(wanted)
    _require_sketches(wanted.against, settings)
    lineage = lineage.after(exact)
    plan = partial(_planned, wanted.against, lineage)
    return [
        *exact,
        PartStage(
            name=SKETCHES,
            version=1,
            function=write_sketches,
            arguments=(settings,),
            settings=settings._asdict(),
            lineage=lineage,
        ),
        plan(CANDIDATES, 2, _plan_candidates, settings, check.least_equal),
        plan(NGRAMS, 1, _plan_ngrams, wanted.ngram),
        plan(SIMILAR, 3, _plan_similar, check),
        plan(CLUSTERS, 2, _plan_clusters),
        plan(NEAR, 1, _plan_near, yields=Yields.DROPS),
        plan(PLANTED, 1, _plan_planted, config),
    ]


def _planned(
    earlier: tuple[str, ...],
    lineage: Lineage,
    name: str,
    version: int,
    plan: Callable[..., Sequence[StageTask]],
    *arguments: object,
    yields: Yields = Yields.FILES,
) -> CorpusStage:
    """Make a stage whose tasks `plan` lists, from a reference to the collection and `arguments`."""

    def list_tasks(work: Path) -> Sequence[StageTask]:
        gathered = Gathered.now(work, earlier, lineage)
        return plan(gathered, *arguments) if gathered.collection.own else []

    return PlannedStage(name=name, version=version, plan=list_tasks, yields=yields)


def check_earlier(config: CorpusConfig) -> None:
    """Raise `DataError` if a run of `duplicates.against` has not finished, is this run, or is named twice."""
    found: set[Path] = set()
    for folder in config.duplicates.against:
        path = Path(folder).resolve()
        if path == Path(config.folder).resolve():
            raise DataError(
                f"`duplicates.against` must name output folders of earlier runs, but `{folder}` is this run's own "
                f"`folder`. Choose another `folder`, or remove `{folder}` from `duplicates.against`."
            )
        if path in found:
            raise DataError(
                f"`duplicates.against` must name each earlier run once, but names `{folder}` twice. Remove one entry."
            )
        require_finished_run(folder)
        found.add(path)


def _require_sketches(against: tuple[str, ...], settings: SketchSettings) -> None:
    for folder in against:
        files = sorted((Path(folder) / WORK_FOLDER / SKETCHES).glob("*.arrow"))
        found = read_settings(files[0]) if files else None
        if found != settings:
            raise DataError(
                f"`duplicates.against` must name runs whose n-grams and bands are the same as in this run "
                f"({_named(settings)}), but `{folder}` has {_named(found)}. Use the `duplicates` settings of "
                "that run, or prepare that run again with the settings of this run."
            )


def _named(settings: SketchSettings | None) -> str:
    if settings is None:
        return "none, because that run removed exact duplicates only"
    return ", ".join(f"{name} {value}" for name, value in settings._asdict().items())


def _plan_candidates(gathered: Gathered, settings: SketchSettings, least_equal: int) -> Sequence[StageTask]:
    work, collection = gathered.work, gathered.collection
    num_documents = sum(
        record.counts["sketches"]
        for place in {part.work for part in collection.parts}
        for record in read_records(place, SKETCHES)
    )
    common = common_digest(work, collection, SKETCHES)
    size = _size(work)
    return [
        StageTask(
            name=f"{number:05}",
            function=partial(with_collection, gathered, find_candidates, share, least_equal, f"{number:05}"),
            settings={"share": share, "least_equal": least_equal, "common": common},
            size=size // settings.bands * len(share.bands) // share.of,
        )
        for number, share in enumerate(shares(num_documents, settings.bands))
    ]


def _plan_ngrams(gathered: Gathered, ngram: int) -> Sequence[StageTask]:
    work, collection = gathered.work, gathered.collection
    common = common_digest(work, collection, CANDIDATES)
    size = _size(work) // len(collection.parts)
    return [
        StageTask(
            name=sets_name(index),
            function=partial(with_collection, gathered, write_sets, work, ngram, index),
            inputs=() if index < collection.num_earlier else part.files,  # `common` covers the earlier runs
            settings={"ngram": ngram, "common": common},
            size=size,
        )
        for index, part in enumerate(collection.parts)
    ]


def _own(collection: Collection, stage: str) -> tuple[Path, ...]:
    return tuple(part.file(stage) for part in collection.own)


def _size(work: Path) -> int:
    return sum(size for _, size in find_parts(work))


def _plan_similar(gathered: Gathered, check: PairCheck) -> Sequence[StageTask]:
    work, collection = gathered.work, gathered.collection
    bounds = _bounds(task_files(work, CANDIDATES, PAIRS_SUFFIX), len(collection.parts))
    groups = share_groups(task_files(work, CANDIDATES, GROUPS_SUFFIX), PAIRS_PER_TASK)
    calls: list[tuple[str, Callable[..., Counts], object, tuple[int, int]]] = [
        *((f"pairs-{at:06}", check_pairs, some, some) for at, some in enumerate(bounds)),
        *((f"groups-{at:06}", check_groups, some, (at, len(groups))) for at, some in enumerate(groups)),
    ]
    common = common_digest(work, collection, CANDIDATES, NGRAMS)
    size = _size(work) // max(1, len(calls))
    return [
        StageTask(
            name=name,
            function=partial(with_collection, gathered, function, check, work, some, name),
            settings={"check": check, "common": common, "own": own},
            size=size,
        )
        for name, function, some, own in calls
    ]


def _bounds(pairs: Sequence[Path], num_parts: int) -> list[tuple[int, int]]:
    """Divide the pairs by their left document number into ranges of about `PAIRS_PER_TASK` pairs each."""
    samples = [read_table(path)["left"].to_numpy()[_SAMPLED // 2 :: _SAMPLED] for path in pairs]
    sample = np.sort(np.concatenate(samples))[:: PAIRS_PER_TASK // _SAMPLED][1:]
    cuts = [0, *np.unique(sample).tolist(), int(first_number(num_parts))]
    return list(pairwise(cuts))


def _plan_clusters(gathered: Gathered) -> Sequence[StageTask]:
    work, collection = gathered.work, gathered.collection
    files, refused = task_files(work, SIMILAR), task_files(work, SIMILAR, REFUSED_SUFFIX)
    candidates = sum(record.counts["candidates"] for record in read_records(work, SIMILAR))
    return [
        StageTask(
            name=CLUSTERS,
            function=partial(join, collection, files, refused, candidates),
            inputs=(*files, *refused, *_own(collection, SKETCHES), *_own(collection, INGEST)),
            settings={"earlier": collection.earlier_digests(), "candidates": candidates},
            size=_size(work),
        )
    ]


def _plan_near(gathered: Gathered) -> Sequence[StageTask]:
    matches = (gathered.work / CLUSTERS / "matches.arrow",)
    return drop_tasks(gathered.collection, gathered.work, matches, "near-duplicate", settings={})


def _plan_planted(gathered: Gathered, config: CorpusConfig) -> Sequence[StageTask]:
    parts = spread_parts(gathered.collection.own)
    wanted = config.duplicates
    return [
        StageTask(
            name=PLANTED,
            function=partial(measure_planted, parts, wanted, config.seed),
            inputs=tuple(path for part in parts for path in part.files),
            settings={
                "ngram": wanted.ngram,
                "jaccard": wanted.jaccard,
                "recall": wanted.recall,
                "seed": config.seed,
            },
            size=0,
        )
    ]
