"""Run the readers, and all stages of `prepare`, on files that repeat one piece, and measure time and memory per byte.

The time is processor time, so other programs on the machine do not matter. A file whose time or memory is above the
limits is a finding. The larger files of its pattern are then left out.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from benchmarks.fuzzing.cases import Case
from benchmarks.fuzzing.findings import Finding
from benchmarks.fuzzing.repetition.patterns import PREPARE, SIZES, TOKENIZE, Pattern, patterns
from benchmarks.fuzzing.sandbox import Job, Outcome, run
from crosscut.config.corpora import SourceConfig
from crosscut.corpus.readers import ReaderSettings, find_reader
from crosscut.corpus.readers.files import find_source

REPETITION = "repetition"
"""Name of the kind."""

READ = "@read"
"""Word that takes the place of a command: read a file with the reader of its format."""

SECONDS, SECONDS_PER_BYTE = 1.0, 2e-6
"""Processor time that reading a file may take: 10 times the usual time of the slowest reader, and a second to start."""

BYTES, BYTES_PER_BYTE = 128 << 20, 100
"""Memory that reading a file may take."""

PREPARE_SECONDS, PREPARE_SECONDS_PER_BYTE = 10.0, 10e-6
"""Processor time that all stages of `prepare` may take for a document. The first seconds are for small files, imports
and the start of processes."""

PREPARE_BYTES, PREPARE_BYTES_PER_BYTE = 512 << 20, 150
"""Memory that all stages of `prepare` may take for a document. A document of marks or accents has nearly
a token for each of its bytes, and such documents take the most."""

_CORPUS = """\
folder = "out"
language.keep = []
length.min_tokens = 0
tokens = {vocab_size = 400, num_shards = 1, train_to_validation = 1}
engine.workers = 1
leakage.test_sets = ["test.jsonl"]

[[sources]]
name = "s"
files = ["a.txt", "more.txt"]
"""


_RUN = """\
data = {text = ["a.jsonl", "more.txt"], vocab_size = 400, num_shards = 1}
model = {num_layers = 2, hidden_size = 32, num_heads = 4, max_sequence_length = 64}
training = {sequence_length = 32, validation_sequences = 1}
output.folder = "out"
"""

_COMMANDS = {PREPARE: ("corpus.toml", _CORPUS), TOKENIZE: ("run.toml", _RUN)}
"""Name and content of the file that `crosscut prepare` gets, by the patterns' `reader`."""


@dataclass
class Rates:
    """The largest figures of a reader."""

    cases: int = 0
    seconds: dict[int, tuple[float, str]] = field(default_factory=dict)
    """Most processor time for a file, and the name of its pattern, by the size of the file."""
    bytes: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Most memory above the idle process, and the name of the pattern, by the size of the file."""

    def note(self, size: int, name: str, outcome: Outcome) -> None:
        """Count one file."""
        self.cases += 1
        self.seconds[size] = max(self.seconds.get(size, (0.0, "")), (outcome.processor, name))
        self.bytes[size] = max(self.bytes.get(size, (0, "")), (outcome.peak, name))

    def join(self, other: "Rates") -> None:
        """Add the figures of other files."""
        self.cases += other.cases
        for size, most in other.seconds.items():
            self.seconds[size] = max(self.seconds.get(size, most), most)
        for size, largest in other.bytes.items():
            self.bytes[size] = max(self.bytes.get(size, largest), largest)


@cache
def all_patterns() -> dict[str, Pattern]:
    """Patterns, by `reader: name`."""
    found = {f"{pattern.reader}: {pattern.name}": pattern for pattern in patterns()}
    assert len(found) == len(list(patterns())), "two patterns have the same name"
    return found


def cases() -> list[Case]:
    """All cases, the smallest files first. Many cases of each reader come early."""
    names = sorted(all_patterns(), key=lambda name: (hash_of(name), name))
    pairs = [(size, name) for size in SIZES for name in names]
    return [Case(REPETITION, number, f"{size}: {name}", ()) for number, (size, name) in enumerate(pairs)]


def hash_of(name: str) -> int:
    """Number that puts the patterns in a fixed order in which the readers alternate."""
    return sum(ord(letter) * (place + 7) for place, letter in enumerate(name)) % 1009


def run_one(case: Case, scratch: Path) -> tuple[list[Finding], Outcome, Rates]:
    """Build and read the file of a case, and judge its time and memory."""
    size_text, _, name = case.base.partition(": ")
    size, pattern = int(size_text), all_patterns()[name]
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        folder = Path(place)
        content = pattern.build(size)
        (folder / f"a{pattern.suffix}").write_bytes(content)
        seconds, most = limits(pattern.reader, max(size, len(content)))
        if pattern.reader in _COMMANDS:
            config, settings = _COMMANDS[pattern.reader]
            (folder / config).write_text(settings)
            _write_texts(folder)
            job = Job(folder, ("prepare", config), processor=seconds + 1)
        else:
            job = Job(folder, (READ, f"a{pattern.suffix}", pattern.reader), processor=seconds + 1)
        (outcome,) = run([job], longest=60 + 10 * seconds)
    rates = Rates()
    rates.note(size, pattern.name, outcome)
    found = [
        Finding(kind=REPETITION, failure=failure, place=name, detail=detail, case=case,
                reproduction=f"python benchmarks/fuzz.py --replay 0/{REPETITION}/{case.number}", trace=outcome.trace,
                output=outcome.output)
        for failure, detail in _judge(outcome, size, seconds, most, is_read=pattern.reader not in _COMMANDS)
    ]  # fmt: skip
    return found, outcome, rates


def limits(reader: str, size: int) -> tuple[float, int]:
    """Processor time in seconds and memory in bytes that a file of `size` bytes may take."""
    if reader in _COMMANDS:
        return PREPARE_SECONDS + PREPARE_SECONDS_PER_BYTE * size, PREPARE_BYTES + PREPARE_BYTES_PER_BYTE * size
    return SECONDS + SECONDS_PER_BYTE * size, BYTES + BYTES_PER_BYTE * size


def _judge(outcome: Outcome, size: int, seconds: float, most: int, *, is_read: bool) -> Iterator[tuple[str, str]]:
    if outcome.hung or outcome.ended_by == "SIGPROF" or outcome.processor > seconds:
        yield "slow", f"more than {seconds:.1f} s of processor time for {size:,} bytes"
    elif outcome.ended_by:
        yield "crash", f"ended by {outcome.ended_by}"
    elif outcome.error:
        yield "memory" if "MemoryError" in outcome.error else "traceback", outcome.error
    elif outcome.status not in ((0,) if is_read else (0, 2, 65)):
        yield "status", f"exit status {outcome.status}"
    if outcome.peak > most:
        yield "memory", f"{outcome.peak >> 20:,} MiB for {size:,} bytes, but at most {most >> 20:,} MiB are allowed"


def _write_texts(folder: Path) -> None:
    """Write some text that can be trained on, and a test set."""
    lines = [f"{number} is a number, and the numbers after it are {number + 1} and more." for number in range(2000)]
    (folder / "more.txt").write_text("\n".join(lines))
    (folder / "test.jsonl").write_text(
        json.dumps({"text": "the curious passage that only the test set contains, twice"})
    )


def read(path: str, kind: str) -> int:
    """Read a file with the reader of its format."""
    (file,) = find_source(SourceConfig(name="s", files=(path,), format=kind)).files
    num_items = sum(1 for _ in find_reader(file.format)(file, ReaderSettings()))
    sys.stdout.write(f"{num_items} items\n")
    return 0
