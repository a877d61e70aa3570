"""Explanation of hangs, measured: are stopped ranks named, are there false alarms, and what does the record cost?

    python benchmarks/recovery/hangs.py --stops 100            # SIGSTOP on a random rank in a random phase, 100 times
    python benchmarks/recovery/hangs.py --stops 100 --runs 2   # on two runs side by side
    python benchmarks/recovery/hangs.py --minutes 60           # normal running, with a busy process per core
    python benchmarks/recovery/hangs.py --cost                 # the demo's model at tensor 2
    python benchmarks/recovery/hangs.py --stops 20 --cost --sharding zero3   # data ranks share one copy of the model

`--stops` trains a tiny model on tensor 2 x data 2 ranks. Each time, it waits until a rank chosen at random runs a phase
chosen at random, stops the rank, waits for the report, and continues the rank. A report is right if it names this rank
and no other rank. The minimum bound is 30 s in a run of a user; here it is `--bound` seconds, so that 100 stops take
minutes and not an hour. The time of a report counts from SIGSTOP, less the bound that the report states.
"""

import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from timeit import timeit
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line, markdown
from benchmarks.machine import print_machine
from benchmarks.processes import free_port, join_ranks, session, told_in, wait_until
from benchmarks.recovery.runs import LAYOUTS
from crosscut.flight.reading import RankRecord, read_records
from crosscut.flight.record import MessageKind, ModelPart, Record, RecordWord, RunPhase
from crosscut.logbook.schema import WATCH_FOLDER

STOPPED = (
    RunPhase.DATA,
    RunPhase.FORWARD,
    RunPhase.BACKWARD,
    RunPhase.REDUCTION,
    RunPhase.CHECKPOINT,
    RunPhase.VALIDATION,
)
TINY = (
    "model.preset=laptop-tiny", "data.text=[\"builtin:state-of-the-union\"]", "data.vocab_size=1000",
    "training.batch_size=8", "training.sequence_length=64", "training.steps=1000000", "training.validate_every=6",
    "training.validation_sequences=32", "checkpoint.every=9", "training.compile=off",
)  # fmt: skip
FOUR = ("layout.tensor=2", "layout.data=2")
LIMIT = 60.0
"""Seconds after which a hang counts as not reported, beyond the bound."""


class Stop(NamedTuple):
    """One stop of a rank."""

    rank: int
    phase: RunPhase
    named: tuple[int, ...]
    """Ranks that the report names; empty without a report."""
    message: str
    """First message that the report calls missing; empty if it names none."""
    beyond: float
    """Seconds from the stop to the report, less the bound."""


@contextmanager
def training(folder: Path, num_ranks: int, bound: float, *settings: str) -> Iterator[None]:
    """Run in a folder, inside the context. Each rank is a process that this program starts."""
    port, common = free_port(), [sys.executable, __file__, "--rank", str(bound), f"output.folder={folder}", *settings]
    with ExitStack() as ranks:
        for rank in range(num_ranks):
            ranks.enter_context(session(common, folder.with_suffix(".log"), **join_ranks(rank, num_ranks, port)))
        yield


def train_rank(bound: float, settings: list[str]) -> None:
    """Train as one rank, with a smaller minimum of the bound."""
    from crosscut.cli.arguments import run_from
    from crosscut.training.job import run_training
    from crosscut.training.loop import Loop

    Loop.hang_bound = bound
    run_training(run_from(tuple(settings)))


def wait_for_steps(folder: Path, num_ranks: int, steps: int) -> dict[int, RankRecord]:
    """Records of all ranks after a number of steps."""

    def are_there() -> bool:
        records = read_records(folder / WATCH_FOLDER).values()
        return len(records) == num_ranks and all(record.words[RecordWord.STEPS] >= steps for record in records)

    if not wait_until(are_there, 300, every=0.05):
        sys.exit(f"The run in {folder} did not start:\n{told_in(folder.with_suffix('.log'))}")
    return read_records(folder / WATCH_FOLDER)


