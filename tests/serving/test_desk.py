"""Messages between the thread that talks to clients and the thread that computes."""

import asyncio
import re
import sys
import time

import pytest

from crosscut.config import GenerationError
from crosscut.generation import Piece, Sampling
from crosscut.serving.desk import MOST_UNREAD, MOST_WAITING, Desk, RequestJob
from crosscut.serving.news import News, TextOrder
from crosscut.serving.protocol.refusals import Refusal
from crosscut.serving.scheduling import MOST_BEGUN, Scheduler
from tests.serving.conftest import in_loop


def orders(count: int) -> list[TextOrder]:
    return [TextOrder((5, 6, number), Sampling(), 0, 0) for number in range(count)]


def opened(num_rows: int, **options: float) -> tuple[Desk, Scheduler]:
    """A desk of clients in this event loop, with its scheduler."""
    desk = Desk(num_rows=num_rows)
    desk.open()
    return desk, Scheduler(desk, **options)


@in_loop
async def test_pieces_come_back_to_their_text():
    desk, scheduler = opened(4)
    job = desk.submit(orders(2))
    news = scheduler.take(idle=True)
    assert news == News(tuple(orders(2)))
    scheduler.began([7, 8])
    scheduler.deliver([Piece(8, 1, "b"), Piece(7, 2, "a", finish="stop")])
    scheduler.deliver([Piece(8, 3, "c", finish="length")])
    assert [(which, piece.text) async for which, piece in job] == [(1, "b"), (0, "a"), (1, "c")]
    assert (desk.num_running, desk.num_waiting) == (0, 0)


def test_nothing_new_is_no_news():
    assert Scheduler(Desk(num_rows=1)).take(idle=False) is None


def test_a_server_without_work_gives_a_sign_of_life(monkeypatch):
    monkeypatch.setattr("crosscut.serving.scheduling.HEARTBEAT", 0.05)
    began = time.monotonic()
    assert Scheduler(Desk(num_rows=1)).take(idle=True) is None
    assert time.monotonic() - began >= 0.05


@in_loop
async def test_a_withdrawn_text_is_cancelled_by_its_number():
    desk, scheduler = opened(1)
    job = desk.submit(orders(2))
    scheduler.take(idle=True)
    scheduler.began([3, 4])
    scheduler.deliver([Piece(3, 1, finish="stop")])
    await asyncio.sleep(0)  # the piece arrives
    desk.withdraw(job)
    assert scheduler.take(idle=False) == News(cancelled=(4,))
    assert scheduler.take(idle=False) is None


@in_loop
async def test_a_text_that_is_withdrawn_at_once_never_begins():
    desk, scheduler = opened(1)
    desk.withdraw(desk.submit(orders(1)))
    assert scheduler.take(idle=True) is None


@in_loop
async def test_more_than_may_wait_is_refused_whole():
    desk = Desk(num_rows=2, most_waiting=62)
    desk.open()
    first = desk.submit(orders(4))
    assert (desk.num_running, desk.num_waiting) == (2, 2)
    told = (
        "A request must have at most 3 texts at the moment, but has 4. One request may take only a part of the "
        "server's free places (60). Try again later, or send fewer texts at once."
    )
    with pytest.raises(Refusal, match=re.escape(told)) as refused:
        desk.submit(orders(4))
    assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "1"})
    assert desk.num_waiting == 2
    desk.withdraw(first)
    desk.submit(orders(4))


@pytest.mark.parametrize("large", [128, 16, 8, 2])
@in_loop
async def test_large_requests_leave_places_to_small_ones(large):
    """However many of them there are. A thousand requests for one text are taken after any number of others."""
    desk = Desk(num_rows=16)
    desk.open()
    taken = 0
    with pytest.raises(Refusal, match="send fewer texts"):
        for taken in range(10_000):  # noqa: B007 - the number of requests that were taken
            desk.submit(orders(large))
    assert taken * large > MOST_WAITING // 2
    left = 16 + MOST_WAITING - taken * large
    assert left >= 15 * large
    for _ in range(left):
        desk.submit(orders(1))
    with pytest.raises(Refusal, match="at most 0 texts at the moment, but has 1"):
        desk.submit(orders(1))


def test_a_desk_whose_clients_never_came_closes():
    """Their thread may end before its loop begins, such as at the limit on open files."""
    Desk(num_rows=2).close()


@in_loop
async def test_a_stopped_desk_answers_what_it_has_and_takes_no_more():
    desk, scheduler = opened(2)
    desk.submit(orders(1))
    desk.stop()
    with pytest.raises(Refusal, match="about to stop") as refused:
        desk.submit(orders(1))
    assert refused.value.status == 503
    assert scheduler.take(idle=True) == News(tuple(orders(1)))
    scheduler.began([0])
    assert scheduler.take(idle=False) is None
    assert scheduler.take(idle=True) == News(end=True)


