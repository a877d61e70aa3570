"""Endpoints that generate text: completions and chat. An answer is sent as a whole or as a stream of events."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from crosscut.generation import Piece
from crosscut.serving.desk import Desk, RequestJob
from crosscut.serving.protocol.answers import ChatAnswer, CompletionAnswer, Json, TextAnswer, in_parts, to_json
from crosscut.serving.protocol.fields import RequestKind
from crosscut.serving.protocol.refusals import Refusal, failure_of
from crosscut.serving.protocol.requests import Request, ServedDecoder
from crosscut.serving.web.endpoints import CHAT, COMPLETIONS, EMBEDDINGS, Endpoint, refusing
from crosscut.serving.web.reading import RequestReading
from crosscut.serving.web.waiting import Readers, until_gone

_WRITERS = 2
"""Number of answers that are written as a whole at a time. Writing a large answer takes a second."""


def text_endpoints(served: ServedDecoder, desk: Desk[Piece]) -> dict[str, Endpoint]:
    """Return the endpoints of a model that predicts the next token, keyed by path."""
    spell = served.spell  # the first answer should not wait until the tokens are loaded
    reading, writers = RequestReading(served, lambda: desk.num_running > 0), Readers(_WRITERS)

    def answering(kind: RequestKind, make: type[TextAnswer]) -> Endpoint:
        async def endpoint(request: HttpRequest) -> Response:
            asked = await reading.read(request, kind)
            assert isinstance(asked, Request)
            return await _answered(request, make(asked, served, spell), desk, writers)

        return endpoint

    why = f"`{served.name}` must be an encoder to embed texts, but predicts the next token. Use {COMPLETIONS}."
    return {
        COMPLETIONS: answering(RequestKind.COMPLETION, CompletionAnswer),
        CHAT: answering(RequestKind.CHAT, ChatAnswer),
        EMBEDDINGS: refusing(why, code="no_embeddings"),
    }


async def _answered(request: HttpRequest, answer: TextAnswer, desk: Desk[Piece], writers: Readers) -> Response:
    """Answer a request, as a whole or as a stream. If the client disconnects, the generation of its texts is
    cancelled.
    """
    orders = list(answer.request.orders())
    if answer.request.stream:
        return Events(answer, desk.submit(orders), desk)
    job = desk.submit(orders, most_unread=sys.maxsize)  # `_collect` reads them
    try:
        choices = await until_gone(_collect(job), request.receive)
    finally:
        desk.withdraw(job)
    write = partial(_whole, answer, choices)
    return Response(await until_gone(writers.run(write), request.receive), media_type="application/json")


def _whole(answer: TextAnswer, choices: Sequence[Sequence[Piece]]) -> bytes:
    return "".join(in_parts(answer.whole(choices))).encode()


async def _collect(job: RequestJob[Piece]) -> list[list[Piece]]:
    """Collect all tokens of each text."""
    choices: list[list[Piece]] = [[] for _ in job.keys]
    async for which, piece in job:
        choices[which].append(piece)
    return choices


class Events(Response):
    """Stream of server-sent events, with one event per token."""

    media_type = "text/event-stream"

    def __init__(self, answer: TextAnswer, job: RequestJob[Piece], desk: Desk[Piece]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answer = answer
        self._job = job
        self._desk = desk

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. If the client disconnects, the generation of its texts is cancelled."""
        try:
            await until_gone(self._send(send), receive)
        except ClientDisconnect:
            pass
        finally:
            self._desk.withdraw(self._job)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events():
            await send({"type": "http.response.body", "body": b"data: %s\n\n" % event, "more_body": True})
            # Neither call yields control while much text is ready to send. Without this sleep, the disconnection of the
            # client would be noticed only after all of the text, and other streams would stop meanwhile.
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncIterator[bytes]:
        """Yield the events of the stream. A refusal or a failure after the start of the stream is sent as an event too;
        clients raise an error for it.
        """
        try:
            for chunk in self._answer.openings():
                yield _json(chunk)
            async for which, piece in self._job:
                yield _json(self._answer.chunk(which, piece))
            for chunk in self._answer.closing():
                yield _json(chunk)
            yield b"[DONE]"
        except Refusal as refusal:
            yield _json(refusal.body)
        except Exception as error:  # a bug; the status has already been sent
            yield _json(failure_of(error).body)


def _json(value: Json) -> bytes:
    return to_json(value).encode()
