"""Report that compares the planner with the paper's scaling study and with other published tables.

One published figure calibrates each table of forecasts. The report names this figure. Nothing else is fitted.
"""

from functools import cache

from crosscut.config import PRESETS, ModelConfig
from crosscut.planner.compute import flops_per_step
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.memory import forecast_memory
from crosscut.planner.paper.account_report import besides, terms
from crosscut.planner.paper.nvidia_page import page_section
from crosscut.planner.paper.published_tables import (
    WITHIN,
    contexts,
    mixtures,
    narayanan,
    narayanan_choices,
    schedules,
)
from crosscut.planner.paper.runs import (
    EPOCH_STEPS,
    MEGATRON_CALIBRATION,
    MEGATRON_ROWS,
    PAPER_EPOCHS,
    PAPER_FLOPS_PER_SECOND,
    PAPER_HEADLINE,
    PAPER_HEADS,
    PAPER_SCALING,
    PAPER_SPEED_UPS,
    PAPER_WEAK_SCALING,
    megatron_attained,
    megatron_errors,
    megatron_flops_per_second,
    paper_epoch_days,
    paper_highest,
    paper_run,
    paper_scaling,
    paper_seconds,
    paper_speed_up,
)
from crosscut.planner.paper.sections import Report, Section, percent, percent_more, points
from crosscut.planner.parameters import count_parameters

_DAY = 86_400
_MARK = "Written by `crosscut study scaling`; in docs/ by `python docs/generate.py`."
_H100_PEAK = KNOWN_HARDWARE["h100-sxm"].flops["bfloat16"]
_V100 = KNOWN_HARDWARE["v100-32gb-dgx2h"]


@cache
def scaling_report() -> Report:
    """Compute all sections of the report. They are computed once, in a few seconds."""
    paper = (_models, _weak_scaling, _three_meanings, _heads, _speed_ups, _epochs, besides, page_section, terms)
    published = (_megatron, _choices, narayanan, narayanan_choices, schedules, contexts, mixtures)
    return Report(_MARK, _TITLE, _WORDS, [make() for make in (*paper, *published)])


_TITLE = "Published scaling and the planner's forecasts"
_WORDS = (
    "This page compares the planner's forecasts with figures that the paper, NVIDIA, Narayanan et al. and torchtitan "
    "published. One figure per table calibrates the share of the peak that matrix products attain: for the paper's "
    "V100s, the result on one GPU (39 TFLOP/s of the 1.2B model), and for every other table, the row that is marked. "
    "Nothing else is fitted. The columns named `ours` hold the forecasts. `crosscut study scaling` writes this report."
)


def _models() -> Section:
    rows = []
    for preset, published in PAPER_SCALING.items():
        billions = count_parameters(ModelConfig(**PRESETS[preset])) / 1e9
        rows.append((preset, f"{billions:.2f}", str(published), str(_smallest_tensor(preset))))
    words = (
        "For each model, the table gives the tensor ranks that the paper used (`tensor ranks`) and the fewest tensor "
        "ranks with which the paper's training (micro-batches of 8 sequences, whole layers recomputed) fits into 32 GB "
        "according to the forecast (`ours`). The forecast counts the memory of Crosscut, whose gradients are float32."
    )
    return Section("Table 1: the models", words, ("model", "billion parameters", "tensor ranks", "ours"), rows)


def _smallest_tensor(preset: str) -> int:
    return next(t for t in (1, 2, 4, 8, 16) if forecast_memory(paper_run(preset, t)).total <= _V100.memory)


def _weak_scaling() -> Section:
    rows, bars = [], []
    for data in (1, 64):
        for preset, tensor in PAPER_SCALING.items():
            run = paper_run(preset, tensor, data)
            ours, published = paper_scaling(run), PAPER_WEAK_SCALING.get((tensor, data))
            told = ("", "") if published is None else (percent(published), points(ours - published))
            rows.append((preset, f"{tensor} x {data}", told[0], percent(ours), told[1]))
            if published is not None:
                bars.append((f"{tensor * data} GPUs", (published, ours)))
    words = (
        "Percentages compare the FLOP/s of a run with linear scaling from one GPU. The paper's text gives two of these "
        "percentages (section 5.1.1). The forecasts of this table and of Tables 2 to 4 contain the additional work of "
        "the paper's program, which has a table below. Another table has the sizes of the terms that are left out."
    )
    return Section(
        "Figure 6: weak scaling", words, ("model", "tensor x data", "paper", "ours", "difference"), rows, bars
    )


def _three_meanings() -> Section:
    linear = 512 * PAPER_FLOPS_PER_SECOND
    run = paper_run("megatron-8.3b-24-heads", 8, 64)
    days = PAPER_EPOCHS["megatron-8.3b-24-heads", 8]
    over_epoch = EPOCH_STEPS * flops_per_step(run, recompute=True) / _DAY / linear
    one, many = (paper_scaling(paper_run("megatron-8.3b", 8, data)) for data in (1, 64))
    meanings = [
        (
            *("76%", "highest rate of 512 GPUs (15.1 PFLOP/s) / (512 x 39 TFLOP/s)"),
            *(PAPER_HEADLINE / linear, paper_highest()),
        ),
        ("77%", "8.3B model on 8 tensor ranks, no data parallelism (Figure 6a)", PAPER_WEAK_SCALING[8, 1], one),
        ("74%", "8.3B model with 32 heads on 8 x 64 GPUs (Figure 6b)", PAPER_WEAK_SCALING[8, 64], many),
        (
            *("(none)", "8.3B model with 24 heads on 8 x 64 GPUs, whole epoch (Table 4)"),
            *(over_epoch / days, over_epoch / paper_epoch_days("megatron-8.3b-24-heads", 8)),
        ),
    ]
    rows = [(*told, percent(paper), percent(ours), points(ours - paper)) for *told, paper, ours in meanings]
    words = (
        "The paper uses three different definitions of scaling. A fourth definition follows from Table 4 of the paper. "
        "The first and the fourth have the largest differences: the paper does not name the run of its highest rate "
        "(ours is the fastest of Table 2's numbers of heads), and an epoch has more than the steps that are forecast."
    )
    header = ("paper", "definition", "computed from the paper's figures", "ours", "difference")
    return Section("Origin of 76, 77 and 74%", words, header, rows)


