from collections import Counter, defaultdict
from functools import partial

import pytest

from crosscut.architecture.pipeline import (
    PERIODS,
    Action,
    Durations,
    Pass,
    Schedule,
    ends_of_ranks,
    flights,
    interleaved,
    one_forward_one_backward,
    simulate,
    zero_bubble,
)
from crosscut.config import LayoutError
from tests.timing import quickest

ALL = [
    *((one_forward_one_backward(p, m)) for p in (1, 2, 3, 4, 8) for m in (1, 2, 8, 11)),
    *((interleaved(p, p * m, v)) for p in (2, 3, 4, 8) for m in (1, 2, 5) for v in (2, 3)),
    *((zero_bubble(p, m)) for p in (1, 2, 4, 8) for m in (1, 2, 8, 11)),
]


def name(schedule: Schedule) -> str:
    zero = "zero" if schedule.separates_weights else "1f1b"
    return f"{zero}-{schedule.num_ranks}x{schedule.num_chunks}-{schedule.num_micro_batches}"


MARKED = [
    schedule
    if schedule.num_stages * schedule.num_micro_batches <= 64
    else pytest.param(schedule, marks=pytest.mark.slow)
    for schedule in ALL
]
"""All of them; the long ones are slow."""


@pytest.mark.parametrize("schedule", MARKED, ids=name)
def test_each_stage_passes_each_micro_batch_once_in_each_way(schedule):
    kinds = list(Pass) if schedule.separates_weights else [Pass.FORWARD, Pass.BACKWARD]
    expected = {
        Action(kind, index, chunk)
        for kind in kinds
        for index in range(schedule.num_micro_batches)
        for chunk in range(schedule.num_chunks)
    }
    for actions in schedule.actions:
        assert Counter(actions) == Counter(expected)


@pytest.mark.parametrize("schedule", MARKED, ids=name)
def test_receivers_take_messages_in_the_order_of_their_senders(schedule):
    sent, received = defaultdict(list), defaultdict(list)
    for message in schedule.messages():
        sent[message.channel].append(message)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if (message := schedule.received(rank, action)) is not None:
                assert message.channel.receiver == rank
                received[message.channel].append(message)
    assert sent == received
    total = schedule.num_stages - 1 if schedule.num_ranks > 1 else 0
    assert sum(map(len, sent.values())) == 2 * total * schedule.num_micro_batches


@pytest.mark.one_in(7)
@pytest.mark.parametrize("schedule", MARKED, ids=name)
def test_a_message_acknowledges_only_what_its_sender_has_used(schedule):
    """In the simulated times, the action that needs a message starts before the acknowledging message is sent."""
    simulation = simulate(schedule, Durations(forward=1, backward=2, weights=1))
    starts = {
        schedule.received(rank, timed.action): timed.start
        for rank, actions in enumerate(simulation.ranks)
        for timed in actions
    }
    for rank, actions in enumerate(simulation.ranks):
        ends = {schedule.sent(rank, timed.action): timed.end for timed in actions}
        for receiver in range(schedule.num_ranks):
            for message, arrived in schedule.acknowledged(receiver).items():
                if message.channel.sender == rank:
                    assert all(starts[earlier] < ends[message] for earlier in arrived)


