"""Guard in front of all routes, which checks the client's permission and the size of the request.

Without a key, the server accepts only requests addressed to names of this machine. A foreign web page in a local
browser can send requests to this machine under a host name of its own, so the guard checks the `Host` header.
"""

import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crosscut.serving.refusals import Refusal

LARGEST_BODY = 8 << 20
"""Maximum size of a request in bytes."""

_PROTECTED = "/v1/"


class Guard:
    """Middleware that refuses requests that are too large and requests without permission. With a key, a request needs
    this key. Without a key, the request's host must be one of `names`.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, names: Iterable[str]) -> None:
        self._app = app
        self._key = None if key is None else f"Bearer {key}".encode()
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or answer it with a refusal."""
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
                    f"`Host` must be a name of this server, but is {name!r}. Serve with a key to allow other names.",
                    status=421,
                )
        elif scope["path"].startswith(_PROTECTED):
            given = headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, self._key):
                what = "is a different key" if given else "is missing"
                raise Refusal(
                    f"`Authorization` must be `Bearer` and the server's key, but {what}. Set the client's API key.",
                    status=401,
                    code="invalid_api_key",
                )
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > LARGEST_BODY:
            raise _too_large()


def _limited(receive: Receive) -> Receive:
    """Wrap `receive` to count the received bytes, because a request may have no length header or a wrong one."""
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
    """Read the rest of the request up to a limit, because a client that is cut off while sending does not receive the
    answer.
    """
    total = 0
    while total < 8 * LARGEST_BODY:
        message = await receive()
        total += len(message.get("body", b""))
        if not message.get("more_body"):
            return


def _name(host: str) -> str:
    """Host name without the port. An IPv6 address is in brackets."""
    return host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]


def _too_large() -> Refusal:
    most = f"{LARGEST_BODY >> 20} MiB"
    return Refusal(f"A request must have at most {most}, but has more. Send less at once.", status=413)
