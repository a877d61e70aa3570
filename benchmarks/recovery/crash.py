"""Kill training runs and damage their checkpoints, again and again, and check that the runs end like runs that were
never killed.

    python benchmarks/recovery/crash.py                               # 200 kills and 1,000 damages, about an hour
    python benchmarks/recovery/crash.py --kills 20 --damages 100
    python benchmarks/recovery/crash.py --kills 0 --damages 10000     # only damages

There are four layouts of two ranks: tensor, data, pipeline and context. On each layout, a run first trains to its end
and keeps every checkpoint. This is the unharmed run. Then the same run starts again in another folder. SIGKILL hits the
launching process, one of the ranks, or the whole process group, in turns, at random instants: some while the run
starts, most while it trains and saves. After every third kill, files of the newest checkpoint are damaged at random as
well (`damages.py`). Then the same command (`crosscut train ... --resume auto`) resumes the run.

Checks after every kill: all processes of the run end within seconds, although only one was killed; every folder with
the name of a checkpoint holds, bit by bit, the parameters and optimizer state of the unharmed run at that step. Checks
at the end: the last checkpoint is that of the unharmed run, too, and `metrics.jsonl` holds every step once with the
loss of the unharmed run.

The other damages hit copies of the unharmed runs' checkpoints. `crosscut checkpoint verify` and a resumed run use the
same functions as these checks: each damage must be found and named, and the newest good checkpoint must be chosen.
"""

import argparse
import contextlib
import io
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.progress import Progress

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import aligned, command_line, progress_bar, work_folder, write_figures
from benchmarks.faulting.scene import Scene
from benchmarks.machine import print_machine
from benchmarks.processes import have_ended, wait_until
from benchmarks.recovery.damages import Damage, Found, damage_at_random, find_all
from benchmarks.recovery.runs import LAYOUTS, TINY, checkpoints_of, digests, losses_of, newest_step, write_text
from crosscut.checkpoint import find_damage, folder_at, latest_good_checkpoint
from crosscut.checkpoint.folders import PASSED_OVER_FILE
from crosscut.logbook.schema import METRICS_FILE

STEPS_BETWEEN_CHECKPOINTS = 2
MOST_LOST = 2 * STEPS_BETWEEN_CHECKPOINTS
"""Maximum number of steps that a kill may lose. A checkpoint that is due waits until the previous checkpoint is
written.
"""
STEPS_BEFORE_KILL = 8
"""Maximum number of steps from the first step after a start to the kill."""
STARTING = 0.1
"""Share of the kills that hit the run while it starts."""
GONE_WITHIN = 30.0
"""Seconds within which all processes must end after one of them was killed, also on a machine that other programs keep
busy. On an idle machine, the longest time of 100 kills was 3.6 s."""
LONGEST_START = 600.0
"""Seconds within which a run must start and reach a step, also on a machine that other programs keep busy."""
TARGETS = ("launcher", "rank 0", "rank 1", "all")
DAMAGED_EVERY = 3
"""Number of kills after which the newest checkpoint is also damaged."""

RUN = (
    *TINY, "data.verify=false", "training.micro_batch_size=1", "training.validate_every=7",
    f"checkpoint.every={STEPS_BETWEEN_CHECKPOINTS}",
)  # fmt: skip


@dataclass
class Kill:
    """One kill and its effects."""

    layout: str
    target: str
    seconds: float
    """Seconds from the start of the process to the kill."""
    steps: int
    """Steps that the run had done, over all starts."""
    resumes_at: int = 0
    """Step of the newest checkpoint after the kill."""
    saving: bool = False
    """Whether a checkpoint was left half written."""
    seconds_to_end: float = 0.0
    """Seconds from the kill until the last process of the run had ended."""
    damages: list[Damage] = field(default_factory=list)
    """Damages to the newest checkpoint after the kill."""

    @property
    def lost(self) -> int:
        """Steps that the resumed run has to repeat."""
        return self.steps - self.resumes_at


