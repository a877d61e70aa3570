"""NVIDIA's page on weak scaling: the shapes that its percentages imply, and the forecast of its milliseconds."""

import pytest

from crosscut.planner.compute import flops_per_step
from crosscut.planner.paper.account import V100
from crosscut.planner.paper.nvidia_page import (
    PAGE_FLOPS_PER_SECOND,
    PAGE_ROWS,
    page_forecast,
    page_run,
    page_seconds,
    page_section,
    share_of_linear,
)
from crosscut.planner.paper.runs import attaining
from crosscut.planner.parameters import count_parameters

ONE = page_run(PAGE_ROWS[0].shape, 1)


@pytest.mark.parametrize("row", PAGE_ROWS, ids=lambda row: row.billions)
def test_the_assumed_shapes_give_the_pages_sizes_and_percentages(row) -> None:
    run = page_run(row.shape, row.tensor)
    assert f"{count_parameters(run.model) / 1e9:.1f}" == row.billions
    share = share_of_linear(run, ONE) * PAGE_ROWS[0].milliseconds / row.milliseconds
    assert share == pytest.approx(row.scaling, abs=0.001)  # both times are rounded to a millisecond
    other = page_run(row.other, row.tensor)
    assert f"{count_parameters(other.model) / 1e9:.1f}" == row.billions


def test_the_first_shape_gives_the_pages_flops() -> None:
    rate = flops_per_step(ONE, recompute=True) / PAGE_ROWS[0].milliseconds * 1e3
    assert rate == pytest.approx(PAGE_FLOPS_PER_SECOND, rel=0.005)


def test_other_shapes_do_not_give_the_percentages() -> None:
    first, last = PAGE_ROWS[0], PAGE_ROWS[-1]
    share = share_of_linear(page_run(last.other, 8), page_run(first.other, 1))
    assert share * first.milliseconds / last.milliseconds < last.scaling - 0.03


def test_the_forecast_is_within_five_points_and_nearest_at_eight_gpus() -> None:
    forecast = page_forecast()
    assert forecast[0][0] * 1e3 == pytest.approx(PAGE_ROWS[0].milliseconds, rel=1e-6)
    errors = [scaling - row.scaling for row, (_, scaling) in zip(PAGE_ROWS, forecast, strict=True)]
    assert all(0.02 < error < 0.05 for error in errors[1:])
    assert min(errors[1:]) == errors[-1] < 0.03


def test_only_the_first_row_calibrates() -> None:
    """A device whose products are twice as fast gives the same forecast, since the first row is solved for."""
    fast = attaining(V100, 2 * V100.products_attained)
    assert page_seconds(ONE, fast) < page_seconds(ONE)
    for ours, again in zip(page_forecast(), page_forecast(fast), strict=True):
        assert again == pytest.approx(ours, rel=1e-6)


def test_the_section_has_a_row_for_each_model_and_tells_the_shapes() -> None:
    section = page_section()
    assert [row[2] for row in section.rows] == ["1,288", "1,242", "1,357", "1,508"]
    assert all(len(row) == len(section.header) for row in section.rows)
    assert "1,920 x 24, 2,304 x 30, 3,072 x 36, 4,096 x 42" in section.words