@in_loop
async def test_the_grace_time_ends():
    desk, scheduler = opened(2, grace=-1.0)
    job = desk.submit(orders(1))
    scheduler.take(idle=True)
    scheduler.began([0])
    desk.stop()
    assert scheduler.take(idle=False) == News(end=True)
    desk.close()
    await ends_in_vain(job)
    assert desk.num_running == 0


@in_loop
async def test_a_text_that_fails_ends_its_request_and_no_other(capsys):
    numbers = []
    desk, scheduler = opened(4)
    jobs = [desk.submit(orders(2)), desk.submit(orders(1)), desk.submit(orders(1))]
    scheduler.take(idle=True)
    scheduler.began([0, 1, 2, ValueError("an order that cannot begin")])
    scheduler.deliver(
        [Piece(1, 9, finish="error", error=GenerationError("no logits")), Piece(2, 4, "a", finish="stop")]
    )
    for job, message in (
        (jobs[0], "no logits The server's log describes the failure"),
        (jobs[2], "The server failed on this request"),
    ):
        with pytest.raises(Refusal, match=message) as refused:
            await anext(job)
        assert refused.value.status == 500
        numbers.append(refused.value.message[-9:-1])
    assert [piece.text async for _, piece in jobs[1]] == ["a"]
    assert scheduler.take(idle=False) == News(cancelled=(0,)), "the other text of the failed request"
    assert desk.num_running == 0
    errors = capsys.readouterr().err
    assert [f"Failure {number}: " in errors for number in numbers] == [True, True]
    assert "ValueError: an order that cannot begin" in errors


@in_loop
async def test_long_prompts_begin_one_after_the_other():
    """All running texts wait while texts begin; short prompts begin together."""
    desk, scheduler = opened(4)
    many = [TextOrder((1,) * 10, Sampling(), sample, sample) for sample in range(100)]
    long = [TextOrder((1,) * (MOST_BEGUN // 2), Sampling(), sample, sample) for sample in range(5)]
    longest = [TextOrder((1,) * (3 * MOST_BEGUN), Sampling(), sample, sample) for sample in range(2)]
    desk.submit(many)
    jobs = [desk.submit(long), desk.submit(longest)]
    begun = []
    while (news := scheduler.take(idle=False)) is not None:
        begun.append(len(news.orders))
        scheduler.began(list(range(1000 * len(begun), 1000 * len(begun) + len(news.orders))))
        if len(begun) == 3:
            desk.withdraw(jobs[1])  # it never begins
            desk.submit(longest)
    assert begun == [101, 2, 2, 1, 1]


@pytest.mark.parametrize("num_texts", [1, 2, 16])
@in_loop
async def test_a_request_that_is_not_read_ends_and_keeps_little(num_texts):
    desk, scheduler = opened(16)
    unread, other = desk.submit(orders(num_texts)), desk.submit(orders(1))
    scheduler.take(idle=True)
    scheduler.began(list(range(num_texts + 1)))
    for _ in range(MOST_UNREAD // num_texts + 1):
        scheduler.deliver([Piece(number, 1, "a") for number in range(num_texts)])
        await asyncio.sleep(0)  # the pieces arrive
    assert unread.pieces.qsize() == 1
    with pytest.raises(Refusal, match="must read its stream as fast as the model writes, but 4096 tokens are unread"):
        await anext(unread)
    assert scheduler.take(idle=False) == News(cancelled=tuple(range(num_texts)))
    scheduler.deliver([Piece(num_texts, 1, "b", finish="stop")])
    assert [piece.text async for _, piece in other] == ["b"]


@in_loop
async def test_an_answer_that_the_server_collects_may_have_any_number_of_unread_parts():
    """All parts of many steps arrive at once if this thread has had to wait for a while."""
    desk, scheduler = opened(1)
    job = desk.submit(orders(1), most_unread=sys.maxsize)
    scheduler.take(idle=True)
    scheduler.began([0])
    for _ in range(MOST_UNREAD + 1):
        scheduler.deliver([Piece(0, 1, "a")])
    scheduler.deliver([Piece(0, 1, "b", finish="stop")])
    assert len([piece async for _, piece in job]) == MOST_UNREAD + 2


async def ends_in_vain(job: RequestJob) -> None:
    with pytest.raises(Refusal, match="The server stopped before the text was complete") as refused:
        await anext(job)
    assert refused.value.status == 503
