import pytest

from crosscut.config import OptimizerConfig
from crosscut.training.schedule import learning_rate

PAPER = OptimizerConfig()


def rate(step: int, num_steps: int = 300_000) -> float:
    return learning_rate(step, config=PAPER, num_steps=num_steps)


def test_warm_up_is_linear_and_ends_at_the_highest_rate():
    assert rate(0) == pytest.approx(1.5e-4 / 3001)
    assert rate(1500) == pytest.approx(1.5e-4 * 1501 / 3001)
    assert rate(3000) == pytest.approx(1.5e-4)
    assert max(rate(step) for step in range(0, 300_000, 500)) == pytest.approx(1.5e-4)


def test_decay_is_one_cosine_that_ends_at_the_minimum():
    assert rate(299_999) == pytest.approx(1e-5)
    assert rate(3000 + (299_999 - 3000) // 2) == pytest.approx((1.5e-4 + 1e-5) / 2, rel=1e-4)
    later = [rate(step) for step in range(3000, 300_000, 1000)]
    assert later == sorted(later, reverse=True)


def test_a_run_shorter_than_its_warm_up_only_warms_up():
    rates = [rate(step, num_steps=10) for step in range(10)]
    assert rates == sorted(rates)


def test_steps_past_the_end_stay_at_the_minimum():
    assert rate(400_000) == pytest.approx(1e-5)
