"""Give hostile inputs to everything in Crosscut that reads or listens, and check that it answers with a message.

    python benchmarks/fuzz.py --minutes 120 --keep findings --json fuzz.json --write docs/tables/hostile-inputs.md
    python benchmarks/fuzz.py --only folders checkpoints --minutes 20
    python benchmarks/fuzz.py --replay 0/folders/1234      # one case again, with its output
    python benchmarks/fuzz.py --replay findings/.../case.json
    python benchmarks/fuzz.py --tiny

Eleven kinds of cases run one after another, each until its number of cases is reached or its share of the time has
passed. A case is a valid input, made by Crosscut itself, with one to four edits: numbers that are huge, negative or not
a number, integers of 5,000 digits, lone surrogates, NUL, terminal escapes, 100,000 brackets, wrong types, missing and
repeated keys, flipped, cut and removed bytes, and folders, pipes and loops in place of files. The real commands run, in
forks of a process that has imported everything, on a terminal of their own. Requests go to a real `crosscut serve`.

For every case there must be no exception that reaches the user, no end after more than 10 s, no more than 1 GiB of
memory above the idle process, no control character on the terminal, and no exit status that is not documented. A
damaged checkpoint must not verify, and damaged sources must be told. An honest request must be answered in time, and as
before, after every batch of requests.

One kind, `metadata`, adds, removes or changes one key of a file beside the weights of a published model, and compares
logits and tokens with `transformers` and PEFT: each case is computed as there, or refused, or a line names the key.

The last kind is files of 64 kB to 16 MB that repeat one piece of a format, such as a tag that is never closed. Each
reader, and `prepare` with all its stages, must stay below a stated processor time and memory per byte.

Hypothesis draws the other cases from the seed. Each finding is written to `--keep`, one folder per cause (the
innermost place in the package), with its inputs, its output, and `case.json`, which `--replay` and
`tests/benchmarks/test_fuzz.py` take. The exit status is 1 if there is a finding.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import crosscut.cli.main
import crosscut.corpus
import crosscut.evaluation
import crosscut.generation
import crosscut.pretrained
import crosscut.serving.protocol.chat
import crosscut.training  # noqa: F401
from benchmarks.commands import aligned, command_line, markdown, progress_bar, replace_section, write_figures
from benchmarks.fuzzing.cases import BATCH, Case, draw
from benchmarks.fuzzing.findings import CLASSES
from benchmarks.fuzzing.kinds import KINDS, Kind
from benchmarks.fuzzing.metadata.run import METADATA
from benchmarks.fuzzing.repetition.run import REPETITION
from benchmarks.fuzzing.repetition.run import cases as repeated_cases
from benchmarks.fuzzing.requests import SERVICES, Server, run_requests
from benchmarks.fuzzing.sandbox import LONGEST, MEMORY_BYTES, end_with
from benchmarks.fuzzing.valid import make_valid
from benchmarks.fuzzing.worker import Figures, Setting, run_batch, run_case, strategy_of
from benchmarks.machine import describe_machine, machine_line, print_machine
from crosscut.config.system.machine import available_cores

TINY = 24
"""Cases of each kind with `--tiny`."""

_PACKAGES = ("torch", "tokenizers", "safetensors", "hypothesis")


@dataclass
class Result:
    """Figures of all kinds."""

    seed: int
    planned: dict[str, int]
    figures: dict[str, Figures] = field(default_factory=dict)

    @property
    def is_well(self) -> bool:
        """Whether there is no finding."""
        return not any(figures.findings for figures in self.figures.values())

    def to_json(self) -> dict[str, Any]:
        """Return all figures as values for JSON."""
        kinds = {}
        for name, figures in self.figures.items():
            findings = [finding.to_json() for finding in figures.findings.values()]
            told = {"planned": self.planned[name], "failures": failures_of(figures), "findings": findings}
            kinds[name] = {**asdict(figures), **told}
        bounds = {"seconds": LONGEST, "bytes": MEMORY_BYTES}
        machine = describe_machine(*_PACKAGES)
        return {"machine": machine, "seed": self.seed, "bounds": bounds, "well": self.is_well, "kinds": kinds}


def failures_of(figures: Figures) -> dict[str, int]:
    """Number of failures of each class. Classes without failures are left out."""
    found: dict[str, int] = {}
    for finding in figures.findings.values():
        found[finding.failure] = found.get(finding.failure, 0) + finding.count
    return found


def fuzz(options: argparse.Namespace, setting: Setting) -> Result:
    """Run all kinds."""
    kinds = [kind for kind in KINDS.values() if not options.only or kind.name in options.only]
    result = Result(setting.seed, {kind.name: TINY if options.tiny else kind.count for kind in kinds})
    end = time.monotonic() + options.minutes * 60
    with _pool(options.workers) as pool, progress_bar() as bar:
        shares = sum(kind.share for kind in kinds)
        for kind in kinds:
            now = time.monotonic()
            until = now + max(0.0, end - now) * kind.share / shares
            shares -= kind.share
            count = result.planned[kind.name]
            task = bar.add_task(kind.name, total=count, told="")
            figures = result.figures[kind.name] = Figures()
            for done in _batches(kind, count, replace(setting, deadline=until), pool, figures, options.workers):
                figures.join(done)
                figures.seconds = time.monotonic() - now
                failures = (f"{name} {number}" for name, number in failures_of(figures).items())
                left = f"{figures.rate:,.1f}/s, at most {max(0.0, until - time.monotonic()):,.0f} s more"
                bar.update(task, completed=figures.cases, told=", ".join([left, *failures]))
            bar.stop_task(task)
    return result


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that are forked before this process has a second thread."""
    fork = get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=fork, initializer=end_with, initargs=(os.getpid(),)) as pool:
        wait([pool.submit(time.sleep, 0.05) for _ in range(workers)])
        yield pool