@pytest.mark.parametrize(
    "schedule", [one_forward_one_backward(4, 64), interleaved(4, 64, 2), zero_bubble(4, 64)], ids=name
)
def test_few_messages_of_a_rank_wait_for_an_acknowledgement(schedule):
    for rank, actions in enumerate(schedule.actions):
        acknowledged, leaving, most = schedule.acknowledged(rank), set(), 0
        for action in actions[: len(actions) * 3 // 4]:  # later, no message confirms the last gradients
            leaving -= set(acknowledged.get(schedule.received(rank, action), ()))
            if (message := schedule.sent(rank, action)) is not None:
                leaving.add(message)
            most = max(most, len(leaving))
        assert most <= 4 * schedule.num_stages


@pytest.mark.parametrize("schedule", MARKED, ids=name)
def test_the_fullest_flight_is_the_number_in_flight(schedule):
    for rank in range(schedule.num_ranks):
        found = flights(schedule, rank)
        most = max(sum(flight.held) + sum(flight.deferred) for flight in found)
        assert most + 1 == schedule.num_in_flight(rank)
        assert {flight.chunk for flight in found} == set(range(schedule.num_chunks))


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("m", [8, 16])
def test_bubble_of_1f1b_is_the_published_one(p, m):
    found = simulate(one_forward_one_backward(p, m), Durations(forward=1, backward=2))
    assert found.bubble == pytest.approx((p - 1) / m, rel=1e-12)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("v", [2, 4])
def test_bubble_of_interleaved_stages_is_the_published_one(p, v):
    m = 2 * p
    found = simulate(interleaved(p, m, v), Durations(forward=1, backward=2))
    assert found.bubble == pytest.approx((p - 1) / (v * m), rel=1e-12)


@pytest.mark.parametrize(("f", "b", "w"), [(1, 1, 1), (2, 3, 2)])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_separate_weight_gradients_fill_the_end_of_the_step(p, f, b, w):
    m = 2 * p
    found = simulate(zero_bubble(p, m), Durations(forward=f, backward=b, weights=w))
    assert found.total - m * (f + b + w) == pytest.approx((p - 1) * (f + b - w), rel=1e-12)


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_number_of_micro_batches_in_flight(p):
    m = 3 * p
    for rank in range(p):
        assert one_forward_one_backward(p, m).num_in_flight(rank) == p - rank
        assert zero_bubble(p, m).num_in_flight(rank) == p
        if p > 1:
            for v in (2, 3):
                assert interleaved(p, m, v).num_in_flight(rank) == 2 * (p - rank - 1) + (v - 1) * p + 1


def test_fewer_micro_batches_than_ranks_still_run():
    for schedule in (one_forward_one_backward(4, 2), zero_bubble(4, 2), zero_bubble(4, 1)):
        assert simulate(schedule, Durations(weights=1.0 if schedule.separates_weights else 0.0)).bubble >= 1
        assert schedule.num_in_flight(0) <= 2


def test_interleaved_stages_need_a_multiple_of_the_ranks():
    with pytest.raises(LayoutError, match=r"multiple of the number of pipeline ranks \(4\), but is 6"):
        interleaved(4, 6, 2)


def test_messages_take_time():
    quick = simulate(one_forward_one_backward(4, 8), Durations())
    slow = simulate(one_forward_one_backward(4, 8), Durations(message=0.5))
    assert slow.total >= quick.total + 6 * 0.5, "the first micro-batch goes down and comes back"


def test_a_slow_stage_makes_the_others_wait():
    found = simulate(one_forward_one_backward(2, 8), [Durations(), Durations(forward=2, backward=4)])
    assert found.total == 8 * 6 + 3
    assert found.busy(0) == 8 * 3
    assert found.bubble == pytest.approx(3 / 48)


@pytest.mark.parametrize("schedule", MARKED, ids=name)
def test_the_ends_of_ranks_are_those_of_the_simulation(schedule):
    stages = [Durations(forward=1 + 0.1 * i, backward=2, weights=1, message=0.3) for i in range(schedule.num_stages)]
    assert ends_of_ranks(schedule, stages) == [timed[-1].end for timed in simulate(schedule, stages).ranks]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_more_micro_batches_bring_no_other_flights(p):
    few, many = PERIODS * p, 3 * PERIODS * p
    for make in (one_forward_one_backward, zero_bubble, *(partial(interleaved, num_chunks=v) for v in (2, 3))):
        for rank in range(p):
            assert set(flights(make(p, few), rank)) == set(flights(make(p, many), rank))


def test_a_long_schedule_is_read_in_a_fraction_of_a_second():
    def read() -> None:
        schedule = one_forward_one_backward(16, 192)
        held = [max(flight.held[0] for flight in flights(schedule, rank)) for rank in range(16)]
        assert held == list(range(15, -1, -1))
        assert len(set(ends_of_ranks(schedule, Durations()))) == 16

    assert quickest(read, limit=0.5) < 0.5


def swapped(schedule: Schedule, rank: int, first: Action, second: Action) -> Schedule:
    place = {first: second, second: first}
    actions = list(schedule.actions)
    actions[rank] = tuple(place.get(action, action) for action in actions[rank])
    return Schedule(schedule.num_ranks, schedule.num_chunks, schedule.num_micro_batches, tuple(actions))


def test_a_receiver_that_expects_another_order_is_an_error():
    wrong = swapped(one_forward_one_backward(2, 4), 1, Action(Pass.FORWARD, 1), Action(Pass.FORWARD, 2))
    with pytest.raises(LayoutError, match="rank 0 sends them, but needs micro-batch 2 of stage 1 before micro-batch 1"):
        simulate(wrong, Durations())


def test_ranks_that_wait_for_each_other_are_an_error():
    wrong = swapped(one_forward_one_backward(2, 4), 0, Action(Pass.FORWARD, 0), Action(Pass.BACKWARD, 3))
    with pytest.raises(LayoutError, match="rank 0 waits forever before B3"):
        simulate(wrong, Durations())


def test_actions_are_named_briefly():
    assert " ".join(map(str, one_forward_one_backward(2, 3).actions[0])) == "F0 F1 B0 F2 B1 B2"
    assert " ".join(map(str, zero_bubble(2, 2).actions[1])) == "F0 B0 F1 B1 W0 W1"
    assert str(Action(Pass.FORWARD, 3, 1)) == "F3.1"
