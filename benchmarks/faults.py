"""Cause every fault that a run must survive, in real runs, and write the table of `docs/tables/faults.md`.

    python benchmarks/faults.py --write docs/tables/faults.md   # all faults, about half an hour on two cores
    python benchmarks/faults.py --only "disk full" SIGTERM      # the faults whose names contain one of these texts
    python benchmarks/faults.py --only NaN --write docs/tables/faults.md    # the rows of other faults stay
    python benchmarks/faults.py --results faults.json    # keep the rows, and run only faults without a good row
    python benchmarks/faults.py --list

Each fault hits a run of a tiny model in processes of its own: `crosscut train` on two ranks of one axis (tensor, data,
pipeline or context), or on two nodes of two ranks under torchrun. The fault happens at a known place, such as the
seventh step of rank 1, or at a random byte of a file. Then the same command (`--resume auto`) continues the run. For
each fault, the table has:

| column | meaning |
|---|---|
| named after | seconds from the fault until the output names it; a dash if no process is left to name it |
| right | whether the message names what it must name: rank, axis, module or file |
| steps lost | steps that the resumed run repeats; "all" if the fault removes all checkpoints |
| same bits | whether parameters, optimizer state and losses at the end are those of the undisturbed run, bit by bit |
| status | exit status of the run that the fault hit; 0 if the run goes on |

A run that leaves batches out after a spike, or changes its number of ranks, ends differently by design. In these rows,
the column "same bits" says in brackets what is compared (`Fault.compared`).

The exit status is 1 if a fault is not named or the message names the wrong thing, if a run hangs, leaves a process or
half a checkpoint behind, shows a traceback, loses more steps than the distance of two checkpoints, or ends differently.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.commands import aligned, command_line, progress_bar, write_figures
from benchmarks.faulting.command import start_forking
from benchmarks.faulting.page import HEAD, cells, write_page
from benchmarks.faulting.registry import FAULTS
from benchmarks.faulting.scene import Scene
from benchmarks.faulting.shim import Shim
from benchmarks.faulting.trial import Fault, Row, try_fault
from benchmarks.machine import describe_machine, print_machine
from benchmarks.recovery.runs import write_text


class References:
    """Undisturbed runs, one for each layout, which are made when they are needed."""

    def __init__(self, folder: Path, shim: Shim) -> None:
        self.folder, self.shim = folder, shim
        self.text = write_text(folder, copies=3)
        self.ends: dict[str, dict[str, str]] = {}
        self.tokens = folder / "tokens"

    def scene(self, name: str, layout: str, more: tuple[str, ...] = ()) -> Scene:
        """Return the scene of a new run, with the tokens in place."""
        scene = Scene(self.folder / name, layout, True, self.shim, self.text, more)
        if self.tokens.exists():
            shutil.copytree(self.tokens, scene.tokens)
        return scene

    def end(self, layout: str) -> dict[str, str]:
        """Return the end of the undisturbed run (`Scene.end`)."""
        if layout not in self.ends:
            scene = self.scene(f"undisturbed-{layout}", layout)
            scene.start()
            scene.has_ended(600)
            if scene.status != 0:
                raise SystemExit(f"faults: the undisturbed run must end well, but does not:\n{scene.told()}")
            if not self.tokens.exists():
                shutil.copytree(scene.tokens, self.tokens)
            self.ends[layout] = scene.end()
        return self.ends[layout]


class Results:
    """Rows of all faults that were tried, in a file that outlives an interrupted call, or only in memory."""

    def __init__(self, path: Path | None, seed: int) -> None:
        self.path, self.seed = path, seed
        self.rows: dict[str, Row] = {}
        if path is not None and path.exists():
            known = {fault.name: fault for fault in FAULTS}
            told = json.loads(path.read_text(encoding="utf-8"))
            for values in told["faults"] if told["seed"] == seed else []:
                if (fault := known.get(values["name"])) and fault.layout == values["layout"]:
                    self.rows[fault.name] = Row.from_json(fault, values)

    def is_done(self, fault: Fault) -> bool:
        """Whether a good row of the fault is there."""
        return fault.name in self.rows and self.rows[fault.name].is_well

    def add(self, row: Row) -> None:
        """Keep a row, in the file as well."""
        self.rows[row.fault.name] = row
        faults = [row.to_json() for row in self.rows.values()]
        write_figures(self.path, {"machine": describe_machine("torch"), "seed": self.seed, "faults": faults})


def measure(faults: list[Fault], folder: Path, results: Results, until: float) -> None:
    """Do one trial of each fault that has no good row, one after another, as long as time is left."""
    faults = [fault for fault in faults if not results.is_done(fault)]
    if not faults or time.monotonic() > until:
        return
    shim = Shim(folder)
    start_forking(**shim.environment)
    with progress_bar() as bar:
        task = bar.add_task("faults", total=len(faults), told="")
        references = References(folder, shim)
        for number, fault in enumerate(faults):
            bar.update(task, told=fault.name)
            reference = references.end(fault.layout) if fault.trial is None else {}
            scene = references.scene(f"fault-{number}", fault.layout, fault.more)
            row = try_fault(fault, scene, reference, random.Random(f"{results.seed} {fault.name}"))
            row.message = row.message.replace(str(scene.run), "RUN").replace(str(scene.root), "FOLDER")
            scene.remove()
            results.add(row)
            for problem in row.problems:
                bar.console.print(f"{fault.name}: {problem}", markup=False, highlight=False, soft_wrap=True)
            bar.update(task, advance=1)
            if time.monotonic() > until:
                return


def report(rows: list[Row], seed: int) -> bool:
    """Print the table and the problems, and return whether all is well."""
    print_machine("torch")
    print(f"seed {seed}\n")
    print(aligned([HEAD, *map(cells, rows)], left=len(HEAD)))
    failed = [row for row in rows if not row.is_well]
    print(f"\n{len(rows)} of {len(FAULTS)} faults, {sum(bool(row.skipped) for row in rows)} not possible here")
    for row in failed:
        print(f"\nFAILED {row.fault.name}")
        for problem in row.problems:
            print(f"  {problem}")
    return not failed


def main(arguments: list[str] | None = None) -> None:
    """Measure and print. The exit status is 1 if a check failed."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", default=[""], help="texts in the names of faults to run"
    )
    layouts = list(dict.fromkeys(fault.layout for fault in FAULTS))
    parser.add_argument("--layout", choices=layouts, help="only the faults on this layout")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random bytes")
    parser.add_argument("--minutes", type=float, default=120.0, help="time for all trials; 0 only prints earlier rows")
    parser.add_argument("--list", action="store_true", help="print the names of the faults and end")
    parser.add_argument("--folder", type=Path, help="folder for temporary files")
    parser.add_argument(
        "--results", type=Path, metavar="FILE.json", help="file of all rows; good rows are not run again"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE.md", help="also write the rows to this page")
    options = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if any(text.lower() in fault.name.lower() for text in options.only)]
    faults = [fault for fault in faults if options.layout in (None, fault.layout)]
    if not faults:
        parser.error(f"`--only` must match the name of a fault, but {options.only} match none. See --list.")
    if options.list:
        print("\n".join(f"{fault.layout:<10}  {fault.name}" for fault in faults))
        return
    os.environ.pop("FAULTS_PLACE", None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the runs, and remove their folders
    began, results = time.monotonic(), Results(options.results, options.seed)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="crosscut-faults-") as folder:
        measure(faults, Path(folder).resolve(), results, began + 60 * options.minutes)
    rows = [results.rows[fault.name] for fault in faults if fault.name in results.rows]
    well = report(rows, options.seed)
    print(f"{time.monotonic() - began:,.0f} s")
    if options.write:
        write_page(rows, options.seed, options.write)
    sys.exit(not well)


if __name__ == "__main__":
    main()