def _batches(
    kind: Kind, count: int, setting: Setting, pool: ProcessPoolExecutor, figures: Figures, workers: int
) -> Iterator[Figures]:
    """Run the batches of a kind until all cases are run or the time is over, and yield the figures of each."""
    sizes = {batch: min(BATCH, count - batch * BATCH) for batch in range(-(-count // BATCH))}
    if kind.name in SERVICES:
        server: list[Server] = []
        try:
            for batch, size in sizes.items():
                if time.monotonic() > setting.deadline:
                    return
                yield run_requests(kind.name, batch, size, replace(setting, known=frozenset(figures.findings)), server)
        finally:
            for one in server:
                one.stop()
        return
    waiting, under_way = list(sizes), set[Future[Figures]]()
    while under_way or (waiting and time.monotonic() < setting.deadline):
        while waiting and len(under_way) < workers and time.monotonic() < setting.deadline:
            known = replace(setting, known=frozenset(figures.findings))
            under_way.add(pool.submit(run_batch, kind.name, waiting[0], sizes[waiting[0]], known))
            del waiting[0]
        done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
        yield from (future.result() for future in done)


def table(result: Result) -> list[list[str]]:
    """Rows of the closing table, its head first."""
    rows = [["kind", "cases", "failures", "causes", "cases/s", "longest s", "peak MiB above idle"]]
    for name, figures in result.figures.items():
        failures = ", ".join(f"{failure} {number:,}" for failure, number in failures_of(figures).items()) or "none"
        rows.append([KINDS[name].title, f"{figures.cases:,} of {result.planned[name]:,}", failures,
                     f"{len(figures.findings):,}", f"{figures.rate:,.1f}", f"{figures.longest:.1f}",
                     f"{figures.peak >> 20:,}"])  # fmt: skip
    return rows


def rates_table(result: Result) -> list[list[str]]:
    """Rows of the table of readers, its head first. Empty if no files were built by repetition."""
    found = {reader: rates for figures in result.figures.values() for reader, rates in figures.rates.items()}
    if not found:
        return []
    rows = [["reader", "files", "size, MB", "most time, s", "µs per byte", "pattern", "most memory, MiB",
             "bytes per byte", "pattern"]]  # fmt: skip
    for reader, rates in sorted(found.items()):
        for size in sorted(rates.seconds):
            (seconds, slow), (used, large) = rates.seconds[size], rates.bytes[size]
            rows.append([reader, f"{rates.cases:,}", f"{size / 1e6:g}", f"{seconds:.2f}", f"{seconds / size * 1e6:.2f}",
                         f"`{slow}`", f"{used >> 20:,}", f"{used / size:.0f}", f"`{large}`"])  # fmt: skip
    return rows


def report(result: Result) -> None:
    """Print the tables and the findings."""
    print_machine(*_PACKAGES)
    print(f"seed {result.seed}; bounds: {LONGEST:.0f} s and {MEMORY_BYTES >> 20:,} MiB above the idle process\n")
    for rows in filter(None, (table(result), rates_table(result))):
        print(f"{aligned(rows, left=len(rows[0]))}\n")
    for figures in result.figures.values():
        for finding in sorted(figures.findings.values(), key=lambda one: one.key):
            print(f"\n{finding.failure} x {finding.count}  {finding.seed}/{finding.kind}/{finding.case.number}  "
                  f"{printable(finding.place)}")  # fmt: skip
            print(f"  {printable(finding.detail)}\n  {printable(finding.reproduction)}")
            print(f"  {printable('; '.join(map(str, finding.case.edits)))}")
    print(f"\n{'no finding' if result.is_well else 'FAILED: ' + '; '.join(used_classes(result))}")


def used_classes(result: Result) -> list[str]:
    """Meaning of each class that has failures."""
    names = {name for figures in result.figures.values() for name in failures_of(figures)}
    return [f"{name}: {CLASSES[name]}" for name in CLASSES if name in names]


def printable(text: str, most: int = 400) -> str:
    """Text of a hostile input that is safe for a terminal."""
    return text.encode("ascii", "backslashreplace").decode().translate({i: f"\\x{i:02x}" for i in range(32)})[:most]


def write_page(result: Result, page: Path) -> None:
    """Replace the figures on a page of the documentation: those of the kinds that have run."""
    others = replace(result, figures={name: one for name, one in result.figures.items() if name != REPETITION})
    for name, rows in (("fuzz", table(others) if others.figures else []), (REPETITION, rates_table(result))):
        if rows:
            _write_section(page, name, rows, result.seed)


def _write_section(page: Path, name: str, rows: list[list[str]], seed: int) -> None:
    replace_section(page, name, f"{markdown(rows[0], rows[1:])}\n\nSeed {seed}; {machine_line(*_PACKAGES)}.")


def replay(name: str, setting: Setting) -> bool:
    """Run one case again and print what it does. Returns whether all is well."""
    if name.endswith(".json"):
        case = Case.read(json.loads(Path(name).read_text(encoding="utf-8")))
    else:
        seed, kind, number = name.split("/")
        if kind == REPETITION:
            case = repeated_cases()[int(number)]
        elif kind == METADATA:
            case, setting = Case(METADATA, int(number), "", ()), replace(setting, seed=int(seed))
        else:
            batch = draw(strategy_of(kind, setting.valid), int(seed), kind, int(number) // BATCH)
            case = batch[int(number) % BATCH]
    for edit in case.edits:
        print(f"edit  {printable(str(edit))}")
    if case.kind in SERVICES:
        sys.exit("a request runs with its batch: see `request.bin` in the folder of the finding")
    findings, outcome = run_case(case, setting)
    print(case.base)
    print(f"ended with {outcome.ended_by or outcome.status} after {outcome.seconds:.2f} s, {outcome.processor:.2f} s "
          f"of the processor, {outcome.peak >> 20:,} MiB above the idle process")  # fmt: skip
    print(printable(outcome.output.decode(errors="backslashreplace"), most=4000))
    print(printable(outcome.trace, most=8000).replace("\\x0a", "\n"))
    for finding in findings:
        print(f"{finding.failure}  {printable(finding.place)}  {printable(finding.detail)}")
    return not findings


def main(arguments: list[str] | None = None) -> None:
    """Fuzz and print. The exit status is 1 if there is a finding."""
    parser = command_line(__doc__, tiny=f"only {TINY} cases of each kind", figures="write")
    parser.add_argument("--minutes", type=float, default=120.0, help="time for all kinds together")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), help="kinds to run")
    parser.add_argument("--workers", type=int, default=available_cores(), help="processes that run cases")
    parser.add_argument("--keep", type=Path, help="write what reproduces each finding to this folder")
    parser.add_argument(
        "--valid", type=Path, help="keep the valid inputs in this folder, and use them if they are there"
    )
    parser.add_argument("--replay", metavar="SEED/KIND/CASE|case.json", help="run one case again")
    parser.add_argument("--write", type=Path, metavar="PAGE.md", help="also write the figures to this page")
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or options.workers < 1:
        parser.error("`--minutes` must be above 0 and `--workers` at least 1.")
    memory = Path("/dev/shm")  # where a disk that is slow to sync does not count
    scratch = Path(tempfile.mkdtemp(prefix="crosscut-fuzz-", dir=memory if memory.is_dir() else None))
    try:
        valid = (options.valid or scratch / "valid").resolve()
        if not (valid / "requests").is_dir() and set(options.only or [""]) - {REPETITION, METADATA}:
            make_valid(valid, tensor=1 if options.tiny else 2)
        setting = Setting(valid, scratch, options.keep and options.keep.resolve(), options.seed)
        if options.replay:
            sys.exit(not replay(options.replay, setting))
        result = fuzz(options, setting)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    report(result)
    write_figures(options.json, result.to_json())
    if options.write:
        write_page(result, options.write)
    sys.exit(not result.is_well)


if __name__ == "__main__":
    main()
