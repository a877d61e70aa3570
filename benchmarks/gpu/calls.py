"""Calls of `run.py`: entries one after another within the time of the call, tables, and the goals."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.commands import command_line
from benchmarks.gpu.forecast import fitted, flops_of, forecast_of_device, forecast_table, forecasts
from benchmarks.gpu.machine import machine
from benchmarks.gpu.plan import BASE, CHANGED, GOALS, Entry, Goal, first_call, second_call, tiny
from benchmarks.gpu.process import ROOT, Failure, in_process, start_server
from benchmarks.gpu.report import report, step_line
from crosscut.config import write_whole

SECONDS, TINY_SECONDS = 315.0, 3000.0
"""Seconds of a call. With the start of Python it stays below 5.5 minutes. Tiny models take all the time they need, also
on a busy machine.
"""
_SECONDS_TO_DESCRIBE = 60.0


@dataclass
class Row:
    """Results of an entry."""

    entry: Entry
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Figures of each turn."""
    remarks: list[str] = field(default_factory=list)
    """Reasons why the entry failed or was skipped."""

    def figures(self, dense_peak: float | None, rate: float | None) -> dict[str, Any]:
        """Combine the turns of a step. `rate` is the measured matrix rate. Empty for other entries."""
        if self.entry.kind != "step" or not self.turns:
            return {}
        shape = self.entry.shape
        seconds = statistics.median(turn["seconds_per_step"] for turn in self.turns)
        flops = flops_of(self.entry) / seconds
        peaks = [turn["peak_bytes"] for turn in self.turns]
        return {
            "seconds_per_step": seconds,
            "tokens_per_second": shape.batch_size * shape.sequence_length / seconds,
            "model_flops_per_second": flops,
            "of_dense_peak": flops / dense_peak if dense_peak else None,
            "of_measured_rate": flops / rate if rate else None,
            "peak_bytes": max(peaks) if None not in peaks else None,
        }


