"""Forecasts of torchtitan's tables of December 2024: Llama 3.1 on H100s in float8, with stages and with context ranks.

Source: `benchmarks/llama3_h100_202412_torchtitan.md` of pytorch/torchtitan, Tables 2, 5 and 6. The H100s had HBM2e of
2.4 TB/s. Whole layers are recomputed, tensor messages overlap with products ("AsyncTP"), and the weights are sharded
over all data and context ranks. In each table, one row calibrates the share of the peak that products attain.

The source does not state the number of micro-batches. At that time, torchtitan's default was the number of pipeline
ranks, 8 (pull request 781 of 2025-01-07 changed the default). With 8 micro-batches, the rows with 8,192 and with 32,768
tokens have the same number of tokens in a micro-batch.
"""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from crosscut.config import PRESETS, Layout, ModelConfig, TrainingConfig
from crosscut.config.layout import ContextAttention, ZeroStage
from crosscut.config.precision import Precision
from crosscut.config.training import Device, Recompute
from crosscut.planner.candidate import Candidate
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware
from crosscut.planner.paper.runs import attaining, solve_attained
from crosscut.planner.program import Program
from crosscut.planner.time import step_time

_H100 = replace(KNOWN_HARDWARE["h100-sxm"], memory_bandwidth=2.4e12)
_PIPELINE = 8
MODELS = {
    "8B": PRESETS["llama3-8b"],
    "405B": {
        **PRESETS["llama3-70b"],
        "num_layers": 126,
        "hidden_size": 16_384,
        "num_heads": 128,
        "mlp_size": 53_248,
    },
}
"""Fields of the models, keyed by number of parameters."""

TORCHTITAN_PROGRAM = Program(compiled=True, repeats_last=True, repeats_keys=True, overlaps_context=False)
"""Properties of torchtitan with PyTorch's `context_parallel`: compiled layers, and keys and values that are repeated
for each query head before attention (`repeat_kv`). In compiled code, PyTorch's functional collectives wait for their
result at once (`_maybe_wrap_tensor`), and the compiler's `reorder_for_compute_comm_overlap` is off by default, so the
messages of attention overlap with nothing."""


class TorchtitanRow(NamedTuple):
    """Row of one of torchtitan's tables."""

    model: str
    """Key of the model in `MODELS`: its number of parameters."""
    tokens_per_second: float
    """Published tokens per second of one GPU."""
    sequence_length: int
    sequences: int
    """Sequences of one data rank in a step ("local batch size")."""
    data: int
    context: int = 1
    stages_per_rank: int = 1

    @property
    def layout(self) -> Layout:
        """Layout of the row. The larger model has 8 tensor and 8 pipeline ranks. The first and the last stage have one
        layer fewer than the others, because they hold the embedding and the output projection.
        """
        shared = Layout(
            data=self.data,
            context=self.context,
            context_attention=ContextAttention.RING,
            sharding=ZeroStage.ZERO3,
        )
        if self.model == "8B":
            return shared
        stages = _PIPELINE * self.stages_per_rank
        middle = (MODELS[self.model]["num_layers"] + 2) // stages
        return replace(
            shared,
            tensor=8,
            pipeline=_PIPELINE,
            stages_per_rank=self.stages_per_rank,
            stages=(middle - 1, *(middle,) * (stages - 2), middle - 1),
            sequence_parallel=True,
            symmetric_memory=True,
        )


SCHEDULE_ROWS = (
    TorchtitanRow("405B", 100, 8192, 32, data=8),
    TorchtitanRow("405B", 128, 8192, 32, data=8, stages_per_rank=2),
)
"""Table 5: 1F1B, and interleaved stages. With interleaved stages, torchtitan gives each rank two stages."""

CONTEXT_ROWS = (
    TorchtitanRow("405B", 76, 32_768, 8, data=8),
    TorchtitanRow("405B", 47, 65_536, 8, data=4, context=2),
    TorchtitanRow("405B", 31, 131_072, 8, data=2, context=4),
    TorchtitanRow("405B", 16, 262_144, 8, data=1, context=8),
)
"""Table 6: 512 GPUs with 1F1B. The number of context ranks doubles with the length of the sequences."""

SMALL_CONTEXT_ROWS = (
    TorchtitanRow("8B", 3890, 32_768, 1, data=8),
    TorchtitanRow("8B", 2540, 65_536, 1, data=4, context=2),
    TorchtitanRow("8B", 1071, 131_072, 1, data=2, context=4),
    TorchtitanRow("8B", 548, 262_144, 1, data=1, context=8),
)
"""Table 2: 8 GPUs of one node."""


def torchtitan_tokens_per_second(
    row: TorchtitanRow, hardware: Hardware, program: Program = TORCHTITAN_PROGRAM
) -> float:
    """Forecast of the tokens per second of one GPU for a row."""
    layout = row.layout
    run = Candidate(
        model=ModelConfig(**{**MODELS[row.model], "max_sequence_length": row.sequence_length}),
        layout=layout,
        training=TrainingConfig(
            batch_size=row.sequences * row.data,
            micro_batch_size=max(row.sequences // _PIPELINE, 1),
            sequence_length=row.sequence_length,
            precision=Precision.FLOAT8,
            recompute=Recompute.FULL,
            device=Device.CUDA,
        ),
    )
    seconds = step_time(run, hardware, program=program).total
    return run.training.batch_size * row.sequence_length / seconds / layout.world_size


def torchtitan_attained(row: TorchtitanRow, program: Program = TORCHTITAN_PROGRAM) -> float:
    """Share of the float8 peak that products attain, solved from one row."""
    return solve_attained(
        _H100, lambda hardware: torchtitan_tokens_per_second(row, hardware, program), row.tokens_per_second
    )


def torchtitan_forecast(rows: tuple[TorchtitanRow, ...], program: Program = TORCHTITAN_PROGRAM) -> list[float]:
    """Forecast of the tokens per second of each row of a table. The first row calibrates the forecast."""
    hardware = attaining(_H100, torchtitan_attained(rows[0], program))
    return [torchtitan_tokens_per_second(row, hardware, program) for row in rows]


def ratios(rates: list[float]) -> list[float]:
    """Ratio of each rate to the previous rate, starting with the second."""
    return [after / before for before, after in pairwise(rates)]
