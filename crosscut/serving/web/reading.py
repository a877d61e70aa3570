"""Read requests: wait for the body of a request, then parse and check it in another thread."""

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from crosscut.serving.protocol.fields import parse
from crosscut.serving.protocol.refusals import Refusal
from crosscut.serving.web.waiting import Pace, Readers, until_gone

_ServedT = TypeVar("_ServedT")
_RequestT = TypeVar("_RequestT")

_SMALL = 1 << 16
"""Maximum size in bytes of a body that is read before the request's turn. A larger body is read when the turn comes."""

_INTERVAL, _BYTES_PER_SECOND = 0.004, 50e6
"""Pace of the requests that are read while the model computes: seconds per request, and bytes per second. Both allow
about twice the time that reading takes, so that half of the interpreter's time is left for generating text.
"""


def make_pace(is_busy: Callable[[], bool]) -> Pace:
    """Make the pace at which requests are read. `is_busy` returns whether the model is computing."""
    return Pace(is_busy, seconds=_INTERVAL, bytes_per_second=_BYTES_PER_SECOND)


async def read_request(
    request: HttpRequest,
    read: Callable[[object, _ServedT], _RequestT],
    served: _ServedT,
    *,
    readers: Readers,
    pace: Pace,
) -> _RequestT:
    """Read and check a request. The prompt is encoded in another thread. If the client disconnects before a thread is
    free, the request is dropped. Raises `Refusal`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(
            f"`Content-Type` must be application/json, but is {kind or 'missing'}. Set the header.", status=415
        )
    body = await _body(request, pace)
    return await until_gone(readers.run(lambda: read(parse(body), served)), request.receive)


async def _body(request: HttpRequest, pace: Pace) -> bytes:
    """Wait for a request's turn and return the request's body. A small body is read before the turn, so that the
    request is dropped if its client disconnects. A large body is read at the request's turn; the next request waits for
    the time that this reading takes.
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