@dataclass
class Call:
    """One call: its time, its codes, and the rows so far."""

    codes: Mapping[str, Path]
    """Folders whose `crosscut` is measured, by name."""
    device: str
    seconds: float = SECONDS
    about: dict[str, Any] = field(default_factory=dict)
    """Description of the machine."""
    rows: dict[str, Row] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Return the seconds that are left."""
        return max(0.0, self.seconds - (time.monotonic() - self.began))

    def run(self, entries: Sequence[Entry], told: Callable[[Row], None]) -> None:
        """Run the entries that fit into the time. `told` gets every changed row."""
        for entry in entries:
            row = self.rows.setdefault(entry.title, Row(entry))
            if row.remarks and not row.turns:
                continue  # what has failed would fail again
            if entry.expected > self.left():
                turn = f"turn {len(row.turns) + 1} " if row.turns else ""
                row.remarks.append(f"{turn}skipped: {self.left():.0f} of {self.seconds:.0f} s were left")
            else:
                self._measure(row, entry)
            told(row)

    def _measure(self, row: Row, entry: Entry) -> None:
        start = time.monotonic()
        limit = min(entry.limit, self.left())
        result = in_process(entry, self.codes[entry.code], self.device, limit=limit)
        if isinstance(result, Failure):
            row.remarks.append(f"failed: {result.reason}")
        else:
            row.turns.append({**result, "seconds": time.monotonic() - start})

    @property
    def matrix_rate(self) -> float | None:
        """Return the measured matrix rate, once the card was measured."""
        turns = self.rows["card"].turns if "card" in self.rows else []
        return turns[-1]["matrix_rate"] if turns else None

    def figures(self, row: Row) -> dict[str, Any]:
        """Return the figures of a row."""
        return row.figures(self.about.get("dense_peak"), self.matrix_rate)

    def result(self) -> dict[str, Any]:
        """Build the content of the JSON file from the entries so far."""
        measurements = []
        for title, row in self.rows.items():
            more = {
                "figures": self.figures(row), "forecast": forecast_of_device(row.entry, self.about["device"]),
                "forecasts": forecasts(row.entry) if row.entry.kind == "step" else {},
            }  # fmt: skip
            entry = {**asdict(row.entry), "name": title}
            measurements.append({**entry, **more, "turns": row.turns, "remarks": row.remarks})
        seconds = time.monotonic() - self.began
        return {"machine": self.about, "measurements": measurements, "goals": [*judged(self)], "seconds": seconds}


def judged(call: Call, goals: Sequence[Goal] = GOALS) -> Iterator[dict[str, Any]]:
    """Yield each goal with its ratio and whether it is met; None for what was not measured in this call, on a GPU."""
    steps = {(row.entry.name, row.entry.code): call.figures(row) for row in call.rows.values()}
    for goal in goals:
        ours, theirs = (steps.get(key, {}).get("tokens_per_second") for key in (goal.of, goal.over))
        ratio = ours / theirs if ours and theirs else None
        met = ratio >= goal.least if ratio and call.device == "cuda" else None
        yield {"of": goal.of, "over": goal.over, "least": goal.least, "measured": ratio, "met": met}


def entries_of(options: argparse.Namespace, codes: Mapping[str, Path], memory: float) -> list[Entry]:
    """List the entries of the calls that the options name, without those whose code is missing. Tiny models have one
    turn.
    """
    states = [name for name in codes if name not in (CHANGED, BASE)]
    calls = {1: first_call(), 2: second_call(states)}
    entries = [entry for number in options.call for entry in calls[number] if entry.code in codes]
    if options.tiny:
        titles = [entry.title for entry in entries]
        return [tiny(entry) for i, entry in enumerate(entries) if entry.title not in titles[:i]]
    return [fitted(entry, memory) for entry in entries]


def main(docstring: str | None, arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = _parser(docstring)
    options = parser.parse_args(arguments)
    if options.forecast:
        print(forecast_table([*first_call(), *second_call()]))
        return
    codes = {CHANGED: ROOT} | {folder.name if i else BASE: folder for i, folder in enumerate(options.base)}
    _require(parser, options, codes)
    start_server()
    seconds = options.seconds or len(options.call) * (TINY_SECONDS if options.tiny else SECONDS)
    call = Call(codes, options.device, seconds)
    described = in_process(None, ROOT, options.device, limit=_SECONDS_TO_DESCRIBE)
    if isinstance(described, Failure) and options.device == "cuda":
        start_server(forks=False)
        described = in_process(None, ROOT, options.device, limit=_SECONDS_TO_DESCRIBE)
    if isinstance(described, Failure):
        parser.error(f"`--device` must be available on this machine, but {described.reason}. Try --device cpu --tiny.")
    call.about = machine(described, codes)
    print(", ".join(f"{name} {value}" for name, value in call.about.items()), flush=True)

    def tell(row: Row) -> None:
        print(step_line(row, call.figures(row)), *report(row.turns[-1:]), sep="\n", flush=True)
        write_whole(options.json, json.dumps(call.result(), indent=1) + "\n")

    call.run(entries_of(options, codes, described["memory"]), tell)
    _print_all(call)


def _parser(docstring: str | None) -> argparse.ArgumentParser:
    parser = command_line(docstring, tiny="use tiny models, to check that everything runs")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--call", type=int, nargs="+", choices=[1, 2], default=[1, 2], help="calls; by default both")
    parser.add_argument(
        "--base", type=Path, nargs="+", default=[], metavar="FOLDER",
        help="folder with the `crosscut` to compare with; more folders are measured in the second call",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, help="seconds in all; what does not fit is skipped")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="file for the figures")
    parser.add_argument("--forecast", action="store_true", help="only print the planner's forecasts of all steps")
    return parser


def _require(parser: argparse.ArgumentParser, options: argparse.Namespace, codes: Mapping[str, Path]) -> None:
    """End with a message if the options do not fit together."""
    if options.device == "cpu" and not options.tiny:
        parser.error("`--device` must be cuda for the large models, but is cpu. Add --tiny.")
    for folder in options.base:
        if not (folder / "crosscut" / "__init__.py").is_file():
            parser.error(f"`--base` must name folders that hold `crosscut`, but {folder} does not. See --help.")
    if len(codes) <= len(options.base):
        parser.error("`--base` must name folders with different names, but two are alike. Rename one.")


def _print_all(call: Call) -> None:
    print("\nAll steps:", *(step_line(row, call.figures(row)) for row in call.rows.values()), "", sep="\n")
    for goal in judged(call):
        ratio = "not measured" if goal["measured"] is None else f"{goal['measured']:.3f}"
        verdict = {None: "", True: ", met", False: ", not met"}[goal["met"]]
        (name, code), (other, its_code) = goal["of"], goal["over"]
        print(f"{name} ({code}) over {other} ({its_code}): {ratio} (goal {goal['least']}{verdict})")
    print(f"{time.monotonic() - call.began:.0f} s in all")
