"""The rank of a pipeline whose memory peaks highest."""

import pytest

from crosscut.config import Layout, load_run
from crosscut.config.layout import PipelineSchedule
from crosscut.planner.candidate import Candidate
from crosscut.planner.memory import forecast_memory
from crosscut.planner.memory.fullest import fullest_rank

ZERO = PipelineSchedule.ZERO_BUBBLE
LAYOUTS = [
    Layout(),
    *(Layout(pipeline=size, data=2, sharding=sharding) for size in (2, 4, 6) for sharding in ("none", "zero2")),  # type: ignore[arg-type]
    *(Layout(pipeline=size, schedule=ZERO) for size in (2, 4, 6)),
    Layout(pipeline=2, stages_per_rank=3),
    Layout(pipeline=4, stages_per_rank=3),
    Layout(pipeline=4, stages=(1, 2, 8, 1)),
]


@pytest.mark.parametrize("vocab_size", [1000, 200_000])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_other_rank_needs_more(layout: Layout, recompute: str, vocab_size: int) -> None:
    model = {"num_layers": 12, "hidden_size": 256, "num_heads": 4, "vocab_size": vocab_size, "dropout": 0.0}
    training = {"batch_size": 24, "micro_batch_size": 1, "sequence_length": 256, "recompute": recompute}
    run = Candidate.of(load_run({"model": model, "training": training}, change_layout=lambda _: layout), "bfloat16")
    peaks = [forecast_memory(Candidate.at(run, rank)).total for rank in range(layout.pipeline)]
    rank, memory = fullest_rank(run)
    assert memory.total == peaks[rank] == max(peaks)
