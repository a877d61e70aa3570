"""Find stragglers (ranks that compute more slowly than the others) by reading the records of all ranks twice.

In synchronous training, all ranks take the same time for a step, because fast ranks wait for slow ranks. A slow rank
shows in the part of a step in which the rank does not wait for messages.
"""

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from crosscut.flight.reading import RankRecord
from crosscut.flight.record import RecordWord, RunPhase

SLOW = 1.3
"""Minimum own time of a straggler, as a multiple of the median own time of all ranks."""
_LEAST_STEPS = 5
"""Minimum number of steps between the two readings of the records."""


class Straggler(NamedTuple):
    """Rank whose own time per step is at least `SLOW` times the median of all ranks. Own time is time without waiting
    for other ranks. Times are in seconds per step.
    """

    rank: int
    host: str
    times: float
    """Own time of the rank, as a multiple of the median of all ranks."""
    compute: float
    data: float
    sending: float
    waiting: float

    def __str__(self) -> str:
        total = self.compute + self.data + self.sending + self.waiting
        names = ("compute", "data", "sending", "waiting")
        shares = ", ".join(f"{name} {getattr(self, name) / total:.0%}" for name in names)
        return (
            f"Rank {self.rank} (host {self.host}) is {self.times:.1f} times as slow as the median of the ranks. Its "
            f"time per step: {shares}."
        )


def find_stragglers(before: Mapping[int, RankRecord], after: Mapping[int, RankRecord]) -> list[Straggler]:
    """Find the stragglers between two readings of the records. The list is empty if there is only one rank, or if fewer
    than `_LEAST_STEPS` steps lie between the readings.
    """
    found = [_shares(before[rank], after[rank]) for rank in sorted(before.keys() & after.keys())]
    shares = [share for share in found if share is not None]
    if len(shares) < 2:
        return []
    usual = median(_own(share) for share in shares)
    return [share._replace(times=_own(share) / usual) for share in shares if _own(share) >= SLOW * usual > 0]


def _own(share: Straggler) -> float:
    return share.compute + share.data + share.sending


def _shares(before: RankRecord, after: RankRecord) -> Straggler | None:
    """Return the times of a rank per step, or None if there were too few steps. Validation passes and checkpoints do
    not count.
    """

    def spent(word: int) -> float:
        return (after.words[word] - before.words[word]) / 1e9 / steps

    steps = after.words[RecordWord.STEPS] - before.words[RecordWord.STEPS]
    if steps < _LEAST_STEPS:
        return None
    data, *rest = (spent(RecordWord.SPENT + phase) for phase in RunPhase if RunPhase.DATA <= phase <= RunPhase.RESULT)
    waiting, sending = spent(RecordWord.WAITED), spent(RecordWord.SENDING)
    return Straggler(after.rank, after.host, 1.0, max(0.0, sum(rest) - waiting - sending), data, sending, waiting)
