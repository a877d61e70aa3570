"""Idle time of pipeline stages: measured by the recorder of a run, beside the simulation and the published formulas.

    python benchmarks/training/bubble.py                                  # both tables
    python benchmarks/training/bubble.py waits --figure docs/pipeline.png # only timed waits; draws their recorded steps
    python benchmarks/training/bubble.py model --gpu here.toml            # only the model; calibrated before

`waits` runs four ranks whose stages wait for a known time instead of computing, because four ranks on two cores could
not compute at once. Everything else is that of a training step: the runner, its messages over gloo, and the deferral of
weight gradients.

`model` trains a small model on two ranks with one thread each, and on one rank with all cores. It prints the recorded
bubble and waiting, the FLOPs of a step, and the step time beside the planner's forecast. Use it on an idle machine of
two cores.

Idle time is that of all ranks together, divided by their computing time. The bubble is the part that would remain if
messages took no time, and the waiting is the other part (`crosscut.training.profiling.passes`).
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line, markdown, subplots
from benchmarks.machine import print_machine
from benchmarks.training.ranks import CPU, hardware_of, random_batches, rank_of, seconds_of_step
from benchmarks.turns import alternate
from crosscut.architecture.pipeline import (
    Durations,
    Pass,
    Schedule,
    Timeline,
    simulate,
    stages_of_rank,
    without_messages,
)
from crosscut.config import Layout, RunConfig, load_run
from crosscut.config.layout import PipelineSchedule
from crosscut.config.system.machine import available_cores
from crosscut.kernels.deferral import Deferral
from crosscut.launch import launch, process_group
from crosscut.model import GPT, Batch
from crosscut.model.gpt import StageInput
from crosscut.model.stages import StageStep
from crosscut.model.sums import LayerSums
from crosscut.parallel import ParallelMesh, make_mesh
from crosscut.parallel.collectives import gather_to_first
from crosscut.planner.stages import schedule_of
from crosscut.planner.time import bubble_share, step_time
from crosscut.training.profiling.passes import PassRecorder, PipelineStep, pipeline_steps

SECONDS = Durations(forward=0.020, backward=0.020, weights=0.020)
"""Seconds of a forward pass, of the gradients of activations and of the weight gradients of all stages of a rank."""
WAITS = {
    "1F1B": Layout(pipeline=4),
    "1F1B, 2 stages per rank": Layout(pipeline=4, stages_per_rank=2),
    "1F1B, 4 stages per rank": Layout(pipeline=4, stages_per_rank=4),
    "zero bubble": Layout(pipeline=4, schedule=PipelineSchedule.ZERO_BUBBLE),
}
DRAWN = ("1F1B", "1F1B, 2 stages per rank", "zero bubble")
TRAINED: dict[str, dict[str, Any]] = {
    "1F1B": {"pipeline": 2},
    "1F1B, 2 stages per rank": {"pipeline": 2, "stages_per_rank": 2},
    "zero bubble": {"pipeline": 2, "schedule": "zero_bubble"},
}
COLORS = {Pass.FORWARD: ("#4878a8", "#86aed4"), Pass.BACKWARD: ("#d1682f", "#eda77f"), Pass.WEIGHTS: ("#4f9a57",) * 2}
"""Color of the passes through the first stage of a rank, and through its other stages."""


class _Wait(torch.autograd.Function):
    """Layer whose passes take a known time: the output is its input, and the gradient of its weight is zero."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, seconds: Durations, deferral: Deferral | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds, ctx.deferral = seconds, deferral
        time.sleep(seconds.forward)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), seconds = ctx.saved_tensors, ctx.seconds
        time.sleep(seconds.backward)

        def compute() -> Tensor:
            time.sleep(seconds.weights)
            return torch.zeros_like(weight)

        is_deferred = ctx.deferral is not None and ctx.deferral.defer(compute, weight)
        return gradient.clone(), None if is_deferred else compute(), None, None


