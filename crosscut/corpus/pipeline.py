"""Prepare a corpus: list the stages in order, run the stages, and write the tokens and the report.

A stage depends only on stages before it in `_list_stages`. Each filter (a stage that drops documents) sees only the
documents that all earlier filters kept. This module is the only one that knows all stages.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from crosscut.config import CorpusConfig, DataError, write_json, write_toml
from crosscut.config.conventions import CONFIG_FILE, TOKENS_FOLDER
from crosscut.config.corpora import CleaningConfig
from crosscut.config.system.files import open_own
from crosscut.config.system.markers import MARKER_FILE, marker_of
from crosscut.config.system.terminal import echo
from crosscut.corpus.audit.corpus_report import Report, build_report, measure_timings
from crosscut.corpus.audit.explain import explain
from crosscut.corpus.audit.lookup import Runs
from crosscut.corpus.audit.page import write_page
from crosscut.corpus.audit.samples import audit_stage
from crosscut.corpus.cleaning.parts import clean_part, cleaning_settings
from crosscut.corpus.cleaning.repair import repair
from crosscut.corpus.collection import reading
from crosscut.corpus.documents import CLEANING, INGEST, READ, Lineage
from crosscut.corpus.duplicates import duplicate_stages
from crosscut.corpus.execution.engine import check_workers, start_engine
from crosscut.corpus.execution.running import StageResult, run_stage
from crosscut.corpus.execution.stages import (
    CorpusStage,
    Digests,
    PlannedStage,
    StageTask,
    Yields,
    begin_work,
    is_work,
    read_records,
    remove_stage,
    writing_to,
)
from crosscut.corpus.filters.judging import Judge, judge_part
from crosscut.corpus.filters.language import LanguageFilter
from crosscut.corpus.filters.length import LengthFilter
from crosscut.corpus.filters.links import LINKS, LinkFilter, LinksOfSource, find_lists, lists_stage
from crosscut.corpus.filters.urls import UrlFilter, url_key
from crosscut.corpus.finished import LOCK_FILE, WORK_FOLDER, mark_finished, mark_unfinished
from crosscut.corpus.ingest import IngestStage, check_damage, check_rejects
from crosscut.corpus.leakage.stages import leakage_stages
from crosscut.corpus.occurrences import first_stages
from crosscut.corpus.parts import PartStage, find_parts
from crosscut.corpus.sites.cutting import CUTTING_VERSION
from crosscut.corpus.sites.pages import PageFinder
from crosscut.corpus.sites.stages import SiteBoilerplate, site_stages
from crosscut.corpus.tokens.encoding import tokens_stage
from crosscut.corpus.tokens.packing import TooFewDocuments, check_replaceable, objective_setting, packing_stage, publish
from crosscut.corpus.tokens.tokenizer import check_tokenizer, make_tokenizer
from crosscut.data.manifest import TOKENIZER_NAME
from crosscut.data.progress import ProgressBar
from crosscut.data.tokenization.wordpiece import digest_of_given

Paths = tuple[Path, ...]

TOKENIZER = "tokenizer"
"""Name of the stage that copies or trains the tokenizer."""

REPORT_FILE, PAGE_FILE, TIMINGS_FILE = "report.json", "report.html", "timings.json"


@dataclass(frozen=True)
class CorpusResult:
    """Result of preparing a corpus."""

    config: CorpusConfig
    report: Report
    """The content of `report.json`."""

    stages: tuple[StageResult, ...]
    """The result of each stage, in the order of the stages."""


def prepare_corpus(config: CorpusConfig, *, progress: bool = True) -> CorpusResult:
    """Prepare a corpus: run all tasks whose results are missing or out of date, and write the tokens and the report.

    `progress` shows a progress bar. Raises `ConfigError` if this machine is too small for the worker processes. Raises
    `DataError` in these cases: a source cannot be read; a list of domains or file types, a tokenizer or a test set does
    not exist; a source has too many unreadable records; too many files are damaged; the disk is full; a finished shard
    has changed; or another process is preparing the same folder. If the filters leave too few documents for token
    shards, the report is written before the error is raised. The report then shows why documents were dropped.
    """
    check_workers(config.engine)
    folder = Path(config.folder)
    stages = _list_stages(config)
    results: list[StageResult] = []
    _require_own_names(folder)
    with _alone_in(folder), reading(config.duplicates.against), writing_to(folder):
        check_replaceable(folder / TOKENS_FOLDER, stages.work)
        _begin(stages)
        try:
            with start_engine(config.engine, stages.work) as engine, ProgressBar(shown=progress) as bar:
                digests = Digests()
                for stage in stages.all:
                    results.append(run_stage(stage, stages.work, engine=engine, digests=digests, bar=bar))
                    if stage.name == INGEST:
                        records = read_records(stages.work, INGEST)
                        check_rejects(records, config)
                        check_damage(records, config)
                publish(stages.work, folder / TOKENS_FOLDER, bar)
        except TooFewDocuments:
            _report(config, stages, results)
            raise
        report = _report(config, stages, results)
        mark_finished(stages.work, stages.lineage)
    return CorpusResult(config, report, tuple(results))


def _require_own_names(folder: Path) -> None:
    """Raise `DataError` if a file in the corpus's folder has the name of a file of the corpus, but Crosscut did not
    write it: the folder has no marker, and no finished tasks. Also raise it for a link.
    """
    is_ours = marker_of(folder) is not None or is_work(folder / WORK_FOLDER)
    for name in (CONFIG_FILE, REPORT_FILE, PAGE_FILE, TIMINGS_FILE, TOKENS_FOLDER, WORK_FOLDER, LOCK_FILE):
        path = folder / name
        is_file = name not in (TOKENS_FOLDER, WORK_FOLDER, LOCK_FILE)
        if path.is_symlink() or (is_file and not is_ours and path.exists()):
            but = "is a link" if path.is_symlink() else f"does, and the folder has no marker `{MARKER_FILE}`"
            raise DataError(
                f"`{path}` must not exist, or must be a file of an earlier `crosscut prepare`, but {but}. Move it "
                "away, or choose another `folder`."
            )


def _begin(stages: _StageList) -> None:
    """Mark the run as unfinished, and remove the folders of stages that this run does not have.

    If these folders stayed, a reader of the work folder could mistake the files of an older run for files of this run.
    """
    names = {stage.name for stage in stages.all}
    begin_work(Path(stages.config.folder), stages.work)
    mark_unfinished(stages.work)
    for path in sorted(stages.work.iterdir()):
        if path.is_dir() and path.name not in names and (left := remove_stage(stages.work, path.name)):
            echo(f"crosscut: {left}", err=True)


def _report(config: CorpusConfig, stages: _StageList, results: Sequence[StageResult]) -> Report:
    folder = Path(config.folder)
    report, timings = build_report(results, config, stages.work), measure_timings(results, config)
    write_toml(config, folder / CONFIG_FILE)
    write_json(folder / REPORT_FILE, report, indent=1)
    write_json(folder / TIMINGS_FILE, timings, indent=1)
    write_page(report, timings, folder / PAGE_FILE)
    return report


def explain_document(config: CorpusConfig, document_id: str) -> str:
    """Describe what each stage did to one document of a prepared corpus. Returns a text to print.

    `document_id` is `source/file#record`. Raises `DataError` if the corpus has no document with this id.
    """
    stages = _list_stages(config)
    return explain(Runs(stages.work, stages.lineage, config.duplicates.against), document_id)


def _list_stages(config: CorpusConfig) -> _StageList:
    """List the stages that a corpus needs, in order.

    Raises `DataError`, before any stage runs, if a list of domains or file types, a tokenizer or a test set does not
    exist.
    """
    stages = _StageList(config)
    stages.add(IngestStage(config=config))
    _add_url_filters(stages)
    _add_cleaning(stages)
    _add_language(stages)
    tokenizer = _add_tokenizer(stages)
    _add_length(stages, tokenizer)
    stages.add(*duplicate_stages(config, stages.lineage))
    stages.add(*leakage_stages(config.leakage, stages.work, stages.lineage))
    stages.add(
        tokens_stage(
            tokenizer=tokenizer,
            min_tokens=config.length.min_tokens,
            lineage=stages.lineage,
            sentences=config.tokens.has_sentences,
        )
    )
    stages.add(audit_stage(stages.lineage, config.seed))
    stages.add(packing_stage(config, tokenizer))
    return stages


class _StageList:
    """A growing list of stages. `lineage` says what the next stage finds in the work folder."""

    def __init__(self, config: CorpusConfig) -> None:
        self.config = config
        self.work = Path(config.folder) / WORK_FOLDER
        self.all: list[CorpusStage] = []
        self.lineage = READ

    def add(self, *stages: CorpusStage) -> None:
        """Append stages."""
        self.all += stages
        self.lineage = self.lineage.after(stages)

    def add_filter(
        self,
        name: str,
        make: Callable[..., Judge],
        *arguments: object,
        settings: Mapping[str, object],
        inputs: Paths = (),
    ) -> None:
        """Append a filter: a stage that decides for each document whether to drop the document.

        `make(*arguments)` returns the function that judges the documents of one part (an Arrow file of documents). The
        result depends on `settings` (JSON values) and on the files `inputs`. If a setting or a file changes, the
        filter runs again.
        """
        self.add(
            PartStage(
                name=name,
                version=1,
                function=judge_part,
                arguments=(make, arguments, json.dumps(settings)),
                settings=settings,
                inputs=inputs,
                lineage=self.lineage,
                yields=Yields.DROPS,
            )
        )


def _add_url_filters(stages: _StageList) -> None:
    urls = stages.config.urls
    if urls.domains or urls.types or urls.min_karma > 0:
        rules = UrlFilter(urls)
        stages.add_filter("urls", UrlFilter, urls, settings=rules.settings)
    _add_links(stages)
    if urls.duplicates:
        stages.add(*first_stages("url-duplicates", rule="same url", key=url_key, lineage=stages.lineage))


def _add_links(stages: _StageList) -> None:
    """Append the stages that join documents to lists of links, if a source has lists."""
    lists = find_lists(stages.config)
    if not lists:
        return
    min_karma = stages.config.urls.min_karma
    joined = tuple(
        LinksOfSource(source.name, source.require_link, tuple(lists[name].files(stages.work) for name in source.links))
        for source in stages.config.sources
        if source.links
    )
    settings = {
        "min_karma": min_karma,
        "sources": [[one.source, one.required, [[path.name for path in pair] for pair in one.files]] for one in joined],
        "lists": [[one.file.size, one.file.version] for one in lists.values()],
    }
    stages.add(lists_stage(list(lists.values()), min_karma))
    inputs = tuple(path for one in lists.values() for path in one.files(stages.work))
    stages.add_filter(LINKS, LinkFilter, min_karma, joined, settings=settings, inputs=inputs)


def _add_cleaning(stages: _StageList) -> None:
    cleaning = stages.config.cleaning
    cleaners = {source.name: source.cleaners for source in stages.config.sources if source.cleaners}
    finder = PageFinder.of(stages.config.sources) if stages.config.html.site_boilerplate else None
    if finder:
        stages.add(*site_stages(finder, stages.lineage))
    if not cleaning.repairs and not cleaners and not finder:
        return
    if cleaning.repairs:
        repair("", cleaning)  # fails here, before any stage runs, if ftfy is not installed
    plan = partial(_plan_cleaning, cleaning, cleaners, finder, stages.lineage)
    stages.add(PlannedStage(name=CLEANING, version=1, plan=plan, yields=Yields.DROPS | Yields.TEXTS))


def _plan_cleaning(
    config: CleaningConfig,
    cleaners: Mapping[str, tuple[str, ...]],
    finder: PageFinder | None,
    lineage: Lineage,
    work: Path,
) -> Sequence[StageTask]:
    sites = SiteBoilerplate.read(work, finder) if finder else None
    settings = cleaning_settings(config, cleaners)
    tasks = []
    for part, size in find_parts(work, lineage):
        of_part = sites if sites and part.name in sites.parts else None
        of_sites = {"site_boilerplate": [CUTTING_VERSION, of_part.finder.settings]} if of_part else {}
        tasks.append(
            StageTask(
                name=part.name,
                function=partial(clean_part, part, config, cleaners, of_part),
                inputs=(*part.files, *(of_part.files if of_part else ())),
                settings={**settings, **of_sites},
                size=size,
            )
        )
    return tasks


def _add_language(stages: _StageList) -> None:
    language = stages.config.language
    if language.keep:
        LanguageFilter(language)  # fails here if the detector is not installed or does not know a language
        settings = {**asdict(language), "detector": [language.detector, version(language.detector)]}
        stages.add_filter("language", LanguageFilter, language, settings=settings)


def _add_tokenizer(stages: _StageList) -> Path:
    """Append the stage that copies or trains the tokenizer, and return the path of its `tokenizer.json`."""
    tokens = stages.config.tokens
    given = ""
    if tokens.tokenizer:
        end = check_tokenizer(tokens).end_of_text
        given = f"{digest_of_given(Path(tokens.tokenizer))}, end of text {end}"
    plan = partial(_plan_tokenizer, stages.config, given, stages.lineage)
    stages.add(PlannedStage(name=TOKENIZER, version=1, plan=plan))
    return stages.work / TOKENIZER / TOKENIZER_NAME


def _plan_tokenizer(config: CorpusConfig, given: str, lineage: Lineage, work: Path) -> Sequence[StageTask]:
    parts = [] if given else [part for part, _ in find_parts(work, lineage)]
    trained = {
        "vocab_size": config.tokens.vocab_size,
        "tokenizers": version("tokenizers"),
        **objective_setting(config.tokens),
    }
    return [
        StageTask(
            name="copied" if given else "trained",
            function=partial(make_tokenizer, parts, config.tokens),
            inputs=tuple(file for part in parts for file in part.files),
            settings={"given": given} if given else trained,
        )
    ]


def _add_length(stages: _StageList, tokenizer: Path) -> None:
    length = stages.config.length
    stages.add_filter("length", LengthFilter, length, tokenizer, settings=asdict(length), inputs=(tokenizer,))


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock the folder, so that no other process prepares or reads the same corpus while this run changes its files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_own(folder / LOCK_FILE, "a")
    except OSError as error:
        raise DataError(
            f"`folder` must be writable, but `{folder}` is not: {error.strerror}. Choose another `folder`."
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"`{folder}` must be used by one `crosscut prepare` at a time, but another process is using it. "
                "Wait until that process has ended, or choose another `folder`."
            ) from None
        yield
