"""Choice of the texts that begin and are cancelled before each step of a server, in the computing thread.

The main loop calls `Scheduler.take` to collect the changes since the last step; if there is nothing else to do, `take`
waits. It then calls `began` and `deliver` to report the results, which go to the `Desk`.
"""

import time
from collections.abc import Sequence
from itertools import accumulate, islice, takewhile
from typing import Generic

from crosscut.serving.desk import Desk, PartT
from crosscut.serving.news import News, TextOrder
from crosscut.serving.protocol.refusals import failure_of

MOST_BEGUN = 8192
"""Maximum total number of prompt tokens in the texts that start together between two steps. A longer text starts alone.
The running texts wait while new texts start."""

MOST_EMBEDDED_BEGUN = 1 << 17
"""Maximum total number of tokens in the texts that the embedder accepts together between two steps. The limit is high
because the embedder only checks the token ids of a text to accept it, which takes little time."""

HEARTBEAT = 30.0
"""Interval in seconds at which the first rank of an idle server sends the other ranks a sign of life."""

GRACE = 30.0
"""Time in seconds that running texts have to finish after the server is asked to stop."""


class Scheduler(Generic[PartT]):
    """TextOrder in which the texts of a `desk` begin, and their cancellation. The texts that start together between two
    steps have at most `most_begun` tokens in total; a longer text starts alone. `grace` is the time in seconds that
    running texts have to finish after a call of `Desk.stop`.
    """

    def __init__(self, desk: Desk[PartT], *, most_begun: int = MOST_BEGUN, grace: float = GRACE) -> None:
        self._desk: Desk[PartT] = desk
        self._most_begun, self._grace = most_begun, grace
        self._arrived: dict[int, TextOrder] = {}
        """Orders (texts to start) that have arrived but not begun, by key."""
        self._beginning: list[int] = []
        self._numbers: dict[int, int] = {}
        """Maps the key of each text to the number that the decoder or the embedder gave the text."""
        self._known: dict[int, int] = {}
        """Inverse of `_numbers`: maps the number of each text to the text's key."""

    def take(self, *, idle: bool) -> News | None:
        """Return the changes since the last step, or None if nothing has changed. `idle` says whether the model has no
        texts to work on. If so, the call waits up to `HEARTBEAT` seconds for changes.
        """
        cancelled = []
        waits = idle and not self._arrived and not self._desk.is_stopping
        for came in self._desk.arrivals(wait=HEARTBEAT if waits else 0.0):
            if isinstance(came, tuple):
                self._arrived[came[0]] = came[1]
            elif came is not None and self._arrived.pop(came, None) is None:  # the order has already begun
                cancelled.append(came)
        end = self._is_over(idle=idle and not self._arrived)
        orders = self._next_orders()
        self._beginning = list(orders)
        if not (orders or cancelled or end):
            return None
        return News(tuple(orders.values()), tuple(self._forget(key) for key in cancelled if key in self._numbers), end)

    def began(self, begun: Sequence[int | Exception]) -> None:
        """Report which texts from the last `take` have begun. `begun` holds one entry per text, in the order in which
        `take` returned them: the number that the decoder or the embedder gave to the text, or the error that kept the
        text from beginning.
        """
        for key, outcome in zip(self._beginning, begun, strict=True):
            if isinstance(outcome, Exception):
                self._desk.schedule(self._desk.refuse, key, failure_of(outcome))
            else:
                self._numbers[key], self._known[outcome] = outcome, key

    def deliver(self, pieces: Sequence[PartT]) -> None:
        """Send each part of an answer to the job that waits for it. If a text ended with an error, its job fails."""
        keyed = [(self._known[piece.number], piece) for piece in pieces]
        for key, piece in keyed:
            if piece.finish:
                self._forget(key)
            if piece.error is not None:
                self._desk.schedule(self._desk.refuse, key, failure_of(piece.error))
        self._desk.schedule(self._desk.hand_out, [(key, piece) for key, piece in keyed if piece.error is None])

    def _next_orders(self) -> dict[int, TextOrder]:
        """Choose the texts that begin now, first come first served. Remove them from the arrived texts, and return them
        by key.
        """
        sizes = accumulate(len(order.prompt) for order in self._arrived.values())
        num_next = max(1, sum(1 for _ in takewhile(lambda size: size <= self._most_begun, sizes)))
        return {key: self._arrived.pop(key) for key in list(islice(self._arrived, num_next))}

    def _forget(self, key: int) -> int:
        number = self._numbers.pop(key)
        del self._known[number]
        return number

    def _is_over(self, *, idle: bool) -> bool:
        stopped_at = self._desk.stopped_at
        return stopped_at is not None and (idle or time.monotonic() > stopped_at + self._grace)
