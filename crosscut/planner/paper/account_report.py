"""Sections of the scaling study on the additional work of the paper's program (`account`), and on the sizes of all
terms, whether the forecast contains them or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from crosscut.config import RunConfig
from crosscut.planner.compute import flops_per_step
from crosscut.planner.hardware import Hardware
from crosscut.planner.paper.account import MEASURED, STATE_BYTES, TERMS, V100, CopyRates, Term, copy_seconds
from crosscut.planner.paper.nvidia_page import PAGE_ROWS, page_forecast, share_of_linear
from crosscut.planner.paper.runs import (
    EPOCH_STEPS,
    PAPER_EPOCHS,
    PAPER_FLOPS_PER_SECOND,
    PAPER_HEADS,
    PAPER_WEAK_SCALING,
    attaining,
    paper_run,
    paper_scaling,
    paper_seconds,
    solve_attained,
)
from crosscut.planner.paper.sections import Section, points
from crosscut.planner.products import Speed
from crosscut.planner.program import PAPER_PROGRAM, Program
from crosscut.planner.time import StepTime, step_time

_Seconds = Callable[[RunConfig, Hardware], float]
"""Function that forecasts the seconds of one step of a run on a device."""

_SHOWN = {
    "8 GPUs": (paper_run("megatron-8.3b", 8), PAPER_WEAK_SCALING[8, 1]),
    "512 GPUs": (paper_run("megatron-8.3b", 8, 64), PAPER_WEAK_SCALING[8, 64]),
    "16 heads": (paper_run("megatron-8.3b", 8, num_heads=16), PAPER_HEADS[16]),
}
"""Runs whose forecasts the table of terms shows, with the published share of linear scaling."""


def besides() -> Section:
    """Section that lists the seconds of every term of `account`, for runs of the paper."""
    settings = dict.fromkeys([("megatron-1.2b", 1), ("megatron-1.2b", 8), ("megatron-8.3b", 8), *PAPER_EPOCHS])
    runs = [paper_run(preset, tensor) for preset, tensor in settings]
    rows = [(term.name, term.formula, *(f"{term.seconds(run):.3f}" for run in runs)) for term in TERMS]
    words = (
        "The paper's program was published with the paper (NVIDIA/Megatron-LM of 2019: mpu/random.py, mpu/grads.py, "
        "mpu/transformer.py, fp16/fp16.py, fp16/loss_scaler.py). This program did work that Crosscut does not do. The "
        "forecasts of Figure 6 and Tables 2 to 4 contain it; the table shows its seconds in one step. L is the number "
        "of layers, E the size of the residual stream in bytes, and T the number of tensor ranks. The program was "
        "written for PyTorch 1.1 (Megatron-LM issue 7), in which the random state of a device has "
        f"{STATE_BYTES:,} bytes (pytorch issue 20843). Each switch of the random stream for dropout copies this state "
        "to the host or back while the device waits; PyTorch 1.2 no longer copies the state (pytorch pull request "
        "20886). These copies and waits do not shrink with the number of tensor ranks. The rates of the copies are "
        "those that the developers of RAPIDS measured in the same summer (dask-cuda pull request 98): "
        f"{MEASURED.to_host / 1e9:.2f} GB/s from a GV100 to newly allocated memory of the host, and 5 to 6 GB/s "
        f"otherwise without pinned memory ({MEASURED.to_device / 1e9:g} GB/s here). A comment in mpu/random.py says "
        'that one more copy of the state, on the host, "caused major performance issues for +4 GPU cases". The 20 '
        f"microseconds of a wait are assumed. The 8.3B model's epoch in Table 4 is {_outside_steps():.2f} s per step "
        "longer than Table 2 and Figure 6 imply. According to the paper's own figures, this time is spent outside of "
        "the steps."
    )
    names = (f"{preset.removeprefix('megatron-')}, T = {tensor}" for preset, tensor in settings)
    return Section("Additional work of the paper's program", words, ("seconds of a step", "formula", *names), rows)


def _outside_steps() -> float:
    """Seconds per step by which the 8.3B model's epoch in Table 4 is longer than Table 2 and Figure 6 imply."""
    preset, tensor = "megatron-8.3b-24-heads", 8
    run = paper_run(preset, tensor, 64)
    scaling = PAPER_HEADS[24] * PAPER_WEAK_SCALING[8, 64] / PAPER_WEAK_SCALING[8, 1]
    rate = scaling * PAPER_FLOPS_PER_SECOND * run.layout.world_size
    return PAPER_EPOCHS[preset, tensor] * 86_400 / EPOCH_STEPS - flops_per_step(run, recompute=True) / rate


