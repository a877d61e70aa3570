"""Guard in front of all routes. The guard checks the client's permission and the size of the request, and ends a
request whose client sends too slowly or reads the answer too slowly.

Without a key, the server accepts only requests addressed to names of this machine. A foreign web page in a local
browser can send requests to this machine under a host name of its own, so the guard checks the `Host` header.
"""

import asyncio
import hmac
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crosscut.serving.protocol.refusals import Refusal, failure_of

LARGEST_BODY = 8 << 20
"""Maximum size of a request in bytes."""

SMALL_BODY = 64 << 10
"""Maximum size of a small request in bytes. Small requests are accepted even if the server already holds `MOST_HELD`
bytes.
"""

MOST_HELD = 256 << 20
"""Maximum total size in bytes of the requests that the server holds. Above this total, only small requests are
accepted."""

BODY_SECONDS = 120.0
"""Time in seconds that a client has to send the body of a request, after the head."""

UNREAD = 30.0
"""Time in seconds after which a request is cancelled if its client reads nothing of the answer."""

_UNTIL_SENT = 5.0
"""Time in seconds that a client has to send the rest of a request that is too large."""

_MOST_DIGITS = 20
"""Maximum number of digits of a `Content-Length`. A longer number is too large in any case, and Python refuses to
convert thousands of digits."""

_PROTECTED = "/v1/"

_PORT = re.compile(r":[0-9]*\Z")


class Guard:
    """Middleware that refuses requests without permission and requests that are too large. If `key` is given, every
    request for a path under /v1/ must carry this key. Otherwise, the `Host` header of every request must be one of
    `names`.

    A request that raises an error is answered with status 500. The error does not affect other requests.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, names: Iterable[str]) -> None:
        self._app = app
        self._key = None if key is None else f"Bearer {key}".encode()
        self._names = frozenset(name.lower() for name in names)
        self._num_held = 0
        """Total size in bytes of the requests that are being received or answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or answer it with a refusal."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            async with _patient(send) as patient_send:
                with self._receiving(receive) as limited_receive:
                    await self._app(scope, limited_receive, patient_send)
        except Refusal as refusal:
            await _answer(refusal, receive, send)
        except Exception as error:  # a bug, which must not end the server
            await _answer(failure_of(error), receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._key is None:
            if (name := _name(headers.get("host", ""))) not in self._names:
                raise Refusal(
                    f"`Host` must be a name of this server, but is {name!r}. To allow other names, start the server "
                    "with --api-key.",
                    status=421,
                )
        elif scope["path"].startswith(_PROTECTED):
            given = headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, self._key):
                what = "has a different value" if given else "is missing"
                raise Refusal(
                    f"`Authorization` must be `Bearer` followed by the server's key, but {what}. Set the client's API "
                    "key.",
                    status=401,
                    code="invalid_api_key",
                )
        length = headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > _MOST_DIGITS or int(length) > LARGEST_BODY):
            raise _too_large()

    @contextmanager
    def _receiving(self, receive: Receive) -> Iterator[Receive]:
        """Context with a wrapped `receive`, which raises `Refusal` if the request takes too long or has too many bytes.
        The bytes are counted because a request may have no length header or a wrong one. Until the context ends, they
        count towards the total that the server holds.
        """
        total, is_whole = 0, False
        deadline = asyncio.get_running_loop().time() + BODY_SECONDS

        async def limited() -> Message:
            nonlocal total, is_whole
            if is_whole:  # wait for the end of the connection
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise _too_slow() from None
            is_whole = not message.get("more_body", False)
            size = len(message.get("body", b""))
            total += size
            self._num_held += size
            if total > LARGEST_BODY:
                raise _too_large()
            if total > SMALL_BODY and self._num_held > MOST_HELD:
                raise _too_many()
            return message

        try:
            yield limited
        finally:
            self._num_held -= total


@asynccontextmanager
async def _patient(send: Send) -> AsyncIterator[Send]:
    """Context with a wrapped `send`. If `send` waits for `UNREAD` seconds because the client reads nothing, the body of
    the context is cancelled, and the context ends without an error.

    One timer checks from time to time how long the last `send` has waited, because a new timer for each token would be
    slow.
    """
    loop = asyncio.get_running_loop()
    limit = asyncio.timeout(None)
    since: float | None = None
    timer = loop.call_later(UNREAD, lambda: look())

    async def timed(message: Message) -> None:
        nonlocal since
        since = loop.time()
        await send(message)
        since = None

    def look() -> None:
        nonlocal timer
        waited = 0.0 if since is None else loop.time() - since
        if waited < UNREAD:
            timer = loop.call_later(UNREAD - waited, look)
        else:
            limit.reschedule(loop.time())

    try:
        async with limit:
            yield timed
    except TimeoutError:
        if not limit.expired():
            raise
    finally:
        timer.cancel()


async def _answer(refusal: Refusal, receive: Receive, send: Send) -> None:
    """Send a refusal. If the request is too large or the server has no room for it, the rest of the request is read
    before the connection is closed: a client that is cut off while it is sending would not receive the refusal.
    """
    more = {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}}
    headers = refusal.headers | more.get(refusal.status, {})
    response = JSONResponse(refusal.body, refusal.status, headers)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    if refusal.status in (413, 503):
        with suppress(TimeoutError):
            async with asyncio.timeout(_UNTIL_SENT):
                await _drain(receive)
    await send({"type": "http.response.body", "body": b""})


async def _drain(receive: Receive) -> None:
    """Read and discard the rest of a request, up to a limit."""
    total = 0
    while total < 8 * LARGEST_BODY:
        message = await receive()
        total += len(message.get("body", b""))
        if not message.get("more_body"):
            return


def _name(host: str) -> str:
    """Host name in lower case, without the port. Only the digits of a port are removed: whatever else follows a name
    belongs to another name.
    """
    return _PORT.sub("", host).lower()


def _too_slow() -> Refusal:
    message = f"A request must arrive within {BODY_SECONDS:g} seconds, but did not. Send a smaller request."
    return Refusal(message, status=408)


def _too_many() -> Refusal:
    return Refusal(
        f"The server holds at most {MOST_HELD >> 20} MiB of requests, and this space is full. Try again later, or send "
        f"at most {SMALL_BODY >> 10} KiB.",
        status=503,
        code="overloaded",
        retry=True,
    )


def _too_large() -> Refusal:
    most = f"{LARGEST_BODY >> 20} MiB"
    return Refusal(f"A request must have at most {most}, but has more. Send a smaller request.", status=413)