class WaitingModel(nn.Module):
    """Stages of one rank that wait instead of computing, with the interface that `StageStep` needs of a model."""

    compute_dtype = torch.float32
    layer_terms = ()

    def __init__(self, layout: Layout, mesh: ParallelMesh, deferral: Deferral | None) -> None:
        super().__init__()
        assert mesh.is_staged
        self.mesh, self.deferral = mesh, deferral
        sizes = [1] * layout.num_stages
        self.stages = stages_of_rank(sizes, rank=mesh.pipeline.rank, num_ranks=mesh.pipeline.size)
        self.weight = nn.Parameter(torch.zeros(1))
        share = 1 / layout.stages_per_rank
        self.seconds = Durations(**{name: share * value for name, value in vars(SECONDS).items()})

    def hidden_form(self, tokens: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and element type of a message."""
        return (*tokens.shape, 64), self.compute_dtype

    def forward(self, batch: Batch, *, stage_input: StageInput, sums: LayerSums) -> Tensor:  # noqa: ARG002
        """Wait for the time of a forward pass."""
        hidden = stage_input.hidden
        if hidden is None:
            hidden = torch.zeros(self.hidden_form(batch.tokens)[0], dtype=self.compute_dtype)
        result: Tensor = _Wait.apply(hidden, self.weight, self.seconds, self.deferral)
        return result


def waited(layout: Layout, num_micro_batches: int, num_steps: int) -> list[PipelineStep]:
    """Record steps of stages that wait, in a process group of its own. Returns them on the first rank."""
    with process_group(CPU):
        torch.set_num_threads(1)
        return wait_in_group(layout, num_micro_batches, num_steps)


def wait_in_group(layout: Layout, num_micro_batches: int, num_steps: int) -> list[PipelineStep]:
    """Record steps of stages that wait, after one that is not counted. Returns them on the first rank."""
    mesh, schedule = make_mesh(layout, CPU), schedule_of(layout, num_micro_batches)
    recorder = PassRecorder(mesh)
    deferral = Deferral() if schedule.separates_weights else None
    step = StageStep(
        model=cast(GPT, WaitingModel(layout, mesh, deferral)),
        schedule=schedule,
        micro_batches=[Batch.from_ids(torch.zeros(1, 65, dtype=torch.long))] * num_micro_batches,
        loss=lambda hidden, _: hidden.sum(),
        scales={},
        sums=LayerSums(),
        begin=lambda _: None,
        arm=lambda: None,
        deferral=deferral,
        observer=recorder,
    )
    return recorded_steps(step.run, schedule, recorder, num_steps)


def simulated(schedule: Schedule) -> Timeline:
    """Simulated step of stages that wait."""
    backward = SECONDS.backward + (0.0 if schedule.separates_weights else SECONDS.weights)
    parts = {"forward": SECONDS.forward, "backward": backward, "weights": SECONDS.weights}
    one = Durations(**{name: seconds / schedule.num_chunks for name, seconds in parts.items()}, message=0.0)
    return simulate(schedule, one)


def recorded_steps(
    run: Callable[[], object], schedule: Schedule, recorder: PassRecorder, num_steps: int
) -> list[PipelineStep]:
    """Run steps and return their records on the first rank, without the first step."""
    found = []
    for _ in range(num_steps + 1):
        with recorder.step():
            run()
        gathered = gather_to_first(recorder.recorded())
        found += [] if gathered is None else pipeline_steps(schedule, gathered)
    return found[1:]


class Idle(NamedTuple):
    """Idle time of the ranks over their computing time."""

    bubble: float
    waiting: float

    @property
    def all(self) -> float:
        """Bubble and waiting together."""
        return self.bubble + self.waiting


def idle_of(steps: Sequence[PipelineStep]) -> Idle:
    """Medians over the steps."""
    bubbles = [without_messages(step.timeline).mean_bubble for step in steps]
    idle = [step.timeline.mean_bubble for step in steps]
    return Idle(statistics.median(bubbles), statistics.median(a - b for a, b in zip(idle, bubbles, strict=True)))


def formulas(schedule: Schedule) -> list[str]:
    """Published idle time: (P - 1) / m and (P - 1) / (V m)."""
    stages, m = schedule.num_ranks, schedule.num_micro_batches
    return [f"{bubble_share(stages, m, chunks=chunks):.3f}" for chunks in (1, schedule.num_chunks)]


def print_waits(num_steps: int, figure: Path | None) -> None:
    """Measure the waiting stages and print the table."""
    rows, drawn = [], {}
    for name, layout, m in [*((name, layout, 8) for name, layout in WAITS.items()), ("1F1B", WAITS["1F1B"], 2)]:
        steps = launch(waited, (layout, m, num_steps), num_ranks=layout.world_size)
        schedule, idle = steps[0].timeline.schedule, idle_of(steps)
        counted = sum(timed.weight_gradients for rank in steps[0].timeline.ranks for timed in rank)
        rows.append(
            [name, m, *formulas(schedule),
             *(f"{share:.3f}" for share in (simulated(schedule).mean_bubble, idle.all, *idle)), counted]
        )  # fmt: skip
        if name in DRAWN and m == 8:
            drawn[name] = sorted(steps, key=lambda step: step.timeline.total)[len(steps) // 2].timeline
    milliseconds = ", ".join(f"{1000 * value:.0f}" for value in (SECONDS.forward, SECONDS.backward, SECONDS.weights))
    print(
        f"\nFour ranks that wait: {milliseconds} ms for forward pass, gradients of activations and weight gradients of "
        f"a micro-batch on a rank; medians of {num_steps} steps\n"
    )
    head = ("schedule", "m", "(P - 1) / m", "(P - 1) / (V m)", "simulated", "measured idle time", "of which bubble",
            "of which waiting", "deferred weight gradients recorded")  # fmt: skip
    print(markdown(head, rows), flush=True)
    if figure is not None:
        draw(drawn, figure)


def draw(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Draw recorded steps of four ranks, one below the other."""
    from matplotlib.patches import Patch

    figure, panels = subplots(len(timelines), 1, figsize=(10, 6.4), sharex=True)
    longest = max(timeline.total for timeline in timelines.values())
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        begin = min(rank[0].start for rank in timeline.ranks)
        for rank, passes in enumerate(timeline.ranks):
            axes.barh(rank, 1000 * timeline.total, height=0.84, color="#e9e9e9")
            for action, start, end, _ in passes:
                color = COLORS[action.kind][min(action.chunk, 1)]
                left, width = 1000 * (start - begin), 1000 * (end - start)
                axes.barh(rank, width, left=left, height=0.84, color=color, edgecolor="white", linewidth=0.6)
                axes.text(
                    left + width / 2, rank, str(action.micro_batch), ha="center", va="center", color="white",
                    fontsize=11 if width > 15 else 9,
                )  # fmt: skip
        idle = f"idle time {timeline.mean_bubble:.3f} of the computing time"
        axes.set_title(f"{name}: {1000 * timeline.total:.0f} ms, {idle}", loc="left", fontsize=11)
        axes.set_yticks(range(len(timeline.ranks)), [f"rank {rank}" for rank in range(len(timeline.ranks))])
        axes.invert_yaxis()
        axes.set_xlim(0, 1000 * longest * 1.005)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    panels[-1].set_xlabel("milliseconds since the first pass; the numbers are those of the micro-batches")
    forward, backward, weights = (COLORS[kind] for kind in (Pass.FORWARD, Pass.BACKWARD, Pass.WEIGHTS))
    names = {"forward pass": forward[0], "second stage": forward[1], "backward pass": backward[0],
             "second stage ": backward[1], "weight gradients": weights[0], "idle": "#e9e9e9"}  # fmt: skip
    figure.legend(
        handles=[Patch(color=color, label=name) for name, color in names.items()],
        loc="outside upper center", ncols=len(names), frameon=False, fontsize=10,
    )  # fmt: skip
    figure.savefig(path, dpi=132)
    print(f"\nfigure  {path}")


def run_of(precision: str = "float32", **layout: Any) -> RunConfig:
    """A run of a small model with eight micro-batches per step."""
    model = {"num_layers": 8, "hidden_size": 256, "num_heads": 4, "vocab_size": 512, "max_sequence_length": 256}
    training = {"batch_size": 8, "micro_batch_size": 1, "sequence_length": 256, "compile": "off"}
    table = {"model": {**model, "dropout": 0.0}, "layout": layout, "training": {**training, "precision": precision}}
    return load_run(table)


class Trained(NamedTuple):
    """Result of training steps with one layout."""

    seconds: float
    """Median time of a step."""
    steps: list[PipelineStep]


def flops_of(run: RunConfig) -> int:
    """FLOPs of the matrix products of all ranks in a step, on the first rank. PyTorch counts only its own products, and
    in float32 oneDNN computes the products of some processors: `run` should be in float64.
    """
    with rank_of(run) as trainer:
        with FlopCounterMode(display=False) as counter:
            trainer.step(0, random_batches(run))
        return sum(gather_to_first(counter.get_total_flops()) or [])


def trained(run: RunConfig, num_steps: int) -> Trained:
    """Train steps and return their result on the first rank. The first step is not timed."""
    threads, batches = max(1, available_cores() // run.layout.world_size), random_batches(run)  # as the planner assumes
    with rank_of(run, threads=threads) as trainer:
        if not trainer.mesh.is_staged:
            seconds = [seconds_of_step(trainer, step, batches) for step in range(num_steps + 1)]
            return Trained(statistics.median(seconds[1:]), [])
        trainer.observer = recorder = PassRecorder(trainer.mesh)
        schedule = schedule_of(run.layout, run.num_micro_batches)
        steps = recorded_steps(lambda: trainer.step(0, batches), schedule, recorder, num_steps)
        return Trained(statistics.median([max(step.seconds) for step in steps] or [0.0]), steps)


def print_model(num_steps: int, num_turns: int, gpu: str | None) -> None:
    """Measure the small model and print the table."""
    hardware = hardware_of(gpu)
    runs = {"one rank, all cores": run_of(), **{name: run_of(**layout) for name, layout in TRAINED.items()}}
    trainings = {
        name: partial(launch, trained, (run, num_steps), num_ranks=run.layout.world_size) for name, run in runs.items()
    }
    turns: dict[str, list[Trained]] = alternate(trainings, num_turns)
    of_steps = {
        name: launch(flops_of, (run_of("float64", **TRAINED.get(name, {})),), num_ranks=run.layout.world_size)
        for name, run in runs.items()
    }
    rows = []
    for name, run in runs.items():
        seconds = statistics.median(turn.seconds for turn in turns[name])
        forecast = step_time(run, hardware)
        idle: list[str] = ["", "", "", "", ""]
        if run.layout.pipeline > 1:
            measured = idle_of([step for turn in turns[name] for step in turn.steps])
            schedule = schedule_of(run.layout, run.num_micro_batches)
            idle = [*formulas(schedule), *(f"{share:.3f}" for share in (measured.all, *measured))]
        rows.append(
            [name, *idle, f"{of_steps[name] / 1e9:.6f}", f"{seconds:.3f}", f"{forecast.total:.3f}",
             f"{forecast.total / seconds - 1:+.0%}", f"{forecast.bubble / (forecast.total - forecast.bubble):.3f}"]
        )  # fmt: skip
    print(
        f"\nA GPT-2 of 8 layers, hidden 256, 8 micro-batches of 256 tokens, float32; medians of "
        f"{num_turns} turns of {num_steps} steps\n"
    )
    head = ("schedule", "(P - 1) / m", "(P - 1) / (V m)", "measured idle time", "of which bubble", "of which waiting",
            "GFLOP of all ranks", "step s", "forecast s", "error", "forecast bubble")  # fmt: skip
    print(markdown(head, rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("what", nargs="?", choices=("all", "waits", "model"), default="all")
    parser.add_argument("--figure", type=Path, help="PNG file for the figure of `waits`")
    parser.add_argument("--gpu", help="device file for the forecasts; by default, this machine is calibrated first")
    parser.add_argument("--steps", type=int, default=5, help="recorded steps of each schedule and turn")
    parser.add_argument("--turns", type=int, default=2, help="turns of `model`")
    given = parser.parse_args(arguments)
    print_machine("torch")
    if given.what in ("all", "waits"):
        print_waits(given.steps, given.figure)
    if given.what in ("all", "model"):
        print_model(given.steps, given.turns, given.gpu)


if __name__ == "__main__":
    main()
