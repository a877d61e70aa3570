"""Guard before all routes: checks who may send a request, and how large it may be.

Without a key the server answers only to names of this machine. A page that a browser loads from elsewhere can send
requests to this machine under a name of its own; the name in the request gives it away.
"""

import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crosscut.serving.refusals import Refusal

LARGEST_BODY = 8 << 20
"""Bytes of a request."""

_PROTECTED = "/v1/"


class Guard:
    """Refuses requests without the key, for other names than `names` where there is no key, and too large ones."""

    def __init__(self, app: ASGIApp, *, key: str | None, names: Iterable[str]) -> None:
        self._app = app
        self._key = None if key is None else f"Bearer {key}".encode()
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with what is wrong."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            await self._app(scope, _limited(receive), send)
        except Refusal as refusal:
            if refusal.status == 413:
                await _drain(receive)
            headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else refusal.headers
            await JSONResponse(refusal.body, refusal.status, headers)(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._key is None:
            if (name := _name(headers.get("host", ""))) not in self._names:
                raise Refusal(
                    f"`Host` must be a name of this server, but is {name!r}. Serve with a key to allow others.",
                    status=421,
                )
        elif scope["path"].startswith(_PROTECTED):
            given = headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, self._key):
                what = "is another" if given else "is missing"
                raise Refusal(
                    f"`Authorization` must be `Bearer` and the server's key, but {what}. Set the client's API key.",
                    status=401,
                    code="invalid_api_key",
                )
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > LARGEST_BODY:
            raise _too_large()


def _limited(receive: Receive) -> Receive:
    """Counts what comes: a request may come without its length, or with a wrong one."""
    total = 0

    async def count() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > LARGEST_BODY:
            raise _too_large()
        return message

    return count


async def _drain(receive: Receive) -> None:
    """Read what still comes, within reason: a client that is cut off while it sends does not hear why."""
    total = 0
    while total < 8 * LARGEST_BODY:
        message = await receive()
        total += len(message.get("body", b""))
        if not message.get("more_body"):
            return


def _name(host: str) -> str:
    """The name without the port; an IPv6 address stands in brackets."""
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]


def _too_large() -> Refusal:
    most = f"{LARGEST_BODY >> 20} MiB"
    return Refusal(f"A request must have at most {most}, but has more. Send less at once.", status=413)
