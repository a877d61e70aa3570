"""Main loop of every rank of a server. Each turn receives the changes from the first rank (texts to start and to
cancel), then generates one more token of every text, or embeds the texts of one forward pass.
"""

from collections.abc import Callable
from typing import Protocol

from crosscut.evaluation.embeddings.embedder import Embedded, Embedder
from crosscut.generation import Decoder, Piece
from crosscut.parallel.collectives import FirstRankLine
from crosscut.serving.desk import PartT
from crosscut.serving.news import News, TextOrder
from crosscut.serving.scheduling import Scheduler


class _TextWorker(Protocol[PartT]):
    """Members of a `Decoder` or an `Embedder` that the loop uses."""

    @property
    def is_idle(self) -> bool: ...

    def cancel(self, number: int) -> None: ...

    def step(self) -> list[PartT]: ...


def write_texts(decoder: Decoder, scheduler: Scheduler[Piece] | None) -> None:
    """Generate the texts that the first rank's `scheduler` begins, until the server stops. `scheduler` is None on all
    other ranks.

    If the server runs on several ranks, an error inside a shared forward pass ends the server, because the other ranks
    wait for this rank's part of an all-reduce. A request can hardly cause such an error: every request is checked
    before the pass (`_begin`), the number of prompt tokens per pass is limited, and the cache grows before the pass,
    after all ranks have agreed that they have the memory (`Decoder.step`). The remaining causes are a broken device, a
    lost rank, and a device with too little free memory for the forward pass of a long prompt.
    """

    def begin(order: TextOrder) -> int:
        assert order.sampling is not None
        return decoder.add(order.prompt, order.sampling, sample=order.sample, index=order.index)

    _work(decoder, begin, scheduler)


def embed_texts(embedder: Embedder, scheduler: Scheduler[Embedded] | None) -> None:
    """Embed the texts that the first rank's `scheduler` begins, until the server stops. `scheduler` is None on all
    other ranks.

    As in `write_texts`, an error inside a forward pass ends a server that runs on several ranks.
    """
    _work(embedder, lambda order: embedder.add(order.prompt, index=order.index), scheduler)


def _work(worker: _TextWorker[PartT], begin: Callable[[TextOrder], int], scheduler: Scheduler[PartT] | None) -> None:
    """Begin the texts that arrive and run steps, until the server stops. `begin` begins a text and returns its number.

    Before every step, the first rank sends the changes to all ranks, or 8 bytes if there are none. While there is
    nothing to do, it sends 8 bytes every `scheduling.HEARTBEAT` seconds. An error in one text is delivered to the
    request that asked for the text, and the loop continues.
    """
    line = FirstRankLine(News.to_json, News.from_json)
    while True:
        news = line.share(None if scheduler is None else scheduler.take(idle=worker.is_idle))
        if news is not None:
            for number in news.cancelled:
                worker.cancel(number)
            begun = [_begin(begin, order) for order in news.orders]
            if scheduler is not None:
                scheduler.began(begun)
            if news.end:
                break
        if not worker.is_idle:
            parts = worker.step()
            if scheduler is not None:
                scheduler.deliver(parts)
    line.close()


def _begin(begin: Callable[[TextOrder], int], order: TextOrder) -> int | Exception:
    """Begin a text. Return its number, or the error that `begin` raised. All ranks make the same checks, so all ranks
    find the same error.
    """
    try:
        return begin(order)
    except Exception as error:
        return error
