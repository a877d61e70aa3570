"""Published rates of mixtures of experts: nothing but the first row was fitted."""

import pytest

from crosscut.config import ModelConfig
from crosscut.planner import count_active_parameters, count_parameters
from crosscut.planner.paper.mixtures import (
    MIXTURE_ROWS,
    MODELS,
    MixtureRow,
    median_error,
    mixture_attained,
    mixture_errors,
)


def test_the_first_row_calibrates_all_others() -> None:
    errors = mixture_errors()
    assert errors[0] == pytest.approx(0.0, abs=1e-6)
    assert 0.5 < mixture_attained() < 0.7
    assert median_error(errors) < 0.15
    assert max(map(abs, errors)) < 0.35
    assert max(map(abs, errors)) > 0.05, "the other rows are forecasts"


@pytest.mark.parametrize(
    ("model", "billions", "active"), [("Qwen3-30B-A3B", 30.5, 3.4), ("DeepSeek-V3", 671, 37.6), ("Kimi K2", 1026, 32.9)]
)
def test_models_have_the_published_sizes(model: str, billions: float, active: float) -> None:
    sizes = ModelConfig(**MODELS[model])
    assert count_parameters(sizes) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert count_active_parameters(sizes) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("row", MIXTURE_ROWS, ids=lambda row: f"{row.model} on {row.layout.world_size}")
def test_rows_have_the_published_layouts(row: MixtureRow) -> None:
    gpus = (8, 256, 1024, 256, 16)[MIXTURE_ROWS.index(row)]
    assert row.layout.world_size == gpus
    assert sum(row.layout.stages) in (0, ModelConfig(**MODELS[row.model]).num_layers)
    assert row.batch_size % (row.layout.data * row.micro_batch_size * row.accumulated) == 0


def test_a_token_of_adjacent_experts_goes_to_few_ranks_and_a_drawn_one_to_many() -> None:
    sent = [tuple(8 * share for share in row.program.sent_rows) for row in MIXTURE_ROWS]
    assert sent[:4] == [(1, 1), (2, 1), (2, 1), (pytest.approx(4 / 3), 1)]
    assert 6 < sent[4][0] < 8
    assert 1.9 < sent[4][1] < 2
