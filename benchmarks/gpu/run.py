"""Crosscut and its peers on one GPU: tokens/s, model FLOP/s, utilisation and peak memory, within nine minutes.

    python benchmarks/gpu/run.py                       # one NVIDIA GPU; needs no network; writes gpu.json
    python benchmarks/gpu/run.py --device cpu --tiny   # tiny models, to check in seconds that it runs

The measurements (`plan.py`) run one after another, each in a process of its own, so that none shares memory or compiled
code with another. The most valuable ones come first; a second turn follows if time is left.

| event | consequence |
|---|---|
| a measurement would not end in time | it is skipped, and the output names it |
| a measurement fails or takes too long | its row gives the reason, and the others go on |
| a measurement runs out of memory | it runs again with micro-batches of half the size |
| a model of Crosscut cannot be compiled | it runs again uncompiled |
| compiled and uncompiled gradients of Crosscut differ | the measurement fails: code without a gradient is fast |

The JSON file is written again after every measurement, so an interrupted run keeps its results.

Model FLOP/s follow the planner's formula: matrix products of forward and backward pass, attention over the whole
square, no recomputation. Utilisation is relative to the dense bfloat16 peak that the manufacturer states, and to the
matrix rate measured in the same process. The column (causal) counts only the causal half of attention, because users
differ on which to count. There is no dropout; weights, accumulated gradients and AdamW are in float32. The two layouts
of the paper's 8.3B model run rank 0 alone with collectives that do nothing: the rank's compute and memory are real, its
messages are missing. Crosscut's weights are drawn on the device (`worker.py`).
"""

import json
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import ROOT, command_line
from benchmarks.gpu.machine import machine
from benchmarks.gpu.plan import GOALS, Goal, Measurement, full_plan, halved, tiny_plan, uncompiled
from benchmarks.gpu.worker import answer, describe, measure, way_of
from benchmarks.turns import Failure
from crosscut.config import write_whole

GROUPS = ("models", "precision", "layouts", "recomputation", "compile")
SECONDS_EAGER, SECONDS_COMPILED, SECONDS_PEER_COMPILED = 20.0, 40.0, 70.0
"""Estimated seconds of a measurement before another measurement of the same kind has run. Crosscut compiles one layer
for all layers. Its peers, except torchtitan, compile the whole model, as their users do.
"""
MOST_SECONDS = 110.0
"""Maximum seconds of one measurement, so that a measurement that hangs leaves time for the others. A fifth of the total
time is the maximum if that is more.
"""


@dataclass
class Budget:
    """Time that is left for all measurements together."""

    seconds: float
    began: float = field(default_factory=time.monotonic)
    took: dict[str | tuple[str, bool], float] = field(default_factory=dict)
    """Seconds of the last measurement, by name and by (program, compiled).

    Programs are separate because a slow peer says nothing about Crosscut. The last measurement counts, because the
    first compilation starts with an empty cache.
    """

    @property
    def most(self) -> float:
        """Maximum seconds of one measurement."""
        return max(MOST_SECONDS, self.seconds / 5)

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.seconds - (time.monotonic() - self.began)

    def fits(self, measurement: Measurement) -> bool:
        """Whether a measurement should end in time."""
        compiled = SECONDS_COMPILED if measurement.program == "crosscut" else SECONDS_PEER_COMPILED
        guess = compiled if measurement.compiled else SECONDS_EAGER
        of_kind = self.took.get((measurement.program, measurement.compiled), guess)
        return self.took.get(measurement.name, of_kind) < self.left()

    def learn(self, measurement: Measurement, seconds: float) -> None:
        """Remember the seconds of a finished measurement."""
        self.took[measurement.name] = self.took[measurement.program, measurement.compiled] = seconds


