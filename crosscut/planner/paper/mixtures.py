"""Forecasts of published rates of mixtures of experts on H100s, in bfloat16, with sequences of 4,096 tokens.

Sources: `docs/performance-summary.md` and `examples/benchmark/configs` of NVIDIA-NeMo/Automodel (October 2025), and
`scripts/performance/configs/qwen` of NVIDIA-NeMo/Megatron-Bridge. The first row calibrates the share of the peak that
products attain. Loads were forced to be even, so the forecasts have no skew.

Automodel's gate gives a token experts with adjacent numbers (`FakeBalancedGate`), so all of them are in one node and on
one or two ranks. Megatron-Bridge's gate draws the experts of a token at random. Both programs send a token only once to
each node or rank that has some of its experts (DeepEP, HybridEP).
"""

from collections.abc import Sequence
from statistics import mean, median
from typing import NamedTuple

from crosscut.config import Layout, ModelConfig, TrainingConfig
from crosscut.config.checks import Settings
from crosscut.config.layout import ZeroStage
from crosscut.config.precision import Precision
from crosscut.config.published.presets import PRESETS
from crosscut.config.training import Device, Recompute
from crosscut.planner.candidate import Candidate
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware
from crosscut.planner.paper.runs import attaining, solve_attained
from crosscut.planner.program import Program
from crosscut.planner.time import step_time

_H100 = KNOWN_HARDWARE["h100-sxm"]
_LENGTH = 4096
_PER_TOKEN = 8
"""Experts of a token, in all of these models."""

_DEEPSEEK = PRESETS["deepseek-v3"]
MODELS: dict[str, Settings] = {
    "Qwen3-30B-A3B": PRESETS["qwen3-30b-a3b"],
    "DeepSeek-V3": _DEEPSEEK,
    "Kimi K2": {
        **_DEEPSEEK, "num_heads": 64, "vocab_size": 163_840,
        "layers": ("latent_attention swiglu",) + ("latent_attention experts",) * 60,
        "experts": {**_DEEPSEEK["experts"], "number": 384, "groups": 1, "groups_per_token": 1, "scaling": 2.827},
    },
}  # fmt: skip
"""Fields of the models. Kimi K2 differs from DeepSeek-V3 as its `config.json` does."""


class MixtureRow(NamedTuple):
    """Published rate of a mixture."""

    model: str
    """Key of the model in `MODELS`."""
    layout: Layout
    batch_size: int
    micro_batch_size: int
    tokens_per_second: float
    """Published tokens per second of one GPU."""
    program: Program
    recompute: Recompute = Recompute.FULL
    accumulated: int = 1
    """Number of parts of a batch. A pipeline runs empty after each part."""


AUTOMODEL = Program(compiled=True, casts_weights=False, repeats_last=True)
"""Properties of Automodel in these runs: fused operators (Transformer Engine), weights in bfloat16, and whole layers
recomputed, with their messages."""
MEGATRON_BRIDGE = Program(compiled=True, casts_weights=False, shards_optimizer=True, bucket_bytes=None)
"""Properties of Megatron-Bridge in these runs: fused operators and the distributed optimizer."""


def _once_each(ranks: float, nodes: float, program: Program) -> Program:
    """Return a program in which a token goes to so many ranks and to so many nodes, and once to each of them."""
    return program._replace(sent_rows=(ranks / _PER_TOKEN, nodes / _PER_TOKEN))