def _heads() -> Section:
    ours = {heads: paper_scaling(paper_run("megatron-8.3b", 8, num_heads=heads)) for heads in PAPER_HEADS}
    rows = [
        (f"{heads}", percent(published), percent(ours[heads]), points(ours[heads] - published))
        for heads, published in PAPER_HEADS.items()
    ]
    drawn = [(f"{heads} heads", (published, ours[heads])) for heads, published in PAPER_HEADS.items()]
    words = (
        "Share of linear scaling of the 8.3B model on 8 tensor ranks. The memory of the attention scores is "
        "proportional to the number of heads."
    )
    return Section("Table 2: attention heads", words, ("heads", "paper", "ours", "difference"), rows, drawn)


def _speed_ups() -> Section:
    one = flops_per_step(paper_run("megatron-1.2b", 1), recompute=True) / PAPER_FLOPS_PER_SECOND
    rows, bars, constants = [], [], []
    for tensor, published in PAPER_SPEED_UPS.items():
        ours, seconds = paper_speed_up(tensor), paper_seconds(paper_run("megatron-1.2b", tensor))
        missing = one / published - seconds
        constants.append(missing / (1 - 1 / tensor))
        told = (percent_more(ours / published - 1), f"{missing:.2f} s")
        rows.append((f"{tensor}", f"{published:.2f}", f"{ours:.2f}", *told))
        bars.append((f"{tensor} GPUs", (published, ours)))
    words = (
        "Speed-up of the 1.2B model over one GPU, with 8 sequences per step on any number of ranks. The last column is "
        "the extra time per step of the paper's run over the forecast. A nearly constant time would explain the three "
        f"rows: {min(constants):.2f} to {max(constants):.2f} s in every step, also on one GPU, where the calibration "
        "hides this time."
    )
    header = ("tensor ranks", "paper", "ours", "difference", "missing per step")
    return Section("Table 3: strong scaling", words, header, rows, bars)


def _epochs() -> Section:
    rows, bars = [], []
    for (preset, tensor), published in PAPER_EPOCHS.items():
        ours = paper_epoch_days(preset, tensor)
        missing = f"{(published - ours) * _DAY / EPOCH_STEPS:.2f} s"
        rows.append((preset, f"{published:.2f}", f"{ours:.2f}", percent_more(ours / published - 1), missing))
        bars.append((preset, (published, ours)))
    words = (
        f"Days for {EPOCH_STEPS:,} steps of 512 sequences. As in Table 3, the forecast lacks some seconds per step. "
        "The missing seconds do not shrink when a rank computes less, so they are proportional neither to FLOPs nor to "
        "bytes. The forecast leaves out the data loader, validation, checkpoints and delays by the host, but the "
        "paper's figures cover the whole training."
    )
    return Section("Table 4: an epoch", words, ("model", "paper", "ours", "difference", "missing per step"), rows, bars)


def _megatron() -> Section:
    errors = megatron_errors(MEGATRON_CALIBRATION)
    rows, bars = [], []
    for row in MEGATRON_ROWS:
        published, ours = row.teraflops * 1e12 / _H100_PEAK, megatron_flops_per_second(row) / _H100_PEAK
        note = " (calibration)" if row is MEGATRON_CALIBRATION else ""
        layout = f"{row.tensor} x {row.stages} x 48"
        rows.append((f"{row.name}{note}", layout, percent(published), percent(ours), points(errors[row.name])))
        bars.append((row.name, (published, ours)))
    met = sum(abs(error) <= WITHIN for error in errors.values())
    words = (
        "Utilisation as a share of the dense peak. Layouts are tensor x pipeline x data ranks. The forecasts of "
        f"{met} of {len(errors)} rows are within 5 points, including the row that calibrates the forecast. NVIDIA did "
        "not publish the micro-batch sizes or the number of stages of each pipeline rank. The forecast uses the "
        "fastest micro-batch of 1, 2 and 4 sequences, and simulates the interleaved schedule with as many stages as "
        "layers. According to NVIDIA's README, the reduction of gradients overlaps with the passes of other stages."
    )
    return Section("Megatron-Core on H100", words, ("model", "layout", "published", "ours", "difference"), rows, bars)


def _choices() -> Section:
    rows = []
    for row in MEGATRON_ROWS:
        errors = megatron_errors(row).values()
        met = sum(abs(error) <= WITHIN for error in errors)
        worst = max(errors, key=abs)
        rows.append((row.name, percent(megatron_attained(row)), f"{met} of {len(errors)}", points(worst)))
    words = (
        "Each row of the previous table could calibrate the forecast. For each choice, this table shows the share of "
        "the peak that products attain, the number of rows within 5 points, and the largest error of all rows."
    )
    header = ("calibrated by", "products attain", "within 5 points", "largest error")
    return Section("Megatron-Core: another row as the calibration", words, header, rows)