@dataclass
class Row:
    """Results of a measurement."""

    measurement: Measurement
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Figures of each turn."""
    remarks: list[str] = field(default_factory=list)
    """Reasons why the measurement failed, was skipped or ran differently."""

    def figures(self, dense_peak: float | None) -> dict[str, Any]:
        """Combine the figures of all turns. Empty without a turn."""
        from benchmarks.contenders.programs import crosscut_run
        from benchmarks.contenders.task import Way
        from crosscut.planner import model_flops_per_token

        if not self.turns:
            return {}
        shape, ranks = self.measurement.shape, self.measurement.tensor
        model = crosscut_run(shape, Way()).model
        tokens = shape.batch_size * shape.sequence_length
        seconds = statistics.median(turn["seconds_per_step"] for turn in self.turns)
        flops = tokens * model_flops_per_token(model, shape.sequence_length) / ranks
        square = tokens * 12 * shape.num_layers * shape.sequence_length * shape.hidden_size / ranks
        rate = statistics.median(turn["measured_matrix_rate"] for turn in self.turns)
        peaks = [turn["peak_bytes"] for turn in self.turns]
        return {
            "seconds_per_step": seconds,
            "tokens_per_second": tokens / seconds,
            "model_flops_per_second": flops / seconds,
            "of_dense_peak": flops / seconds / dense_peak if dense_peak else None,
            "of_dense_peak_causal": (flops - square / 2) / seconds / dense_peak if dense_peak else None,
            "of_measured_rate": flops / seconds / rate,
            "peak_bytes": max(peaks) if None not in peaks else None,
        }


def run_plan(plan: list[Measurement], budget: Budget, device: str, told: Callable[[Row], None]) -> dict[str, Row]:
    """Run the measurements that fit into the budget and return the rows by name. `told` gets every changed row."""
    rows: dict[str, Row] = {}
    queue = list(plan)
    while queue:
        measurement = queue.pop(0)
        row = rows.setdefault(measurement.name, Row(measurement))
        if row.remarks and not row.turns:
            continue  # a measurement that has failed would fail again
        if not budget.fits(measurement):
            turn = f"turn {len(row.turns) + 1} " if row.turns else ""
            row.remarks.append(f"{turn}skipped: {max(0.0, budget.left()):.0f} of {budget.seconds:.0f} s were left")
            told(row)
            continue
        start = time.monotonic()
        result = in_process(measure, (row.measurement, device), limit=min(budget.left(), budget.most))
        took = time.monotonic() - start
        if not isinstance(result, Failure) or took > budget.most:
            budget.learn(measurement, took)
        if not isinstance(result, Failure):
            row.turns.append(result)
        elif result.out_of_memory and row.measurement.micro_batch_size > 1:
            row.measurement = halved(row.measurement)
            queue.insert(0, row.measurement)
            now = f"now micro-batches of {row.measurement.micro_batch_size}"
            print(f"{row.measurement.name}: out of memory, {now}", flush=True)
            continue
        else:
            row.remarks.append(f"failed: {result.reason}")
            if measurement.program == "crosscut" and measurement.compiled and not row.turns:
                queue.insert(0, uncompiled(row.measurement))
        told(row)
    return rows


def start_server(device: str, budget: Budget) -> Any:
    """Choose how processes start, and return the first process's description of the device, or a `Failure`.

    Processes are forked from a server that has imported torch and never uses a device. If forking does not work, for
    example because an import uses the device after all, each process starts from nothing.
    """
    # Before Python 3.14 the server gets the environment but not `sys.path`.
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, known)])
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # finds GPUs without initializing CUDA
    mp.set_forkserver_preload(["torch", "torch._dynamo", "crosscut.training.step", "crosscut.parallel"])
    mp.set_start_method("forkserver")
    about = in_process(describe, (device,), limit=min(budget.left(), MOST_SECONDS))
    if isinstance(about, Failure) and device == "cuda":
        mp.set_start_method("spawn", force=True)
        about = in_process(describe, (device,), limit=min(budget.left(), MOST_SECONDS))
    return about


def in_process(function: Callable[..., Any], arguments: tuple[Any, ...], *, limit: float) -> Any:
    """Call a function in a process of its own and return its result, or a `Failure`."""
    context = mp.get_context()
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(function, arguments, there), daemon=False)
    try:
        process.start()
    except (OSError, EOFError) as error:
        return Failure(f"its process did not start ({type(error).__name__}: {error})")
    there.close()
    try:
        result = here.recv() if here.poll(limit) else Failure(f"did not end within {limit:.0f} s")
    except (OSError, EOFError):
        process.join(5)
        result = Failure(f"its process ended with status {process.exitcode}")
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join(10)
    return result


HEADER = (
    f"{'':36}{'batch':>7}{'micro':>7}{'s/step':>9}{'tokens/s':>11}{'TFLOP/s':>9}"
    f"{'of peak':>9}{'(causal)':>9}{'of rate':>9}{'peak GiB':>10}"
)


FORECAST_HEADER = f"{'Forecasts of the planner':44}" + "".join(
    f"{figure:>10}{'planned':>10}{'ratio':>7}" for figure in ("s/step", "peak GiB")
)


def line(row: Row, dense_peak: float | None) -> str:
    """Format a row of the table."""
    m, f = row.measurement, row.figures(dense_peak)
    text = f"{m.name:36}"
    if f:
        shares = (f["of_dense_peak"], f["of_dense_peak_causal"], f["of_measured_rate"])
        memory = "-" if f["peak_bytes"] is None else f"{f['peak_bytes'] / 2**30:,.1f}"
        text += f"{m.shape.batch_size:>7}{m.micro_batch_size:>7}{f['seconds_per_step']:>9.3f}"
        text += f"{f['tokens_per_second']:>11,.0f}{f['model_flops_per_second'] / 1e12:>9,.2f}"
        text += "".join(f"{'-' if share is None else format(share, '.1%'):>9}" for share in shares) + f"{memory:>10}"
    return "  ".join([text, *([m.note] if m.note and f else []), *row.remarks])


def forecast(measurement: Measurement, device: str) -> dict[str, float]:
    """Forecast the seconds, without messages, and the peak bytes of a step. Empty for peers and unknown devices."""
    from benchmarks.contenders.programs import crosscut_run
    from crosscut.planner import find_hardware, forecast_memory, step_time

    hardware = find_hardware(device)
    if measurement.program != "crosscut" or hardware is None:
        return {}
    run = crosscut_run(measurement.shape, way_of(measurement, "cuda"))
    time_of_step = step_time(run, hardware)
    return {
        "seconds_per_step": time_of_step.compute,
        "peak_bytes": forecast_memory(run, capability=hardware.capability).total,
    }


def forecast_line(row: Row, device: str) -> str:
    """Format the figures of a row beside the planner's forecast; empty if one of them is missing."""
    found, planned = row.figures(None), forecast(row.measurement, device)
    if not found or not planned or found["peak_bytes"] is None:
        return ""
    told = [f"{row.measurement.name:44}"]
    for key, unit in (("seconds_per_step", 1.0), ("peak_bytes", 2.0**30)):
        told.append(f"{found[key] / unit:>10.3f}{planned[key] / unit:>10.3f}{planned[key] / found[key]:>7.2f}")
    return "".join(told)


