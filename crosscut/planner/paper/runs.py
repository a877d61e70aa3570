"""Published runs and their forecasts. In each set of runs, one figure calibrates the forecast of the other figures.

The paper (arXiv 1909.08053) states 39 TFLOP/s for the 1.2B model on one GPU. This figure calibrates the share of the
peak that the V100's products attain, and the forecast then predicts Figure 6 and Tables 2 to 4. NVIDIA's Megatron-Core
(r0.8.0, README) states the throughput of nine models on H100s. One of these rows calibrates the forecasts for the H100,
which then predict the other eight rows.

The paper's FLOP/s include recomputed FLOPs. Megatron-Core's runs do not recompute.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from crosscut.config import PRESETS, Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.config.precision import Precision
from crosscut.config.training import Recompute
from crosscut.planner.compute import flops_per_step
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware
from crosscut.planner.paper.account import account
from crosscut.planner.program import PAPER_PROGRAM, Program
from crosscut.planner.time import step_time

PAPER_FLOPS_PER_SECOND = 39e12
"""FLOP/s of the 1.2B model on one GPU "over the course of the entire training application" (section 1)."""

PAPER_HEADLINE = 15.1e15
"""Highest total FLOP/s of 512 GPUs (section 1)."""

PAPER_SCALING = {"megatron-1.2b": 1, "megatron-2.5b": 2, "megatron-4.2b": 4, "megatron-8.3b": 8}
"""Table 1: tensor ranks of each model. Runs with data parallelism use 64 times as many GPUs."""

PAPER_WEAK_SCALING = {(8, 1): 0.77, (8, 64): 0.74}
"""Figure 6 (values from section 5.1.1): share of linear scaling relative to one GPU, keyed by (tensor, data) ranks."""

PAPER_HEADS = {16: 0.82, 24: 0.80, 32: 0.77}
"""Table 2: share of linear scaling of the 8.3B model on 8 tensor ranks, keyed by number of attention heads."""

PAPER_SPEED_UPS = {2: 1.64, 4: 2.34, 8: 2.98}
"""Table 3: speed-up of the 1.2B model over one GPU with a fixed batch of 8 sequences, keyed by tensor ranks."""

PAPER_EPOCHS = {("megatron-355m", 1): 0.86, ("megatron-2.5b", 2): 2.27, ("megatron-8.3b-24-heads", 8): 2.10}
"""Table 4: days for 68,507 steps of 512 sequences with 64 data ranks, keyed by model and tensor ranks."""

EPOCH_STEPS = 68_507
_MOST_STEPS, _PRECISION = 24, 1e-9
_DAY = 86_400
_V100 = KNOWN_HARDWARE["v100-32gb-dgx2h"]
_H100 = KNOWN_HARDWARE["h100-sxm"]


def paper_run(preset: str, tensor: int, data: int = 1, *, num_heads: int = 0) -> RunConfig:
    """Return a run of the paper: float16, dropout, whole layers recomputed, 8 sequences per data rank.

    `num_heads` replaces the number of heads of the preset; 0 keeps it.
    """
    shape = PRESETS[preset] | ({"num_heads": num_heads} if num_heads else {})
    return RunConfig(
        model=ModelConfig(**shape),
        layout=Layout(tensor=tensor, data=data),
        training=TrainingConfig(batch_size=8 * data, precision=Precision.FLOAT16, recompute=Recompute.FULL),
    )


def paper_seconds(run: RunConfig, hardware: Hardware = _V100) -> float:
    """Forecast of the seconds of one step of the paper's program, with the work that Crosscut does not do."""
    return step_time(run, hardware, program=PAPER_PROGRAM).total + sum(account(run).values())


def paper_scaling(run: RunConfig, seconds: Callable[[RunConfig], float] = paper_seconds) -> float:
    """Share of linear scaling that a run reaches, compared with the 1.2B model on one GPU.

    `seconds` is the function that forecasts the seconds of one step of a run.
    """
    one = paper_run("megatron-1.2b", 1)
    work = flops_per_step(run, recompute=True) / flops_per_step(one, recompute=True) / run.layout.world_size
    return work * seconds(one) / seconds(run)


def paper_highest(seconds: Callable[[RunConfig], float] = paper_seconds) -> float:
    """Forecast the share of linear scaling of the fastest run on 512 GPUs. The paper does not name the run of its
    headline, so the heads of the 8.3B model are those of Table 2 with which it is fastest.
    """
    return max(paper_scaling(paper_run("megatron-8.3b", 8, 64, num_heads=heads), seconds) for heads in PAPER_HEADS)


def paper_speed_up(tensor: int, seconds: Callable[[RunConfig], float] = paper_seconds) -> float:
    """Forecast how many times faster the 1.2B model trains on `tensor` tensor ranks than on one GPU, as in Table 3.

    `seconds` is the function that forecasts the seconds of one step of a run.
    """
    return seconds(paper_run("megatron-1.2b", 1)) / seconds(paper_run("megatron-1.2b", tensor))


def paper_epoch_days(preset: str, tensor: int, seconds: Callable[[RunConfig], float] = paper_seconds) -> float:
    """Forecast the days of one epoch, as in Table 4.

    `seconds` is the function that forecasts the seconds of one step of a run.
    """
    return EPOCH_STEPS * seconds(paper_run(preset, tensor, 64)) / _DAY