class Idea(NamedTuple):
    """Term that the forecast leaves out, with its effect."""

    name: str
    seconds: _Seconds
    """Forecast with the term."""
    why: str
    """Source of the term, and the reason against it."""
    changes_page: Callable[[Hardware], Hardware] | None = None
    """Change of the device that also has the effect on NVIDIA's page, if there is one."""


def terms() -> Section:
    """Section that shows by how many points each term changes the forecasts, accepted or not."""
    whole = _errors(paper_seconds)
    before = _page_error(V100)
    rows = [("forecast minus published", *map(points, (*whole, before)), "")]
    for term in TERMS:
        without = _errors(_without(term))
        changes = (points(error - other) for error, other in zip(whole, without, strict=True))
        rows.append((term.name, *changes, "", "accepted"))
    for idea in IDEAS:
        changes = (points(error - other) for error, other in zip(_errors(idea.seconds), whole, strict=True))
        on_page = points(_page_error(idea.changes_page(V100)) - before) if idea.changes_page else ""
        rows.append((idea.name, *changes, on_page, idea.why))
    header = ("term", *_SHOWN, "NVIDIA's page, 8 GPUs", "accepted, or why not")
    return Section("Terms and their sizes", _words(whole), header, rows)


def _errors(seconds: _Seconds) -> list[float]:
    """Forecast minus published share of linear scaling of each of the `_SHOWN` runs, calibrated by the paper's rate on
    one GPU.
    """
    one = paper_run("megatron-1.2b", 1)
    flops = flops_per_step(one, recompute=True)
    attained = solve_attained(V100, lambda v100: flops / seconds(one, v100), PAPER_FLOPS_PER_SECOND)
    v100 = attaining(V100, attained)
    return [paper_scaling(run, lambda run: seconds(run, v100)) - published for run, published in _SHOWN.values()]


def _page_error(hardware: Hardware) -> float:
    return page_forecast(hardware)[-1][1] - PAGE_ROWS[-1].scaling


def _words(errors: Sequence[float]) -> str:
    eight, many, more = (points(error) for error in (*errors[:2], errors[1] - errors[0]))
    return (
        "Each row adds one term to the forecast (for an accepted term: compared with the forecast without it), "
        "calibrates the products again, and shows by how much the share of linear scaling changes. Of the five figures "
        f"of Figure 6 and Table 2, the forecasts of four are within 3 points. That of 512 GPUs ({many}) is {more} "
        f"further off than that of 8 GPUs ({eight}): in the paper, data ranks cost 3 points, and in the forecast less. "
        "Not in the table: NVIDIA's page counts parameters and not FLOPs. If the paper's figures did so, too, the "
        f"forecasts would be {points(_by_parameters())} higher, but its 15.1 PFLOP/s are a count of FLOPs."
    )


def _by_parameters() -> float:
    """Points by which the forecast of 8 GPUs would be higher if scaling counted parameters instead of FLOPs."""
    run, one = paper_run("megatron-8.3b", 8), paper_run("megatron-1.2b", 1)
    flops = flops_per_step(run, recompute=True) / flops_per_step(one, recompute=True) / run.layout.world_size
    return (share_of_linear(run, one) / flops - 1) * paper_scaling(run)


