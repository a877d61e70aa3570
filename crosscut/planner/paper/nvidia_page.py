"""A second published study of weak scaling: NVIDIA's page on version 1.0 of its program.

The page (nv-adlr.github.io/MegatronLMV1) has the same GPUs, batch and definition of the models' sizes as the paper, but
a faster program, which was written when PyTorch no longer copied the random generator's state. It gives milliseconds of
a step. The time on one GPU calibrates the forecast, as the paper's 39 TFLOP/s do for the paper.

The page does not give the shapes of its models. The shapes here are assumed: with them, the ratios of the numbers of
parameters give the page's three percentages, and the first model's FLOPs give the page's 62.4 TFLOP/s.
"""

from typing import NamedTuple

from crosscut.config import Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.config.precision import Precision
from crosscut.config.training import Recompute
from crosscut.planner.hardware import Hardware
from crosscut.planner.paper.account import V100
from crosscut.planner.paper.runs import attaining, solve_attained
from crosscut.planner.paper.sections import Section, percent, percent_more, points
from crosscut.planner.parameters import count_parameters
from crosscut.planner.program import PAPER_PROGRAM, Program
from crosscut.planner.time import step_time


class Shape(NamedTuple):
    """Shape of a model."""

    hidden_size: int
    num_heads: int
    num_layers: int


class PageRow(NamedTuple):
    """Row of the page's table."""

    billions: str
    tensor: int
    milliseconds: int
    scaling: float
    """Published share of linear scaling: parameters per second and rank, relative to the first row."""
    shape: Shape
    """Assumed shape: heads of 128."""
    other: Shape
    """Another shape with as many parameters: the widths of the paper's Table 1."""


PAGE_ROWS = (
    PageRow("1.2", 1, 1288, 1.0, Shape(1920, 15, 24), Shape(1536, 16, 40)),
    PageRow("2.0", 2, 1242, 0.907, Shape(2304, 18, 30), Shape(1920, 20, 43)),
    PageRow("4.2", 4, 1357, 0.865, Shape(3072, 24, 36), Shape(2304, 24, 64)),
    PageRow("8.7", 8, 1508, 0.796, Shape(4096, 32, 42), Shape(3072, 32, 75)),
)
PAGE_FLOPS_PER_SECOND = 62.4e12
"""FLOP/s of the first model on one GPU, as the page states them."""
_BATCH, _VOCABULARY, _LENGTH = 8, 51_200, 1024


def page_run(shape: Shape, tensor: int) -> RunConfig:
    """Return a run of the page, with a model of this shape."""
    model = ModelConfig(**shape._asdict(), vocab_size=_VOCABULARY, max_sequence_length=_LENGTH, dropout=0.1)
    training = TrainingConfig(batch_size=_BATCH, precision=Precision.FLOAT16, recompute=Recompute.FULL)
    return RunConfig(model=model, layout=Layout(tensor=tensor), training=training)


def page_seconds(run: RunConfig, hardware: Hardware = V100, program: Program = PAPER_PROGRAM) -> float:
    """Forecast of the seconds of one step, without the additional work of the paper's program (`account`)."""
    return step_time(run, hardware, program=program).total


def page_forecast(
    hardware: Hardware = V100, program: Program = PAPER_PROGRAM, *, others: bool = False
) -> list[tuple[float, float]]:
    """Forecast seconds and share of linear scaling of each row, calibrated by the first row.

    With `others`, the models have the other shapes.
    """
    runs = [page_run(row.other if others else row.shape, row.tensor) for row in PAGE_ROWS]
    published = PAGE_ROWS[0].milliseconds / 1e3
    attained = solve_attained(hardware, lambda v100: 1 / page_seconds(runs[0], v100, program), 1 / published)
    times = [page_seconds(run, attaining(hardware, attained), program) for run in runs]
    return [
        (seconds, share_of_linear(run, runs[0]) * times[0] / seconds) for run, seconds in zip(runs, times, strict=True)
    ]


def share_of_linear(run: RunConfig, one: RunConfig) -> float:
    """Parameters of a rank of `run` as a multiple of those of `one`. This is the page's share of linear scaling if a
    step takes equally long.
    """
    return count_parameters(run.model) / count_parameters(one.model) / run.layout.world_size


def page_section() -> Section:
    """Section that compares the page's table with forecasts, and tells how they depend on what the page leaves out."""
    plain, fused = page_forecast(), page_forecast(program=PAPER_PROGRAM._replace(compiled=True))
    other = page_forecast(others=True)
    rows, bars = [], []
    for row, (seconds, scaling), *variants in zip(PAGE_ROWS, plain, other, fused, strict=True):
        note = " (calibration)" if row is PAGE_ROWS[0] else ""
        error = percent_more(seconds * 1e3 / row.milliseconds - 1) if not note else ""
        told = (f"{row.milliseconds:,}", f"{seconds * 1e3:,.0f}", error, percent(row.scaling), percent(scaling))
        rest = (points(share - row.scaling) for _, share in ((seconds, scaling), *variants))
        rows.append((f"{row.billions}B{note}", f"{row.tensor}", *told, *rest))
        bars.append((f"{row.tensor} GPUs", (row.scaling, scaling)))
    last = points(plain[-1][1] - PAGE_ROWS[-1].scaling)
    header = ("model", "tensor ranks", "ms", "ours", "error", "scaling", "ours", "difference")
    return Section(
        "NVIDIA's page: weak scaling again",
        _words(last),
        (*header, "with other shapes", "with fused passes"),
        rows,
        bars,
    )


def _words(last: str) -> str:
    shapes = ", ".join(f"{row.shape.hidden_size:,} x {row.shape.num_layers}" for row in PAGE_ROWS)
    others = ", ".join(f"{row.other.hidden_size:,} x {row.other.num_layers}" for row in PAGE_ROWS)
    return (
        "NVIDIA's page on version 1.0 of the program (nv-adlr.github.io/MegatronLMV1): milliseconds of a step on the "
        "same GPUs, with a batch of 8. The time on one GPU calibrates the forecast. The page's scaling counts "
        "parameters per second, where the paper counts FLOPs. The page does not give the shapes; assumed are widths x "
        f"layers of {shapes}, with heads of 128 columns. With them, the numbers of parameters give all of the page's "
        "percentages, and the FLOPs of the first model its 62.4 TFLOP/s. Two columns show what else the difference "
        f"would be: with the widths of the paper's Table 1 ({others}), and if version 1.0 fused its passes over memory "
        "(the page names no optimization). By then, PyTorch no longer copied the random state, and the forecast of the "
        f"largest model is off by {last} without any additional work. The rest of the difference appears with the "
        "second GPU and does not grow."
    )
