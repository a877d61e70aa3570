"""Streams of events, without a network."""

import asyncio
import base64
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crosscut.generation import Piece, Sampling
from crosscut.serving.news import News, TextOrder
from crosscut.serving.protocol import answers
from crosscut.serving.protocol.answers import in_parts, to_json
from crosscut.serving.protocol.embeddings import EmbeddingRequest
from crosscut.serving.web.texts import Events
from tests.serving.conftest import in_loop
from tests.serving.test_desk import opened


def test_json_in_parts_is_the_json():
    entries = [{"token": "\u20ac", "logprob": -0.5, "bytes": [1]}] * 2500
    for value in (
        {"choices": [{"text": "a", "logprobs": {"tokens": entries, "text_offset": []}}] * 3, "usage": {}},
        {"choices": [{"logprobs": {"content": entries[:1000], "refusal": None}}, {"logprobs": None}], "x": {}},
        {"choices": []},
        {},
    ):
        parts = list(in_parts(value))
        assert "".join(parts) == to_json(value)
        assert max(map(len, parts)) <= 1000 * len(to_json(entries[:1])) + 2
    with pytest.raises(ValueError, match="Out of range float values"):
        list(in_parts({"choices": [{"logprobs": {"tokens": [float("nan")]}}]}))
    assert "".join(in_parts({"choices": iter([{}, {"a": 1}])})) == '{"choices":[{},{"a":1}]}'


def test_embeddings_are_encoded_in_parts(monkeypatch):
    """All numbers of 2,048 long embeddings at once would hold Python's lock for more than a second."""
    parts = []
    monkeypatch.setattr(answers, "to_json", lambda value: parts.append(to_json(value)) or parts[-1])
    served = SimpleNamespace(name="m")
    for is_base64 in (False, True):
        request = EmbeddingRequest(prompts=((1, 2), (3,), (4,)), is_base64=is_base64)
        answer = answers.embedding_answer(request, served, [torch.full((1500,), 0.5)] * 3)
        found = [entry["embedding"] for entry in json.loads(answer)["data"]]
        assert found == [base64.b64encode(b"\0\0\0?" * 1500).decode() if is_base64 else [0.5] * 1500] * 3
    assert max(map(len, parts)) == len(to_json("AAAA" * 2000)) > 1000 * len("0.5,")


class Spoken:
    """Stands for an answer of either protocol."""

    def openings(self) -> Iterator[dict[str, Any]]:
        yield from ({} for _ in range(100))

    def chunk(self, which: int, piece: Piece) -> dict[str, Any]:
        return {"which": which, "token": piece.token}

    def closing(self) -> Iterator[dict[str, Any]]:
        yield from ()


@in_loop
async def test_a_stream_ends_with_its_client_however_much_waits_to_be_sent():
    """A write to a connection that is lost fails in silence; after some of them asyncio complains on stderr."""
    desk, scheduler = opened(1)
    job = desk.submit([TextOrder((5,), Sampling(), 0, 0)])
    scheduler.take(idle=True)
    scheduler.began([0])
    scheduler.deliver([Piece(0, token) for token in range(1000)])
    await asyncio.sleep(0)  # all of it arrives
    sent = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    await Events(Spoken(), job, desk)({}, receive, send)
    assert len(sent) < 5
    assert scheduler.take(idle=False) == News(cancelled=(0,)), "nothing is computed for it any more"


@in_loop
async def test_streams_take_turns():
    """One that has much to send does not keep others from their events."""
    desk, scheduler = opened(2)
    jobs = [desk.submit([TextOrder((5,), Sampling(), 0, 0)]) for _ in range(2)]
    scheduler.take(idle=True)
    scheduler.began([0, 1])
    scheduler.deliver([Piece(number, token) for number in (0, 1) for token in range(99)])
    scheduler.deliver([Piece(number, 99, finish="length") for number in (0, 1)])
    sent = []

    async def stream(which: int) -> None:
        async def send(_: dict[str, Any]) -> None:
            sent.append(which)

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

        await Events(Spoken(), jobs[which], desk)({}, receive, send)

    await asyncio.gather(stream(0), stream(1))
    assert len(sent) == 2 * (100 + 100 + 3)  # openings, tokens; start, [DONE] and end
    assert set(sent[:10]) == {0, 1}
