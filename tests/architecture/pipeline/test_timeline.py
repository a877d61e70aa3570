"""Figures of a recorded step, from times that are known."""

import pytest

from crosscut.architecture.pipeline import (
    Action,
    Durations,
    Pass,
    Schedule,
    Timed,
    Timeline,
    interleaved,
    one_forward_one_backward,
    simulate,
    without_messages,
    zero_bubble,
)

SCHEDULES = [one_forward_one_backward(4, 8), interleaved(4, 8, 2), zero_bubble(4, 8), one_forward_one_backward(4, 2)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["1f1b", "interleaved", "zero-bubble", "few"])
def test_a_step_with_slow_messages_has_the_bubble_of_one_without(schedule):
    """Waiting for messages is not a part of the bubble, on any rank of the chain."""
    free = simulate(schedule, Durations(forward=2, backward=3, weights=1))
    slow = simulate(schedule, Durations(forward=2, backward=3, weights=1, message=0.5))
    assert slow.total > free.total
    assert without_messages(slow).ranks == free.ranks


def test_a_step_that_began_late_keeps_its_figures():
    found = simulate(one_forward_one_backward(2, 4), Durations())
    later = tuple(
        tuple(timed._replace(start=timed.start + 5, end=timed.end + 5) for timed in rank) for rank in found.ranks
    )
    moved = Timeline(found.schedule, later)
    assert (moved.total, moved.bubble, moved.mean_bubble) == (found.total, found.bubble, found.mean_bubble)
    assert without_messages(moved).ranks == found.ranks


def test_a_single_slow_pass_is_a_bubble_of_the_other_rank():
    found = simulate(one_forward_one_backward(2, 4), Durations())
    late = [list(rank) for rank in found.ranks]
    for index, timed in enumerate(late[1]):  # F0 of the second rank takes 3 longer, and all later passes follow
        late[1][index] = timed._replace(start=timed.start + 3 * (index > 0), end=timed.end + 3)
    late[0] = [
        timed._replace(start=timed.start + 3 * (i > 1), end=timed.end + 3 * (i > 1)) for i, timed in enumerate(late[0])
    ]
    slow = Timeline(found.schedule, tuple(map(tuple, late)))
    assert slow.total == found.total + 3
    assert without_messages(slow).total == slow.total, "no message was late"
    assert slow.busy(0) == found.busy(0)


def test_the_mean_bubble_counts_the_idle_time_of_all_ranks():
    equal = simulate(one_forward_one_backward(4, 8), Durations())
    assert equal.mean_bubble == pytest.approx(equal.bubble) == pytest.approx(3 / 8)
    slow_last = simulate(one_forward_one_backward(2, 8), [Durations(), Durations(forward=2, backward=4)])
    busy = 8 * 3 + 8 * 6
    assert slow_last.bubble == pytest.approx(3 / 48)
    assert slow_last.mean_bubble == pytest.approx((2 * 51 - busy) / busy)


def test_a_record_that_lacks_an_action_is_refused():
    schedule = Schedule(1, 1, 1, ((Action(Pass.FORWARD, 0), Action(Pass.BACKWARD, 0)),))
    whole = (Timed(Action(Pass.FORWARD, 0), 0.0, 1.0), Timed(Action(Pass.BACKWARD, 0), 1.0, 2.0))
    Timeline(schedule, (whole,)).require_complete()
    for wrong in (whole[:1], whole[::-1]):
        with pytest.raises(AssertionError, match="differ from the schedule"):
            Timeline(schedule, (wrong,)).require_complete()
