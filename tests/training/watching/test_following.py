"""Each step is told of once, in order, one step late, with the seconds that the device took for it."""

import time

import pytest
import torch

from crosscut.training.result import DeviceFigures, NonFiniteError, StepResult
from crosscut.training.watching.following import Follower
from tests.training.jobs import CPU


def result_of(step: int, *, held: float = 0.0, seconds: float = 0.0) -> StepResult:
    """Result of a step that takes `seconds` seconds, as the trainer returns it."""
    time.sleep(seconds)
    number = torch.tensor(float(step))
    figures = DeviceFigures(loss=number, norm=number, held=torch.tensor(held), own=number)
    return StepResult(step, 0.1, figures, loss_scale=None)


@pytest.fixture
def told() -> list[tuple[int, float]]:
    return []


@pytest.fixture
def follower(told: list[tuple[int, float]]) -> Follower:
    return Follower(lambda result, seconds: told.append((result.step, seconds)), CPU)


def test_a_step_is_told_of_when_the_next_is_launched(follower, told):
    follower.launch(lambda: result_of(0))
    assert told == []
    follower.launch(lambda: result_of(1))
    assert [step for step, _ in told] == [0]
    follower.catch_up()
    follower.catch_up()
    assert [step for step, _ in told] == [0, 1]


def test_seconds_are_the_steps_own_and_not_those_between_them(follower, told):
    follower.launch(lambda: result_of(0, seconds=0.05))
    time.sleep(0.4)
    follower.launch(lambda: result_of(1, seconds=0.1))
    follower.catch_up()
    (_, first), (_, second) = told
    assert 0.05 <= first < 0.3
    assert 0.1 <= second < 0.4
    assert follower.seconds == pytest.approx(first + second)


def test_a_failed_step_is_raised_when_the_next_is_launched_and_is_not_told(follower, told):
    follower.launch(lambda: result_of(0, held=1.0))
    with pytest.raises(NonFiniteError, match="step 1"):
        follower.launch(lambda: result_of(1))
    assert told == []