def stop_once(folder: Path, records: dict[int, RankRecord], choice: random.Random) -> Stop:
    """Stop a rank in a phase, both chosen at random, until the hang is reported."""
    known = set(folder.glob("hang-*.txt"))
    rank, phase = choice.choice(sorted(records)), choice.choice(STOPPED)
    pid, descriptor = records[rank].pid, records[rank].words[RecordWord.DESCRIPTOR]
    time.sleep(choice.random())
    with Path(f"/proc/{pid}/fd/{descriptor}").open("rb", buffering=0) as memory:

        def phase_now() -> int:
            return int.from_bytes(os.pread(memory.fileno(), 8, RecordWord.PHASE * 8), "little")

        wait_until(lambda: phase_now() == phase, 20, every=0.0)
        os.kill(pid, signal.SIGSTOP)
        begin = time.time()
        stopped_in = RunPhase(phase_now())

    def reports() -> list[Path]:
        return [path for path in set(folder.glob("hang-*.txt")) - known if path.read_text()]

    wait_until(lambda: bool(reports()), 20 * LIMIT, every=0.05)
    named, message, beyond = (), "", float("inf")
    for report in reports()[:1]:
        text = report.read_text()
        named = tuple(int(number) for number in re.findall(r"^DID NOT ARRIVE: rank (\d+)", text, re.MULTILINE))
        found = re.search(r"^  missing    (.*?), number", text, re.MULTILINE)
        message = found[1] if found else ""
        beyond = report.stat().st_mtime - begin - float(re.search(r"bound: (\d+) s", text)[1])
    os.kill(pid, signal.SIGCONT)
    steps = max(record.words[RecordWord.STEPS] for record in read_records(folder / WATCH_FOLDER).values())
    wait_for_steps(folder, len(records), steps + 2)
    return Stop(rank, stopped_in, named, message, beyond)


def stop_often(folder: Path, number: int, bound: float, seed: int, settings: tuple[str, ...]) -> list[Stop]:
    choice, stops = random.Random(seed), []
    with training(folder, 4, bound, *TINY, *FOUR, *settings):
        records = wait_for_steps(folder, 4, 3)
        for _ in range(number):
            stops.append(stop_once(folder, records, choice))
            print(f"  rank {stops[-1].rank} in {stops[-1].phase.name.lower()}: named {stops[-1].named}, "
                  f"{stops[-1].beyond:.1f} s beyond the bound; missing: {stops[-1].message}", flush=True)  # fmt: skip
    return stops