@dataclass
class Result:
    """Effects of all kills."""

    kills: list[Kill] = field(default_factory=list)
    compared: int = 0
    """Number of checkpoints that were compared with the unharmed run."""
    damaged: list[str] = field(default_factory=list)
    """Checkpoints that differ or cannot be read, and other failed checks."""
    seconds: float = 0.0
    found: Found = field(default_factory=Found)
    """Damages of copies."""


class Run(Scene):
    """A run whose starts are new processes, as those of a user are."""

    def __init__(self, folder: Path, text: Path, layout: str, steps: int, *, keep: int) -> None:
        more = (f"training.steps={steps}", f"checkpoint.keep={keep}")
        super().__init__(folder, layout, False, None, text, more, RUN)

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Start or resume the run. On exit, no process is left."""
        self.start()
        try:
            yield
        finally:
            if self.status is None:
                self.stop_all()

    def complete(self) -> None:
        """Let the run go on to its end."""
        with self.started():
            self.has_ended(float("inf"))
        if self.status:
            sys.exit(f"the run must end well, but exited with {self.status}:\n{self.told()[-4000:]}")

    def half_written(self) -> set[tuple[str, int]]:
        """List the hidden files beside the checkpoints: checkpoints that are being written or removed."""
        return {(path.name, path.stat().st_mtime_ns) for path in self.checkpoints.glob(".*")}

    def metrics_file(self) -> int:
        """Return the inode of `metrics.jsonl`. Every start writes a new file with the rows that are still valid."""
        file = self.run / METRICS_FILE
        return file.stat().st_ino if file.exists() else 0

    def require(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds while the run trains."""
        if not wait_until(lambda: condition() or self.has_ended(), LONGEST_START) or self.has_ended():
            sys.exit(f"the run must go on training, but did not:\n{self.told()[-4000:]}")

    def kill_now(self, target: str) -> float:
        """Kill the launching process, a rank (if all have started), or all; return the seconds until all have ended."""
        family = psutil.Process(self.pid).children(recursive=True)
        if target == "all":
            os.killpg(self.pid, signal.SIGKILL)
        elif target == "launcher" or len(self.ranks()) < 2:
            self.kill("launcher")
        else:
            self.kill(int(target[-1]))
        killed = time.monotonic()
        self.has_ended(2 * GONE_WITHIN)
        if not have_ended(family, 2 * GONE_WITHIN):
            sys.exit(f"no process may outlive its run, but after a kill of {target} one of these does: {family}")
        return time.monotonic() - killed


def kill_at_random(run: Run, target: str, chance: random.Random) -> Kill:
    """Start the run, kill it at a random instant, and wait until all its processes have ended."""
    before, half_written, file = newest_step(run.run), run.half_written(), run.metrics_file()
    with run.started():
        began = time.monotonic()
        if chance.random() < STARTING:
            time.sleep(chance.uniform(0.0, 6.0))
        else:
            run.require(lambda: run.metrics_file() != file)
            wanted = before + 1 + chance.randrange(STEPS_BEFORE_KILL)
            run.require(lambda: run.steps_done() >= wanted)
            time.sleep(chance.uniform(0.0, 0.05))  # any instant in a step or a save
        kill = Kill(run.layout, target, time.monotonic() - began, steps=0)
        kill.seconds_to_end = run.kill_now(target)
    kill.steps, kill.resumes_at = max(run.steps_done(), before), newest_step(run.run)
    kill.saving = bool(run.half_written() - half_written)
    return kill