def judged(goals: tuple[Goal, ...], rows: dict[str, Row], dense_peak: float | None) -> Iterator[dict[str, Any]]:
    """Yield each goal with its figure and whether the goal is met.

    `met` is None if the figure was not measured, or if no compiled peer was measured, because a compiled peer might be
    the fastest.
    """
    figures = {name: row.figures(dense_peak) for name, row in rows.items()}
    for goal in goals:
        mine = figures.get(goal.of, {})
        value, is_judged = None, True
        if not goal.over:
            value = mine.get("of_dense_peak")
        elif mine:
            model = goal.of.partition(", ")[2]
            rivals = {
                name: f["tokens_per_second"]
                for name, f in figures.items()
                if f and (name == goal.over or (goal.over == "peers" and _is_peer(rows[name], model)))
            }
            value = mine["tokens_per_second"] / max(rivals.values()) if rivals else None
            is_judged = goal.over != "peers" or any(rows[name].measurement.compiled for name in rivals)
        met = None if value is None else value >= goal.least and (is_judged or None)
        yield {"goal": f"{goal.of}: {goal.text}", "least": goal.least, "measured": value, "met": met}


def _is_peer(row: Row, model: str) -> bool:
    m = row.measurement
    return m.group == "models" and m.program != "crosscut" and m.name.endswith(f", {model}")


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = command_line(__doc__, tiny="use tiny models, and only measurements that need no compiler")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=(), help="kinds of measurements; by default all")
    parser.add_argument(
        "--seconds", type=float, default=525.0, help="seconds for all measurements; those that do not fit are skipped"
    )
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="file for the figures")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("`--device` must be cuda for the large models, but is cpu. Add --tiny.")
    of_tiny = {measurement.group for measurement in tiny_plan()}
    if options.tiny and (missing := [group for group in options.only if group not in of_tiny]):
        parser.error(
            f"`--only` must name kinds that --tiny supports ({', '.join(g for g in GROUPS if g in of_tiny)}), but "
            f"{missing[0]} is not among them. Remove it, or remove --tiny."
        )
    budget = Budget(options.seconds)
    device = start_server(options.device, budget)
    if isinstance(device, Failure):
        if device.reason.startswith(("ImportError", "ModuleNotFoundError")):
            parser.error(f"Python must find the packages that Crosscut trains with, but {device.reason}. Install them.")
        parser.error(f"`--device` must be available on this machine, but {device.reason} Try --device cpu --tiny.")
    about, peak = machine(device), device["dense_peak"]
    plan = tiny_plan() if options.tiny else full_plan(device["memory"])
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(HEADER, flush=True)
    told: dict[str, Row] = {}

    def tell(row: Row) -> None:
        print(line(row, peak), flush=True)
        told[row.measurement.name] = row
        write_whole(options.json, json.dumps(result_of(told, about, peak, budget), indent=2) + "\n")

    run_plan([m for m in plan if m.group in (options.only or GROUPS)], budget, options.device, tell)
    print("\nAll measurements:", HEADER, *(line(row, peak) for row in told.values()), "", sep="\n")
    forecasts = [forecast_line(row, about["device"]) for row in told.values()]
    if any(forecasts):
        print(FORECAST_HEADER, *filter(None, forecasts), "", sep="\n")
    for goal in judged(GOALS, told, peak):
        found = "not measured" if goal["measured"] is None else f"{goal['measured']:.3f}"
        unknown = "" if goal["measured"] is None else ", not judged: no compiled peer was measured"
        verdict = {None: unknown, True: ", met", False: ", not met"}[goal["met"]]
        print(f"{goal['goal']}: {found} (goal {goal['least']:.2f}{verdict})")
    print(f"{time.monotonic() - budget.began:.0f} s in all")


def result_of(rows: dict[str, Row], about: dict[str, Any], dense_peak: float | None, budget: Budget) -> dict[str, Any]:
    """Build the content of the JSON file from the measurements so far."""
    measurements = []
    for row in rows.values():
        figures = {"figures": row.figures(dense_peak), "forecast": forecast(row.measurement, about["device"])}
        measurements.append({**asdict(row.measurement), **figures, "turns": row.turns, "remarks": row.remarks})
    goals, seconds = list(judged(GOALS, rows, dense_peak)), time.monotonic() - budget.began
    return {"machine": about, "measurements": measurements, "goals": goals, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
