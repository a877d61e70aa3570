"""Ranks that compute more slowly than the others, from two readings of the records of all ranks.

In synchronous training, all ranks take the same time for a step, because fast ranks wait for slow ranks. The time of a
step in which a rank does not wait for messages tells them apart.
"""

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from crosscut.flight.reading import RankRecord
from crosscut.flight.record import Phase, Word

SLOW = 1.3
"""Multiple of the median from which a rank is a straggler."""
_LEAST_STEPS = 5
"""Minimum number of steps between the two readings."""


class Straggler(NamedTuple):
    """Rank that takes longer than the median of all ranks for its own part of a step. Times are in seconds per step."""

    rank: int
    host: str
    times: float
    """Own time of the rank, as a multiple of the median."""
    compute: float
    data: float
    sending: float
    waiting: float

    def __str__(self) -> str:
        total = self.compute + self.data + self.sending + self.waiting
        names = ("compute", "data", "sending", "waiting")
        shares = ", ".join(f"{name} {getattr(self, name) / total:.0%}" for name in names)
        return (
            f"Rank {self.rank} (host {self.host}) is {self.times:.1f} times as slow as the median of the ranks: its "
            f"steps are {shares}."
        )


def find_stragglers(before: Mapping[int, RankRecord], after: Mapping[int, RankRecord]) -> list[Straggler]:
    """Find the stragglers between two readings. Empty if there were fewer than `_LEAST_STEPS` steps, or one rank."""
    found = [_shares(before[rank], after[rank]) for rank in sorted(before.keys() & after.keys())]
    shares = [share for share in found if share is not None]
    if len(shares) < 2:
        return []
    usual = median(_own(share) for share in shares)
    return [share._replace(times=_own(share) / usual) for share in shares if _own(share) >= SLOW * usual > 0]


def _own(share: Straggler) -> float:
    return share.compute + share.data + share.sending


def _shares(before: RankRecord, after: RankRecord) -> Straggler | None:
    """Times of a rank per step; None if there were too few steps. Validations and checkpoints do not count."""

    def spent(word: int) -> float:
        return (after.words[word] - before.words[word]) / 1e9 / steps

    steps = after.words[Word.STEPS] - before.words[Word.STEPS]
    if steps < _LEAST_STEPS:
        return None
    data, *rest = (spent(Word.SPENT + phase) for phase in Phase if Phase.DATA <= phase <= Phase.RESULT)
    waiting, sending = spent(Word.WAITED), spent(Word.SENDING)
    return Straggler(after.rank, after.host, 1.0, max(0.0, sum(rest) - waiting - sending), data, sending, waiting)
