"""The rule finds spikes, and takes nothing else for one."""

import math
import random

import pytest

from crosscut.training.spikes.rule import LEAST, RECENT, REMEMBERED, Alarm, SpikeRule

Series = list[tuple[float, float]]


def noisy(steps: int, *, seed: int = 1, loss: float = 3.0, norm: float = 0.5, noise: float = 0.02) -> Series:
    draw = random.Random(seed)
    return [(loss * math.exp(draw.gauss(0, noise)), norm * math.exp(draw.gauss(0, 0.1))) for _ in range(steps)]


def alarms(series: Series) -> list[Alarm]:
    """Alarms of a new rule, until the first one."""
    rule = SpikeRule()
    for step, (loss, norm) in enumerate(series):
        if alarm := rule.observe(step, loss, norm):
            return [alarm]
    return []


def scaled(series: Series, first: int, count: int, *, loss: float = 1.0, norm: float = 1.0) -> Series:
    return [(a * loss, b * norm) if first <= at < first + count else (a, b) for at, (a, b) in enumerate(series)]


@pytest.mark.parametrize("seed", range(3))
def test_noise_around_a_level_is_no_spike(seed):
    assert not alarms(noisy(1500, seed=seed))


def test_a_falling_loss_with_a_norm_that_settles_is_no_spike():
    series = noisy(1000)
    falling = [
        (loss * (0.4 + 3 / math.sqrt(step + 1)), norm * (1 + 20 * math.exp(-step / 20)))
        for step, (loss, norm) in enumerate(series)
    ]
    assert not alarms(falling)


def test_a_norm_that_rises_during_the_warm_up_is_no_spike():
    assert not alarms([(loss, norm * min(1, (step + 1) / 200)) for step, (loss, norm) in enumerate(noisy(400))])


def test_a_constant_series_and_a_loss_of_zero_are_no_spikes():
    assert not alarms([(2.0, 1.0)] * 200)
    assert not alarms([(0.0, 0.0)] * 200)


@pytest.mark.parametrize("noise", [0.01, 0.04])
def test_a_larger_batch_changes_noise_and_norm_without_a_spike(noise):
    small, large = noisy(300, noise=2 * noise, norm=0.8), noisy(300, noise=noise, norm=0.4, seed=2)
    assert not alarms(small + large)
    assert not alarms(large + small)  # twice the noise and the norm


def test_one_or_two_bad_batches_are_no_spike():
    series = scaled(noisy(300), 150, 2, loss=1.4, norm=8)
    assert not alarms(scaled(series, 220, 1, loss=1.4, norm=15))


@pytest.mark.parametrize(("loss", "norm"), [(1.3, 1.0), (1.0, 40.0)])
def test_a_jump_that_lasts_is_found_at_its_third_step(loss, norm):
    (alarm,) = alarms(scaled(noisy(300), 150, 50, loss=loss, norm=norm))
    assert (alarm.first, alarm.step) == (150, 152)


@pytest.mark.parametrize(("loss", "norm"), [(3.0, 1.0), (1.0, 5000.0)])
def test_an_extreme_step_is_found_at_once(loss, norm):
    (alarm,) = alarms(scaled(noisy(300), 150, 1, loss=loss, norm=norm))
    assert (alarm.first, alarm.step) == (150, 150)
    assert ("loss 8.9" if loss > 1 else "gradient norm 2") in alarm.reason
    assert "usually" in alarm.reason


def test_a_loss_that_rises_within_tens_of_steps_is_found():
    (alarm,) = alarms([(a * math.exp(max(0, at - 200) / 100), b) for at, (a, b) in enumerate(noisy(400))])
    assert 205 <= alarm.first <= alarm.step <= 240


def test_a_slow_divergence_is_no_spike():
    """Batches are not its cause, so leaving them out would not help."""
    assert not alarms([(a * math.exp(max(0, at - 200) / 2000), b) for at, (a, b) in enumerate(noisy(2000))])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_found_even_at_the_first_step(value):
    for series in ([(value, 1.0)], [(1.0, value)]):
        (alarm,) = alarms(series)
        assert (alarm.first, alarm.step) == (0, 0)
    assert f"{value:.4g}" in alarm.reason


def test_the_first_steps_have_no_spikes():
    assert not alarms(scaled(noisy(LEAST), 0, LEAST, norm=1) + noisy(1, loss=3.1))
    assert not alarms(scaled(noisy(LEAST), LEAST // 2, 3, loss=5))


def test_what_is_forgotten_has_no_effect():
    series = noisy(400)
    spoiled = scaled(series, 200, 10, loss=1.5)
    rule, other = SpikeRule(), SpikeRule()
    for step in range(215):
        rule.observe(step, *spoiled[step])
    rule.forget(190)
    for step in range(190):
        other.observe(step, *series[step])
    again = scaled(series, 300, 5, loss=1.5)
    told = [(rule.observe(step, *again[step]), other.observe(step, *again[step])) for step in range(190, 400)]
    assert all(ours == theirs for ours, theirs in told)
    assert any(ours for ours, _ in told)


def test_a_rule_that_has_seen_the_last_steps_judges_like_one_that_has_seen_all():
    series = scaled(noisy(3000), 2800, 5, loss=1.2)
    whole, late = SpikeRule(), SpikeRule()
    told = [whole.observe(step, *series[step]) for step in range(3000)]
    ours = [late.observe(step, *series[step]) for step in range(2700 - REMEMBERED, 3000)]
    assert told[2700:] == ours[REMEMBERED:]
    assert any(told[2800 : 2800 + RECENT])