def _adjacent(number: int, ranks: int) -> float:
    """Mean number of ranks, of `ranks`, that have experts of a token whose experts have adjacent numbers below
    `number`.
    """
    tokens = [range(first, first + _PER_TOKEN) for first in range(0, number, _PER_TOKEN)]
    return mean(len({expert * ranks // number for expert in token}) for token in tokens)


def _drawn(ranks: int) -> float:
    """Mean number of ranks or nodes, of `ranks`, that have experts of a token which chooses experts at random."""
    return ranks * (1 - (1 - 1 / ranks) ** _PER_TOKEN)


def _staged(data: int, pipeline: int, stages_per_rank: int, expert: int) -> Layout:
    """Layout with a pipeline of 61 layers, in stages of one or two layers. The last stages have two."""
    stages, layers = pipeline * stages_per_rank, _DEEPSEEK["num_layers"]
    sizes = [layers // stages + (stage >= stages - layers % stages) for stage in range(stages)]
    return Layout(
        data=data,
        pipeline=pipeline,
        stages_per_rank=stages_per_rank,
        stages=tuple(sizes),
        expert=expert,
        sharding=ZeroStage.ZERO2,
    )


_QWEN, _V3, _KIMI = (
    _once_each(_adjacent(number, ranks), 1, AUTOMODEL) for number, ranks in ((128, 8), (256, 64), (384, 32))
)
_QWEN_DRAWN = _once_each(_drawn(16), _drawn(2), MEGATRON_BRIDGE)
_TABLE = (
    ("Qwen3-30B-A3B", Layout(data=8, expert=8, sharding=ZeroStage.ZERO3), 512, 4, 12_040, _QWEN),
    ("DeepSeek-V3", _staged(64, 4, 8, 64), 512, 1, 1002, _V3),
    ("DeepSeek-V3", _staged(256, 4, 8, 64), 8192, 1, 865, _V3, Recompute.FULL, 4),
    ("Kimi K2", _staged(32, 8, 4, 32), 512, 1, 924, _KIMI, Recompute.FULL, 2),
    ("Qwen3-30B-A3B", Layout(data=16, expert=16), 1024, 1, 1024 * _LENGTH / 20.15 / 16, _QWEN_DRAWN, Recompute.NONE),
)
MIXTURE_ROWS = tuple(MixtureRow(*row) for row in _TABLE)
"""Rows that the planner can describe. The last row was published as seconds of a step (20.15)."""

NOT_DESCRIBED = {
    "gpt-oss 20B on 8 GPUs, 120B on 64": "biases of experts, sinks of attention, and gates that are limited",
    "Qwen3-235B-A22B on 256 GPUs": "float8 products of experts",
    "Nemotron-3 Nano on 16 GPUs": "float8 products of experts",
}
"""Published rows that the planner cannot describe, and their properties that Crosscut does not have."""


def mixture_tokens_per_second(row: MixtureRow, hardware: Hardware) -> float:
    """Forecast of the tokens per second of one GPU for a row."""
    training = TrainingConfig(
        batch_size=row.batch_size,
        micro_batch_size=row.micro_batch_size,
        sequence_length=_LENGTH,
        precision=Precision.BFLOAT16,
        recompute=row.recompute,
        device=Device.CUDA,
    )
    time = step_time(Candidate(ModelConfig(**MODELS[row.model]), row.layout, training), hardware, program=row.program)
    seconds = time.total + (row.accumulated - 1) * time.bubble
    return row.batch_size * _LENGTH / seconds / row.layout.world_size


def with_a_row_to_each_expert() -> tuple[MixtureRow, ...]:
    """The rows, if their programs sent a token once to each of its experts, as Crosscut does."""
    return tuple(row._replace(program=row.program._replace(sent_rows=(1.0, 1.0))) for row in MIXTURE_ROWS)


def mixture_attained(rows: Sequence[MixtureRow] = MIXTURE_ROWS) -> float:
    """Share of the peak that products attain, solved from the first row."""
    first = rows[0]
    return solve_attained(_H100, lambda hardware: mixture_tokens_per_second(first, hardware), first.tokens_per_second)


def mixture_errors(rows: Sequence[MixtureRow] = MIXTURE_ROWS) -> list[float]:
    """Relative error of the forecast of each row. The first row calibrates the forecasts, so its error is 0."""
    hardware = attaining(_H100, mixture_attained(rows))
    return [mixture_tokens_per_second(row, hardware) / row.tokens_per_second - 1 for row in rows]


def median_error(errors: list[float]) -> float:
    """Median of the absolute errors of all rows but the first, which calibrates the forecasts."""
    return median(map(abs, errors[1:]))