class MegatronRow(NamedTuple):
    """Row of Megatron-Core's table.

    All models use 4096 tokens per sequence, a vocabulary of 131,072 tokens, and bfloat16.
    """

    name: str
    num_heads: int
    hidden_size: int
    num_layers: int
    tensor: int
    stages: int
    batch_size: int
    teraflops: float
    """Published TFLOP/s of one GPU."""


MEGATRON_ROWS = (
    MegatronRow("1.7B", 16, 2048, 24, 1, 1, 192, 408.8),
    MegatronRow("7.1B", 32, 4096, 30, 2, 1, 192, 465.9),
    MegatronRow("16B", 48, 6144, 32, 4, 1, 192, 489.1),
    MegatronRow("32B", 56, 7168, 48, 8, 1, 192, 459.6),
    MegatronRow("70B", 64, 8192, 84, 8, 2, 384, 419.7),
    MegatronRow("119B", 80, 10240, 92, 8, 4, 768, 420.5),
    MegatronRow("177B", 96, 12288, 96, 8, 6, 1152, 432.8),
    MegatronRow("314B", 128, 16384, 96, 8, 8, 1536, 474.4),
    MegatronRow("462B", 144, 18432, 112, 8, 16, 3072, 459.9),
)
MEGATRON_CALIBRATION = MEGATRON_ROWS[1]
"""Row that calibrates the forecasts for the H100: the smallest model with both tensor and data parallelism. The choice
matters, so `planner.paper.study` shows the errors for every choice.
"""

_DATA, _LENGTH, _VOCABULARY = 48, 4096, 131_072
_MICRO_BATCHES = (1, 2, 4)
MEGATRON_PROGRAM = Program(
    compiled=True, casts_weights=False, shards_optimizer=True, overlaps_stages=True, bucket_bytes=None
)
"""Properties of Megatron-Core according to its README: fused operators, messages that overlap piece by piece with
products (`--tp-comm-overlap`), the distributed optimizer, and gradients and weights that are sent while the passes run
(`--overlap-grad-reduce`, `--overlap-param-gather`)."""


def megatron_flops_per_second(row: MegatronRow, hardware: Hardware = _H100) -> float:
    """Forecast of the model FLOP/s of one GPU for a row of Megatron-Core's table.

    The table states neither the micro-batch size nor the number of stages of each rank. The forecast uses the fastest
    of the micro-batch sizes 1, 2 and 4. It makes each layer a stage and simulates the schedule of these stages.
    """
    return max(_megatron_rate(row, micro, hardware) for micro in _MICRO_BATCHES)


def _megatron_rate(row: MegatronRow, micro: int, hardware: Hardware) -> float:
    split, layers = row.tensor > 1, row.num_layers // row.stages
    model = ModelConfig(
        num_layers=row.num_layers,
        hidden_size=row.hidden_size,
        num_heads=row.num_heads,
        vocab_size=_VOCABULARY,
        max_sequence_length=_LENGTH,
        dropout=0.0,
    )
    layout = Layout(
        tensor=row.tensor,
        data=_DATA,
        pipeline=row.stages,
        stages_per_rank=layers if row.stages > 1 else 1,
        sequence_parallel=split,
        symmetric_memory=split,
    )
    training = TrainingConfig(
        batch_size=row.batch_size, micro_batch_size=micro, sequence_length=_LENGTH, precision=Precision.BFLOAT16
    )
    run = RunConfig(model=model, layout=layout, training=training)
    return flops_per_step(run) / step_time(run, hardware, program=MEGATRON_PROGRAM).total / layout.world_size


def megatron_errors(calibration: MegatronRow) -> dict[str, float]:
    """Error of the forecast of each row: forecast minus published FLOP/s, as a share of the peak. The forecasts are
    calibrated with the published FLOP/s of the row `calibration`.
    """
    attained = megatron_attained(calibration)
    hardware = attaining(_H100, attained)
    peak = _H100.flops["bfloat16"]
    return {row.name: (megatron_flops_per_second(row, hardware) - row.teraflops * 1e12) / peak for row in MEGATRON_ROWS}


def solve_attained(hardware: Hardware, rate_of: Callable[[Hardware], float], wanted: float) -> float:
    """Return the share of the peak that the device's products must attain so that the forecast rate is `wanted`.

    `rate_of` forecasts the rate of a run on a given device, such as FLOP/s. The seconds of a step are almost linear in
    the reciprocal of the share, so the secant method finds the reciprocal in a few steps.
    """

    def excess(reciprocal: float) -> float:
        return wanted / rate_of(attaining(hardware, 1 / reciprocal)) - 1

    before, reciprocal = 1.0, 2.0
    error_before, error = excess(before), excess(reciprocal)
    for _ in range(_MOST_STEPS):
        if abs(error) < _PRECISION:
            break
        step = error * (reciprocal - before) / (error - error_before)
        before, reciprocal = reciprocal, max(reciprocal - step, reciprocal / 2)
        error_before, error = error, excess(reciprocal)
    return 1 / reciprocal


def attaining(hardware: Hardware, attained: float) -> Hardware:
    """Return a copy of the device whose products attain the share `attained` of the peak.

    The rate of attention is scaled by the same factor as the rate of products.
    """
    share = hardware.attention_attained / hardware.products_attained
    return replace(hardware, products_attained=attained, attention_attained=share * attained)


def megatron_attained(row: MegatronRow = MEGATRON_CALIBRATION) -> float:
    """Share of the peak that the H100's products attain, solved from one row of Megatron-Core's table."""
    return solve_attained(_H100, lambda hardware: megatron_flops_per_second(row, hardware), row.teraflops * 1e12)
