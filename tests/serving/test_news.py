"""Messages from the first rank of a server to the other ranks."""

import asyncio
import pickle
import threading
from typing import NoReturn

import pytest
import torch.distributed as dist

from crosscut.config import Layout
from crosscut.generation import Decoder, Sampling
from crosscut.serving.desk import Desk
from crosscut.serving.loop import write_texts
from crosscut.serving.news import News, TextOrder
from crosscut.serving.protocol.refusals import Refusal
from crosscut.serving.scheduling import Scheduler
from tests.generation.models import make
from tests.generation.test_decoder import recompute
from tests.ranks import RankPool

OF_OBJECTS = [name for name in dir(dist.distributed_c10d) if name.endswith(("_object", "_object_list"))]
"""Functions of `torch.distributed` that send pickled objects."""

ORDERS = [
    TextOrder((5, 6), Sampling(num_tokens=3), 0, 0),
    TextOrder((1,), Sampling(temperature=0.1 + 0.2, top_p=1 / 3, seed=-(1 << 63), bias=((3, -1e-17), (4, 2.0))), 7, 9),
    TextOrder((7, 8), None, 0, 2),
    TextOrder(tuple(range(5000)), Sampling(stop=("\n", "\N{SNOWMAN}"), alternatives=0, tell_prompt=True), 127, 127),
]


@pytest.mark.parametrize("news", [News(tuple(ORDERS)), News(cancelled=(1, 2)), News(end=True), News()], ids=str)
def test_news_are_the_same_on_all_ranks(news):
    assert News.from_json(news.to_json()) == news


@pytest.mark.parametrize("hostile", [pickle.dumps(News()), b"\x80\x04.", b"[1]", b'{"orders": [{}]}'])
def test_what_is_no_news_runs_no_code(hostile):
    with pytest.raises((ValueError, TypeError, KeyError)):
        News.from_json(hostile)


PROMPTS = [[1, 2], [10**6], [3], [40, 41, 42, 43, 44]]
"""The second one has a token that the model does not have."""
SAMPLING = Sampling(num_tokens=6, temperature=0.0)


async def ask(desk: Desk, told: list[object]) -> None:
    desk.open()
    jobs = [desk.submit([TextOrder(tuple(prompt), SAMPLING, 0, 0)]) for prompt in PROMPTS]
    for job in jobs:
        try:
            told.append([(piece.token, piece.finish) async for _, piece in job])
        except Refusal as refusal:
            told.append(refusal.status)
    desk.stop()


def serve(family: str) -> list[object]:
    """Answers that the clients of the first rank get, by request: tokens and ends."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a message is pickled")

    told: list[object] = []
    desk = Desk(num_rows=2) if dist.get_rank() == 0 else None
    decoder = Decoder(make(Layout(tensor=dist.get_world_size()), family), None, num_rows=2)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("loads", "dumps", "load", "dump", "Pickler", "Unpickler"):
            patch.setattr(pickle, name, refuse)
        for name in OF_OBJECTS:
            patch.setattr(dist.distributed_c10d, name, refuse)
            patch.setattr(dist, name, refuse, raising=False)  # some are private to the module
        if desk is not None:
            threading.Thread(target=lambda: asyncio.run(ask(desk, told))).start()
        write_texts(decoder, None if desk is None else Scheduler(desk))
    return told


def test_functions_that_send_objects_are_found():
    assert {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"} <= {*OF_OBJECTS}


@pytest.mark.parametrize(("num_ranks", "family"), [(1, "gpt2"), (2, "of no family")])
def test_an_order_that_cannot_begin_is_answered_and_the_others_are_written(ranks: RankPool, num_ranks, family):
    """On all ranks alike, with nothing pickled between them, and as the model's forward pass continues the prompts."""
    first, *others = ranks.run(num_ranks, serve, family)
    assert first.pop(1) == 500
    jobs = [(prompt, SAMPLING) for prompt in PROMPTS if max(prompt) < 100]
    expected = ranks.run(1, recompute, family, jobs)[0]
    ends = ["", "", "", "", "", "length"]
    assert first == [list(zip(tokens, ends, strict=True)) for tokens in expected]
    assert others == [[]] * (num_ranks - 1)
