import pytest

from crosscut.config import OptimizerConfig
from crosscut.training.optimization.schedule import learning_rate

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


def rates(schedule: str, num_steps: int = 10, *, warmup: int = 2, lowest: float = 0.0, **others) -> list[float]:
    config = OptimizerConfig(
        schedule=schedule, learning_rate=1.0, min_learning_rate=lowest, warmup_steps=warmup, **others
    )
    return [learning_rate(step, config=config, num_steps=num_steps) for step in range(num_steps)]


def test_linear_decay_would_reach_the_minimum_one_step_after_the_last():
    assert rates("linear") == pytest.approx([1 / 3, 2 / 3, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    assert rates("linear", lowest=0.2)[-1] == pytest.approx(0.2 + 0.8 / 8)


def test_stable_phase_is_at_the_maximum_to_the_last_bit_and_the_decay_is_linear():
    told = rates("wsd", decay_steps=4, lowest=0.1)
    assert told[2:7] == [1.0] * 5  # the first step of the decay is still at the maximum
    assert told[7:] == pytest.approx([0.1 + 0.9 * left / 4 for left in (3, 2, 1)])
    assert rates("wsd", decay_steps=8) == rates("linear")


def test_a_constant_schedule_only_warms_up():
    assert rates("constant") == pytest.approx([1 / 3, 2 / 3, *[1] * 8])


def test_the_stable_phase_is_the_same_in_a_longer_run():
    short, long = rates("wsd", 10, decay_steps=4), rates("wsd", 30, decay_steps=4)
    assert short[:6] == long[:6] == rates("constant")[:6]


@pytest.mark.parametrize("schedule", ["linear", "constant", "wsd"])
def test_rates_after_the_last_step_are_those_of_the_end(schedule):
    config = OptimizerConfig(schedule=schedule, warmup_steps=1, decay_steps=3 if schedule == "wsd" else 0)
    end = config.learning_rate if schedule == "constant" else config.min_learning_rate
    assert learning_rate(99, config=config, num_steps=10) == end


def test_steps_past_the_end_stay_at_the_minimum():
    assert rate(400_000) == pytest.approx(1e-5)