def check(run: Run, unharmed: dict[int, dict[str, str]], result: Result, seen: set[tuple[str, int]]) -> None:
    """Compare every checkpoint that the run considers to be complete, unless the checkpoint was compared before."""
    for step, folder in checkpoints_of(run.run).items():
        key = (folder.name, folder.stat().st_mtime_ns)
        if key in seen or (folder / PASSED_OVER_FILE).exists():
            continue
        seen.add(key)
        result.compared += 1
        try:
            result.damaged += find_damage(folder_at(folder))
            same = digests(folder) == unharmed[step]
        except Exception as error:
            result.damaged.append(f"{folder.name}: {error}")
        else:
            if not same:
                result.damaged.append(f"{folder.name}: differs from the unharmed run")


def crash(folder: Path, options: argparse.Namespace) -> Result:
    """Do all kills and damages, and compare each run at its end."""
    text = write_text(folder, copies=5)
    result, chance, began = Result(), random.Random(options.seed), time.monotonic()
    folders = {layout: folder / layout.replace(" ", "-") for layout in options.layouts}
    with progress_bar() as bar:
        for i, layout in enumerate(options.layouts):
            kills = len(range(i, options.kills, len(options.layouts)))
            crash_one(folders[layout], text, layout, kills, (result, chance, bar))
        roots = [place / "unharmed" / "run" / "checkpoints" for place in folders.values()]
        result.found = find_all(roots, options.damages, chance, bar)
    result.damaged += result.found.lost
    result.seconds = time.monotonic() - began
    return result


def crash_one(
    folder: Path, text: Path, layout: str, kills: int, so_far: tuple[Result, random.Random, Progress]
) -> None:
    """Do the kills on one layout, one after another, and compare the run at its end."""
    result, chance, bar = so_far
    steps = 2 * STEPS_BEFORE_KILL + kills * STEPS_BEFORE_KILL
    task = bar.add_task(layout, total=kills, told=f"unharmed run of {steps} steps")
    whole = Run(folder / "unharmed", text, layout, steps, keep=steps)
    whole.complete()
    unharmed = {step: digests(path) for step, path in checkpoints_of(whole.run).items()}
    killed, seen = Run(folder / "killed", text, layout, steps, keep=4), set[tuple[str, int]]()
    shutil.copytree(whole.tokens, killed.tokens)
    for number in range(kills):
        kill = kill_at_random(killed, TARGETS[number % len(TARGETS)], chance)
        result.kills.append(kill)
        check(killed, unharmed, result, seen)
        if number % DAMAGED_EVERY == DAMAGED_EVERY - 1:
            damage_newest(killed, kill, chance, seen)
        told = f"{kill.target} at step {kill.steps}, resumes at {kill.resumes_at}, {len(result.damaged)} damaged"
        bar.update(task, advance=1, told=told)
    if kills:
        killed.complete()
        check(killed, unharmed, result, seen)
        compare_ends(whole, killed, steps, result)


def damage_newest(run: Run, kill: Kill, chance: random.Random, seen: set[tuple[str, int]]) -> None:
    """Damage the newest of at least two checkpoints, and note from which step the run must resume."""
    checkpoints = [*checkpoints_of(run.run).values()]
    if len(checkpoints) < 2:
        return
    kill.damages = damage_at_random(checkpoints[-1], chance)
    seen.add((checkpoints[-1].name, checkpoints[-1].stat().st_mtime_ns))
    with contextlib.redirect_stderr(io.StringIO()):
        kill.resumes_at = latest_good_checkpoint(run.checkpoints).manifest.progress.step


def compare_ends(whole: Run, killed: Run, steps: int, result: Result) -> None:
    """Compare the end of a killed run, and its losses, with the unharmed run."""
    if (newest := newest_step(killed.run)) != steps:
        result.damaged.append(f"the run must end at step {steps}, but its newest checkpoint is of {newest}")
    losses = losses_of(killed.run)
    if [step for step, _ in losses] != list(range(1, steps + 1)):
        found = f"{len(losses)} rows of steps"
        result.damaged.append(f"metrics.jsonl must hold each step from 1 to {steps} once, but holds {found}")
    if losses != losses_of(whole.run):
        result.damaged.append("the losses must be those of the unharmed run, but some differ")