def _without(term: Term) -> _Seconds:
    """Forecast without one of the terms that it contains."""
    return lambda run, v100: paper_seconds(run, v100) - term.seconds(run)


def _copies(rates: CopyRates) -> _Seconds:
    """Forecast with copies at other rates."""
    return lambda run, v100: paper_seconds(run, v100) - copy_seconds(run) + copy_seconds(run, rates)


def _on(changed: Callable[[Hardware], Hardware]) -> _Seconds:
    """Forecast on a changed device."""
    return lambda run, v100: paper_seconds(run, changed(v100))


def _step(run: RunConfig, v100: Hardware) -> StepTime:
    return step_time(run, v100, program=PAPER_PROGRAM)


def _other_program(run: RunConfig, v100: Hardware, program: Program) -> float:
    return paper_seconds(run, v100) + step_time(run, v100, program=program).total - _step(run, v100).total


def _simple(v100: Hardware) -> Hardware:
    return replace(v100, node=replace(v100.node, latency=3.4e-6))


def _slow_links(v100: Hardware) -> Hardware:
    return replace(v100, node=replace(v100.node, attained=0.7))


def _slow_starts(v100: Hardware) -> Hardware:
    return replace(v100, start=10e-6)


def _large_tiles(run: RunConfig, v100: Hardware) -> float:
    speed = Speed(v100, run.training.precision, tile=(256, 128))
    time = step_time(run, v100, program=PAPER_PROGRAM, speed=speed)
    return paper_seconds(run, v100) + time.total - _step(run, v100).total


def _late_sums(run: RunConfig, v100: Hardware) -> float:
    return _other_program(run, v100, PAPER_PROGRAM._replace(overlaps_data=False))


def _held_processors(run: RunConfig, v100: Hardware) -> float:
    sums = [entry.seconds for entry in _step(run, v100).exchanges if entry.collective.purpose == "gradients"]
    return paper_seconds(run, v100) + sum(sums) * 4 / v100.multiprocessors


def _lower_clocks(run: RunConfig, v100: Hardware) -> float:
    several = run.layout.world_size > 1
    return paper_seconds(run, attaining(v100, 0.99 * v100.products_attained) if several else v100)


_LINK = V100.host_bandwidth
IDEAS = (
    Idea(
        "copies at the link's stated 16 GB/s",
        _copies(CopyRates(_LINK, _LINK)),
        "no: the shortest possible time, which pageable memory does not reach",
    ),
    Idea(
        "copies in both directions at the rate of those to the host",
        _copies(CopyRates(MEASURED.to_host, MEASURED.to_host)),
        "no: only copies to the host allocate memory",
    ),
    Idea(
        "3.4 microseconds for a step around a ring (NCCL's protocol Simple) instead of 1.9",
        _on(_simple),
        "no: from NCCL's tuning model (src/graph/tuning.cc), but one latency for all sizes is simpler",
        _simple,
    ),
    Idea(
        "links that attain 70% instead of 80%",
        _on(_slow_links),
        "no: would be fitted; no measurement of a DGX-2's switches with messages of 50 MB was found",
        _slow_links,
    ),
    Idea(
        "tiles of 256 x 128 instead of 128 x 128",
        _large_tiles,
        "no: cuBLAS has such kernels for the V100, but its rule of choice is not published",
    ),
    Idea(
        "kernels that start 10 microseconds apart instead of 2",
        _on(_slow_starts),
        "no: launches that keep the device waiting were not published",
        _slow_starts,
    ),
    Idea(
        "clocks that are 1% lower if several GPUs of a server compute",
        _lower_clocks,
        "no: clocks under load were not published",
    ),
    Idea(
        "gradients that are summed after the backward pass",
        _late_sums,
        "no: the published scripts' default, but the paper sums them during the backward pass (section 3.2)",
    ),
    Idea(
        "4 of 80 multiprocessors that sum gradients and do not compute",
        _held_processors,
        "no: the number of NCCL's channels was not published",
    ),
)
"""Terms that the forecast leaves out."""
