"""Read requests: wait for the body of a request, and have a process parse and check it.

Each process reads one request at a time, so requests are divided among processes: a small request never waits for a
large one, and a completion never waits for a chat template.
"""

from collections.abc import Callable
from functools import partial

from starlette.requests import Request as HttpRequest

from crosscut.serving.protocol.embeddings import EmbeddingRequest
from crosscut.serving.protocol.fields import RequestKind
from crosscut.serving.protocol.model import ServedModel
from crosscut.serving.protocol.refusals import Refusal
from crosscut.serving.protocol.requests import Request, ServedDecoder
from crosscut.serving.reading.process import ReadingProcess
from crosscut.serving.web.waiting import Pace, Readers, until_gone

SMALL = 1 << 14
"""Maximum size in bytes of a small request. Its body is read before the request's turn. A larger body is read when the
turn comes."""

_INTERVAL, _BYTES_PER_SECOND = 0.004, 50e6
"""Pace of the requests that are read while the model computes: seconds per request, and bytes per second. Both allow
about twice the time that the server's interpreter needs for them, so that half of its time is left for generating text.
"""

_NICENESS = 10
"""Niceness of the process that reads large requests, which gives way to the model."""


class RequestReading:
    """Processes that read the requests for the model `served`. `is_busy` returns whether the model is computing."""

    def __init__(self, served: ServedModel, is_busy: Callable[[], bool]) -> None:
        texts = [RequestKind.COMPLETION if isinstance(served, ServedDecoder) else RequestKind.EMBEDDING]
        chats = [RequestKind.CHAT] if isinstance(served, ServedDecoder) and served.can_chat else []
        make_pace = partial(Pace, is_busy, seconds=_INTERVAL, bytes_per_second=_BYTES_PER_SECOND)
        small_pace = make_pace()
        self._small = _Lane(ReadingProcess(served, texts), small_pace)
        self._chats = _Lane(ReadingProcess(served, chats), small_pace) if chats else self._small
        self._large = _Lane(ReadingProcess(served, [*texts, *chats], niceness=_NICENESS), make_pace())
        for lane in (self._small, self._chats):
            lane.process.start()  # the first request should not wait

    async def read(self, request: HttpRequest, kind: RequestKind) -> Request | EmbeddingRequest:
        """Read and check a request. If the client disconnects before the request's turn, the request is dropped.
        Raises `Refusal`.
        """
        content = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content != "application/json":
            raise Refusal(
                f"`Content-Type` must be application/json, but is {content or 'missing'}. Set the header.", status=415
            )
        length = request.headers.get("content-length", "")
        is_small = length.isdecimal() and int(length) <= SMALL
        lane = self._large if not is_small else self._chats if kind is RequestKind.CHAT else self._small
        body = await _body(request, lane.pace, is_small=is_small)
        return await until_gone(lane.readers.run(partial(lane.process.read, kind, body)), request.receive)


class _Lane:
    """Process that reads requests of one kind, one at a time, and the pace of these requests."""

    def __init__(self, process: ReadingProcess, pace: Pace) -> None:
        self.process, self.pace = process, pace
        self.readers = Readers(1)


async def _body(request: HttpRequest, pace: Pace, *, is_small: bool) -> bytes:
    """Wait for a request's turn and return the request's body. A small body is read before the turn, so that the
    request is dropped if its client disconnects. A large body is read at the request's turn; the next large request
    waits for the time that this reading takes.
    """
    if is_small:
        body = await request.body()
        await until_gone(pace.start(), request.receive)
        return body
    await pace.start()
    body = await request.body()
    pace.charge(len(body))
    return body
