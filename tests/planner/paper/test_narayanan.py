"""Narayanan et al. 2021, Table 1: nothing but the calibration row was fitted."""

import pytest

from crosscut.architecture import describe
from crosscut.planner import count_parameters, flops_per_step
from crosscut.planner.paper.narayanan import (
    NARAYANAN_CALIBRATION,
    NARAYANAN_ROWS,
    NarayananRow,
    narayanan_attained,
    narayanan_run,
    narayanan_shares,
)


@pytest.mark.parametrize("num_rows", [5, pytest.param(10, marks=pytest.mark.slow)])  # the larger, the longer
def test_one_row_calibrates_all_others(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    monkeypatch.setattr("crosscut.planner.paper.narayanan.NARAYANAN_ROWS", NARAYANAN_ROWS[:num_rows])
    errors = {name: ours - published for name, (published, ours) in narayanan_shares().items()}
    assert len(errors) == num_rows
    assert [name for name, error in errors.items() if abs(error) > 0.05] == []
    assert errors[NARAYANAN_CALIBRATION.name] == pytest.approx(0.0, abs=1e-6)
    assert max(map(abs, errors.values())) > 0.03, "the other rows are forecasts"
    assert 0.8 < narayanan_attained() < 0.9


@pytest.mark.parametrize("row", NARAYANAN_ROWS, ids=lambda row: row.name)
def test_rows_have_the_published_sizes(row: NarayananRow) -> None:
    run = narayanan_run(row)
    billions = float(row.name.removesuffix("B"))
    assert count_parameters(run.model) / 1e9 == pytest.approx(billions, rel=0.03)
    assert run.layout.world_size == row.num_gpus
    assert len(describe(run.model).layers) % run.layout.num_stages == 0


@pytest.mark.parametrize("row", NARAYANAN_ROWS, ids=lambda row: row.name)
def test_flops_are_counted_as_in_the_paper(row: NarayananRow) -> None:
    """Equation 3 of the paper, with recomputation."""
    B, s, L, h, V = row.batch_size, 2048, row.num_layers, row.hidden_size, 51_200
    published = 96 * B * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
    assert flops_per_step(narayanan_run(row), recompute=True) == pytest.approx(published)
