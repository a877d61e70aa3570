"""The texts that the loop of a server writes are those of the model's forward pass."""

import asyncio
import threading

import torch.distributed as dist

from crosscut.config import Layout
from crosscut.generation import Decoder, Sampling
from crosscut.serving.desk import Desk
from crosscut.serving.loop import write_texts
from crosscut.serving.news import Order
from tests.generation.models import make
from tests.generation.test_decoder import recompute
from tests.ranks import RankPool

PROMPTS = [[1, 2], [3], [40, 41, 42, 43, 44]]
SAMPLING = Sampling(num_tokens=6, temperature=0.0)


async def _ask(desk: Desk, told: list[list[int]]) -> None:
    desk.open()
    jobs = [desk.submit([Order(tuple(prompt), SAMPLING, 0, 0)]) for prompt in PROMPTS]
    told += [[piece.token async for _, piece in job] for job in jobs]
    desk.stop()


def _serve(family: str) -> list[list[int]]:
    """On a rank: the tokens that the clients of the first rank get, by request."""
    told: list[list[int]] = []
    desk = Desk(num_rows=2) if dist.get_rank() == 0 else None
    decoder = Decoder(make(Layout(tensor=dist.get_world_size()), family), None, num_rows=2)
    if desk is not None:
        threading.Thread(target=lambda: asyncio.run(_ask(desk, told))).start()
    write_texts(decoder, desk)
    return told


def test_a_model_of_no_published_family_is_served_like_any_other(ranks: RankPool) -> None:
    family = "of no family"
    expected = ranks.run(1, recompute, family, [(prompt, SAMPLING) for prompt in PROMPTS])[0]
    assert ranks.run(2, _serve, family) == [expected, []]