def measure_stops(number: int, runs: int, bound: float, settings: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as root:
        shares = [number // runs + (i < number % runs) for i in range(runs)]
        with ThreadPoolExecutor(runs) as pool:
            done = [
                pool.submit(stop_often, Path(root) / f"run{i}", n, bound, 7 + i, settings) for i, n in enumerate(shares)
            ]
        found = [stop for future in done for stop in future.result()]
    table = []
    for phase in (*STOPPED, *sorted({stop.phase for stop in found} - set(STOPPED)), None):
        rows = [stop for stop in found if phase in (stop.phase, None)]
        if rows:
            right = sum(stop.named == (stop.rank,) for stop in rows)
            beyond, messages = [stop.beyond for stop in rows], sum(bool(stop.message) for stop in rows)
            name = phase.name.lower() if phase is not None else "all"
            table.append([name, len(rows), f"{right} of {len(rows)}", f"{messages} of {len(rows)}",
                          f"{statistics.median(beyond):.1f}", f"{max(beyond):.1f}"])  # fmt: skip
    head = ("phase", "stops", "rank named", "message named", "median s beyond the bound", "largest")
    print(f"\n{markdown(head, table)}")


def measure_alarms(minutes: float) -> None:
    """Count the reports of a run that does not hang, while one other process per core is busy."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "run"
        with ExitStack() as busy, training(folder, 4, 30.0, *TINY, *FOUR):
            for _ in range(os.cpu_count() or 1):
                busy.enter_context(session([sys.executable, "-c", "while True: pass"], folder.with_suffix(".busy.log")))
            wait_for_steps(folder, 4, 2)
            time.sleep(60 * minutes)
            records = read_records(folder / WATCH_FOLDER)
        print(
            f"{minutes:g} minutes, {records[0].words[RecordWord.STEPS]} steps: "
            f"{len(list(folder.glob('hang-*')))} reports"
        )


def seconds_of(record: Record, calls: int = 200_000) -> tuple[float, float, float]:
    """Processor time of the record of one message, of a phase, and of a place with its hook, in seconds."""
    import torch

    group, kind = record.add_group("group", "tensor", [0, 1]), int(MessageKind.ALL_REDUCE)
    x = torch.ones(1, requires_grad=True)
    names = {"record": record, "group": group, "kind": kind, "x": x, "forward": RunPhase.FORWARD, "mlp": ModelPart.MLP}
    message = "record.started(record.start(kind, group, 64), 0); record.waited(record.wait(0))"
    place = "record.at(mlp); x.register_hook(record.at)"
    numbers = {message: calls, "record.phase(forward)": calls, place: calls // 100}
    seconds = [timeit(text, timer=time.process_time, number=n, globals=names) / n for text, n in numbers.items()]
    return seconds[0], seconds[1], seconds[2]


def measure_cost(settings: tuple[str, ...]) -> None:
    record = Record()
    record.open(rank=0, world_size=2)
    message, phase, place = seconds_of(record)
    record.close()
    with tempfile.TemporaryDirectory() as root, training(Path(root) / "run", 2, 30.0, *settings):
        first = wait_for_steps(Path(root) / "run", 2, 5)[0].words
        begin = time.monotonic()
        time.sleep(60)
        last, seconds = read_records(Path(root) / "run" / WATCH_FOLDER)[0].words, time.monotonic() - begin
    steps = last[RecordWord.STEPS] - first[RecordWord.STEPS]
    messages = (last[RecordWord.MESSAGES] - first[RecordWord.MESSAGES]) / steps
    thread = (last[RecordWord.THREAD] - first[RecordWord.THREAD]) / 1e9 / steps
    places, phases = 2 + 3 * 4, 8  # parts of the demo's four layers, and phases of a step
    recording = messages * message + phases * phase + places * place
    step = seconds / steps
    print(f"one message {message * 1e6:.2f} us, one phase {phase * 1e6:.2f} us, one place {place * 1e6:.2f} us")
    print(f"a step: {step * 1e3:.0f} ms, {messages:.0f} messages, {recording * 1e6:.0f} us of records, "
          f"{thread * 1e6:.0f} us of the thread")  # fmt: skip
    print(f"cost: {(recording + thread) / step:.4%} of a step")


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        train_rank(float(sys.argv[2]), sys.argv[3:])
        return
    parser = command_line(__doc__)
    parser.add_argument("--stops", type=int, default=0, help="number of stops")
    parser.add_argument("--runs", type=int, default=1, help="number of runs side by side")
    parser.add_argument("--bound", type=float, default=2.0, help="minimum of the bound during --stops, in seconds")
    parser.add_argument("--minutes", type=float, default=0.0, help="minutes of normal running")
    parser.add_argument("--sharding", choices=["zero2", "zero3"], help="shard the model over two data ranks")
    parser.add_argument("--cost", action="store_true", help="measure the cost of the record")
    options = parser.parse_args()
    sharding = (f"layout.sharding={options.sharding}",) if options.sharding else ()
    print_machine("torch")
    if options.stops:
        measure_stops(options.stops, options.runs, options.bound, sharding)
    if options.minutes:
        measure_alarms(options.minutes)
    if options.cost:
        measure_cost((*LAYOUTS["data 2" if sharding else "tensor 2"], *sharding))


if __name__ == "__main__":
    main()
