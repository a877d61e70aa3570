"""Web application: its routes take JSON, and return JSON or a stream of events."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from crosscut.config.conventions import LOOK
from crosscut.generation import Piece
from crosscut.serving.desk import Desk, Job
from crosscut.serving.protocol.answers import Answer, ChatAnswer, CompletionAnswer, Json
from crosscut.serving.protocol.fields import parse
from crosscut.serving.protocol.refusals import Refusal, failure_of
from crosscut.serving.protocol.requests import Request, Served, read_chat, read_completion, unknown_model
from crosscut.serving.web.guard import Guard
from crosscut.serving.web.waiting import Pace, Readers, until_gone

_PAGE = Path(__file__).parent / "page"

_PATHS = "/v1/models, /v1/completions, /v1/chat/completions, /health and the page at /"

_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

_COMPLETION_READERS = 8
"""Number of completions that are read at a time."""

_SMALL = 1 << 16
"""Maximum number of bytes of a body that is read before its request's turn."""

_INTERVAL, _BYTES_PER_SECOND = 0.004, 50e6
"""Pace of the requests that are read while texts are generated: seconds per request, and bytes per second. Both allow
about twice the time that reading takes, so that half of the interpreter's time is left for the texts.
"""

_CHAT_READERS = 2
"""Number of chats that are read at a time. A slow chat template delays other chats, and no completions."""


def make_application(
    served: Served, desk: Desk, spell: Callable[[int], bytes], *, key: str | None, names: Iterable[str]
) -> Starlette:
    """Build the application that serves a model. The `desk` passes texts to the computing thread, and `spell` returns
    the bytes of a token.

    `key` and `names` decide which clients are allowed; see `Guard`.
    """
    handlers = _Handlers(served, desk, spell)
    application = Starlette(
        routes=[
            Route("/", handlers.page),
            Route("/page/{name}", handlers.page),
            Route("/health", handlers.health),
            Route("/v1/models", handlers.models),
            Route("/v1/models/{name:path}", handlers.model),
            Route("/v1/completions", handlers.completions, methods=["POST"]),
            Route("/v1/chat/completions", handlers.chat, methods=["POST"]),
        ],
        middleware=[Middleware(Guard, key=key, names=names)],
        exception_handlers={
            Refusal: _refused,
            HTTPException: _not_found,
            ClientDisconnect: _left,
        },
        lifespan=handlers.opened,
    )
    application.router.redirect_slashes = False  # a redirect has no body, and a client that posts would not follow it
    return application


class _Handlers:
    """Handlers of the routes."""

    def __init__(self, served: Served, desk: Desk, spell: Callable[[int], bytes]) -> None:
        self._served = served
        self._desk = desk
        self._spell = spell
        self._pace = Pace(lambda: desk.num_running > 0, seconds=_INTERVAL, bytes_per_second=_BYTES_PER_SECOND)
        self._completion_readers, self._chat_readers = Readers(_COMPLETION_READERS), Readers(_CHAT_READERS)
        self._files = {file.name: file for file in (LOOK, *_PAGE.iterdir())}

    @asynccontextmanager
    async def opened(self, _: Starlette) -> AsyncIterator[None]:
        self._desk.open()
        yield

    async def page(self, request: HttpRequest) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in self._files:
            raise HTTPException(404)
        return FileResponse(self._files[name], headers=_PAGE_HEADERS)

    async def health(self, _: HttpRequest) -> Response:
        stopping = self._desk.is_stopping
        figures = {"rows": self._desk.num_rows, "running": self._desk.num_running, "waiting": self._desk.num_waiting}
        told = {"status": "stopping" if stopping else "ok", "model": self._served.name}
        return JSONResponse(told | figures, 503 if stopping else 200)

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [_model(self._served)]})

    async def model(self, request: HttpRequest) -> Response:
        if (name := request.path_params["name"]) != self._served.name:
            raise unknown_model(name, self._served)
        return JSONResponse(_model(self._served))

    async def completions(self, request: HttpRequest) -> Response:
        asked = await _read(request, read_completion, self._served, self._completion_readers, self._pace)
        return await _answered(request, CompletionAnswer(asked, self._served, self._spell), self._desk)

    async def chat(self, request: HttpRequest) -> Response:
        asked = await _read(request, read_chat, self._served, self._chat_readers, self._pace)
        return await _answered(request, ChatAnswer(asked, self._served, self._spell), self._desk)


def _model(served: Served) -> Json:
    """Description of the model in OpenAI's form, with additional fields for the page."""
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "crosscut",
        "window": served.window,
        "chat": served.template is not None,
    }


async def _read(
    request: HttpRequest, read: Callable[[object, Served], Request], served: Served, readers: Readers, pace: Pace
) -> Request:
    """Read and check a request. The prompt is encoded in another thread. If the client disconnects before a thread is
    free, the request is dropped.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(
            f"`Content-Type` must be application/json, but is {kind or 'missing'}. Set the header.", status=415
        )
    body = await _body(request, pace)
    return await until_gone(readers.run(lambda: read(parse(body), served)), request.receive)


async def _body(request: HttpRequest, pace: Pace) -> bytes:
    """Body of a request, returned when it is the request's turn. A small body is read before the turn, so that the
    request is dropped if its client disconnects. A large body is read at its turn, and delays the next request by the
    time that reading takes.
    """
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) <= _SMALL:
        body = await request.body()
        await until_gone(pace.start(), request.receive)
        return body
    await pace.start()
    body = await request.body()
    pace.charge(len(body))
    return body


async def _answered(request: HttpRequest, answer: Answer, desk: Desk) -> Response:
    """Answer a request, as a whole or as a stream. If the client disconnects, the generation of its texts is
    cancelled.
    """
    job = desk.submit(list(answer.request.orders()))
    if answer.request.stream:
        return _Events(answer, job, desk)
    try:
        return JSONResponse(answer.whole(await until_gone(_collect(job), request.receive)))
    finally:
        desk.withdraw(job)


async def _collect(job: Job) -> list[list[Piece]]:
    """Collect all tokens of each text."""
    choices: list[list[Piece]] = [[] for _ in job.keys]
    async for which, piece in job:
        choices[which].append(piece)
    return choices


class _Events(Response):
    """Stream of server-sent events, with one event per token."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, job: Job, desk: Desk) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answer = answer
        self._job = job
        self._desk = desk

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
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
        """Events of the stream. A refusal or a failure after the start of the stream is also an event; clients raise an
        error for it.
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
    """JSON of an event. Raises `ValueError` for NaN and infinity, which JSON does not have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def _refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return JSONResponse(error.body, error.status, error.headers)


async def _not_found(request: HttpRequest, error: Exception) -> Response:
    """Response for an unknown path or method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"The method must be {allowed} at {request.url.path}, but is {request.method}."
    else:
        message = f"The path must be one of {_PATHS}, but is {request.url.path}."
    refusal = Refusal(message, status=error.status_code)
    return JSONResponse(refusal.body, refusal.status, error.headers)


async def _left(_: HttpRequest, _error: Exception) -> Response:
    """Response after the client has disconnected. No client receives it."""
    return Response(status_code=499)
