"""Forecasts of Table 1 of Narayanan et al. 2021 (arXiv 2104.04473): ten models on up to 3,072 A100s.

The layouts, the micro-batches and the stages per rank come from the authors' script, `examples/sc21/run_table_1.sh` in
NVIDIA/Megatron-LM. All models have a vocabulary of 51,200 tokens and sequences of 2,048 tokens, and recompute whole
layers. The published FLOP/s include recomputed FLOPs. One row calibrates the forecasts of all rows.
"""

from typing import NamedTuple

from crosscut.config import Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.config.precision import Precision
from crosscut.config.training import Recompute
from crosscut.planner.compute import flops_per_step
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware
from crosscut.planner.paper.runs import attaining, solve_attained
from crosscut.planner.program import Program
from crosscut.planner.time import step_time

_A100 = KNOWN_HARDWARE["a100-80gb"]
_LENGTH, _VOCABULARY = 2048, 51_200
_BUCKET_BYTES = 25 * 2**20
"""Size of a bucket of gradients: the default of PyTorch's `DistributedDataParallel`."""


class NarayananRow(NamedTuple):
    """Row of Table 1."""

    name: str
    num_heads: int
    hidden_size: int
    num_layers: int
    tensor: int
    pipeline: int
    num_gpus: int
    batch_size: int
    micro_batch_size: int
    stages_per_rank: int
    teraflops: float
    """Published TFLOP/s of one GPU, including recomputed FLOPs."""

    @property
    def data(self) -> int:
        """Number of data ranks."""
        return self.num_gpus // (self.tensor * self.pipeline)


NARAYANAN_ROWS = (
    NarayananRow("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
    NarayananRow("3.6B", 32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
    NarayananRow("7.5B", 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142),
    NarayananRow("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
    NarayananRow("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138),
    NarayananRow("76.1B", 80, 10_240, 60, 8, 4, 1024, 1792, 2, 3, 140),
    NarayananRow("145.6B", 96, 12_288, 80, 8, 8, 1536, 2304, 2, 2, 148),
    NarayananRow("310.1B", 128, 16_384, 96, 8, 16, 1920, 2160, 1, 2, 155),
    NarayananRow("529.6B", 128, 20_480, 105, 8, 35, 2520, 2520, 1, 3, 163),
    NarayananRow("1008B", 160, 25_600, 128, 8, 64, 3072, 3072, 1, 1, 163),
)
NARAYANAN_CALIBRATION = NARAYANAN_ROWS[1]
"""Row that calibrates the forecasts for the A100, chosen by the same rule as `MEGATRON_CALIBRATION`: the smallest model
with both tensor and data parallelism.
"""


def narayanan_program(row: NarayananRow) -> Program:
    """Properties of the authors' program in a row of the table.

    The program fuses operators, but writes the attention scores to memory (section 4.2). Its tensor messages overlap
    with nothing, its weights have 16 bits, and it recomputes whole layers. In rows without pipeline stages, gradients
    are reduced during the backward pass, in PyTorch's buckets. In rows with stages, gradients are reduced as one
    message after the passes (`DDP` in the script).
    """
    staged = row.pipeline > 1
    return Program(
        compiled=True,
        fused_attention=False,
        overlaps_tensor=False,
        overlaps_data=not staged,
        casts_weights=False,
        repeats_last=True,
        bucket_bytes=None if staged else _BUCKET_BYTES,
    )


def narayanan_run(row: NarayananRow) -> RunConfig:
    """Return the run of a row of the table. Stages have equal numbers of layers, as in the authors' program."""
    num_stages = row.pipeline * row.stages_per_rank
    return RunConfig(
        model=ModelConfig(
            num_layers=row.num_layers,
            hidden_size=row.hidden_size,
            num_heads=row.num_heads,
            vocab_size=_VOCABULARY,
            max_sequence_length=_LENGTH,
        ),
        layout=Layout(
            tensor=row.tensor,
            data=row.data,
            pipeline=row.pipeline,
            stages_per_rank=row.stages_per_rank,
            stages=(row.num_layers // num_stages,) * num_stages if num_stages > 1 else (),
        ),
        training=TrainingConfig(
            batch_size=row.batch_size,
            micro_batch_size=row.micro_batch_size,
            sequence_length=_LENGTH,
            precision=Precision.FLOAT16,
            recompute=Recompute.FULL,
        ),
    )


def narayanan_flops_per_second(row: NarayananRow, hardware: Hardware) -> float:
    """Forecast of the FLOP/s of one GPU for a row of the table, including recomputed FLOPs."""
    run = narayanan_run(row)
    seconds = step_time(run, hardware, program=narayanan_program(row)).total
    return flops_per_step(run, recompute=True) / seconds / run.layout.world_size


def narayanan_attained(row: NarayananRow = NARAYANAN_CALIBRATION) -> float:
    """Share of the peak that the A100's products attain, solved from one row of the table."""
    return solve_attained(_A100, lambda hardware: narayanan_flops_per_second(row, hardware), row.teraflops * 1e12)


def narayanan_shares(calibration: NarayananRow = NARAYANAN_CALIBRATION) -> dict[str, tuple[float, float]]:
    """Published and forecast FLOP/s of each row, as shares of the peak. The forecasts are calibrated with the published
    FLOP/s of the row `calibration`.
    """
    hardware, peak = attaining(_A100, narayanan_attained(calibration)), _A100.flops[Precision.FLOAT16]
    return {
        row.name: (row.teraflops * 1e12 / peak, narayanan_flops_per_second(row, hardware) / peak)
        for row in NARAYANAN_ROWS
    }