def report(result: Result, options: argparse.Namespace) -> bool:
    """Print the figures and return whether all checks passed."""
    print_machine("torch")
    print(f"seed {options.seed}, {result.seconds:,.0f} s")
    well = (not result.kills or report_kills(result)) and not result.damaged
    if result.found.number:
        kinds = ", ".join(f"{kind} {number}" for kind, number in sorted(result.found.kinds.items()))
        print(f"\n{result.found.number:,} damaged checkpoints in {result.found.seconds:,.0f} s ({kinds})")
        print(f"damages lost: {len(result.found.lost)}")
    for line in result.damaged:
        print(f"  {line}")
    print("nothing was lost" if well else "FAILED")
    return well


def report_kills(result: Result) -> bool:
    """Print the kills and return whether their steps and seconds are within the bounds."""
    kills = result.kills
    head = ["layout", "target", "kill", "seconds", "step", "resumes at", "lost", "saving", "seconds to end", "damages"]
    rows: list[list[object]] = [[*head]]
    for number, kill in enumerate(kills, 1):
        steps = (kill.steps, kill.resumes_at, kill.lost, "yes" if kill.saving else "")
        ended = (f"{kill.seconds_to_end:.2f}", ", ".join(map(str, kill.damages)))
        rows.append([kill.layout, kill.target, number, f"{kill.seconds:.2f}", *steps, *ended])
    print(f"\n{aligned(rows, left=2)}")
    slowest = max(kill.seconds_to_end for kill in kills)
    whole, damaged = [k.lost for k in kills if not k.damages], [k.lost for k in kills if k.damages]
    most_whole, most_damaged = max(whole, default=0), max(damaged, default=0)
    print(f"\n{len(kills)} kills: {sum(k.saving for k in kills)} of them during a save, "
          f"{sum(k.resumes_at == 0 for k in kills)} before the first checkpoint")  # fmt: skip
    print(f"steps lost: at most {most_whole} (a checkpoint is due every {STEPS_BETWEEN_CHECKPOINTS} steps), and at "
          f"most {most_damaged} where the newest checkpoint was damaged, too ({len(damaged)} kills)")  # fmt: skip
    print(f"after the kill of one process, all processes of the run ended within {slowest:.2f} s")
    print(f"{result.compared} checkpoints compared with the unharmed run, bit by bit: {len(result.damaged)} differ")
    within = most_whole <= MOST_LOST and most_damaged <= MOST_LOST + STEPS_BETWEEN_CHECKPOINTS
    return within and slowest <= GONE_WITHIN


def main(arguments: list[str] | None = None) -> None:
    """Kill, damage, compare and print. The exit status is 1 if a check failed."""
    parser = command_line(__doc__, figures="write")
    parser.add_argument("--kills", type=int, default=200, help="number of kills, over all layouts")
    parser.add_argument("--damages", type=int, default=1000, help="number of damaged copies of checkpoints")
    parser.add_argument("--layouts", nargs="+", choices=[*LAYOUTS], default=[*LAYOUTS], help="layouts of the runs")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random instants and damages")
    parser.add_argument("--folder", type=Path, help="keep the runs in this folder; by default it is temporary")
    options = parser.parse_args(arguments)
    if min(options.kills, options.damages) < 0 or options.kills + options.damages < 1:
        parser.error(f"`--kills` and `--damages` must not be negative, and one of them must be at least 1, but they "
                     f"are {options.kills} and {options.damages}.")  # fmt: skip
    with work_folder(options.folder) as folder:
        result = crash(folder, options)
    well = report(result, options)
    kills = [vars(kill) | {"lost": kill.lost, "damages": [*map(str, kill.damages)]} for kill in result.kills]
    figures = {"well": well, "compared": result.compared, "damaged": result.damaged, "seconds": result.seconds}
    write_figures(options.json, figures | {"kills": kills, "damages": vars(result.found)})
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
