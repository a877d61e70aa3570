"""Find the ranks that block all others, from the records of all ranks.

Rank A is blocked by rank B if A waits for a message of a group that has both ranks, and B has not started this message.
B may itself be blocked by another rank, so the search follows the chain of blocked ranks to the ranks that wait for no
other rank: the *causes*. Two members of a group *disagree* if their n-th messages in the group differ. Each of the two
then waits for a message that the other never starts. Ranks that block each other in a circle also disagree.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from crosscut.flight.reading import Process, RankMessage, RankRecord
from crosscut.flight.record import STARTING, MessageKind

MOST_CAUSES = 64
"""Maximum number of causes whose missing messages are looked for."""


class Missing(NamedTuple):
    """Message that `rank` has not started, although other ranks wait for it."""

    rank: int
    message: RankMessage
    """The message as recorded by a waiting rank."""
    waiting: tuple[int, ...]
    """Ranks that wait for `rank` to start the message."""


class Disagreement(NamedTuple):
    """Two ranks that wait for each other, each in a different message."""

    first: int
    first_message: RankMessage
    second: int
    second_message: RankMessage


@dataclass(frozen=True)
class Finding:
    """Result of the search for the ranks that block all others."""

    causes: tuple[int, ...]
    """Ranks that block all others. If some ranks do not answer, they are the causes. Otherwise, the causes are the
    ranks that disagree or, if none disagree, the ranks that block others and wait for no rank. Empty if no rank can be
    named."""
    missing: tuple[Missing, ...]
    """Messages that the first `MOST_CAUSES` causes have not started and that other ranks wait for."""
    waiting: tuple[int, ...]
    """Ranks that wait for another rank."""
    disagreements: tuple[Disagreement, ...] = ()


def find_causes(records: Mapping[int, RankRecord], silent: Mapping[int, Process]) -> Finding:
    """Find the ranks that block all others. `records` are the records of all ranks, keyed by rank. `silent` holds the
    ranks whose watching thread does not answer, each with the state of its process.
    """
    world_size = max((record.world_size for record in records.values()), default=0)
    lost = {rank: silent.get(rank, Process.UNKNOWN) for rank in range(world_size) if rank not in records}
    silent = {**silent, **lost}
    awaited = {rank: message for rank, record in records.items() if (message := _awaited(record, records)) is not None}
    blockers = {rank: _blockers(rank, message, records, silent) for rank, message in awaited.items()}
    disagreements = _different_calls(awaited, records)
    causes = set(silent) or _roots(blockers, records, awaited)
    if not causes and not disagreements:
        disagreements = _circle(blockers, awaited)
    if disagreements and not silent:
        causes = {rank for found in disagreements for rank in (found.first, found.second)}
    missing = (_missing(cause, awaited, blockers, records) for cause in sorted(causes)[:MOST_CAUSES])
    waiting = tuple(sorted(rank for rank in records if rank not in causes and (rank in awaited)))
    return Finding(
        causes=tuple(sorted(causes)),
        missing=tuple(found for found in missing if found is not None),
        waiting=waiting,
        disagreements=disagreements,
    )


def _awaited(record: RankRecord, records: Mapping[int, RankRecord]) -> RankMessage | None:
    """Return the message that a rank waits for, or None.

    A process with a GPU rarely waits for a message itself, because the GPU waits. The function then returns the rank's
    first message that another member of the message's group has not started.
    """
    if not record.waits_for_device or record.awaited is not None:
        return record.awaited
    for message in sorted(record.messages.values()):
        others = _others(record, message, records)
        if any(_started(records[other], message.group) < message.count for other in others):
            return message
    return None


def _others(record: RankRecord, message: RankMessage, records: Mapping[int, RankRecord]) -> list[int]:
    """Return the other members of a message's group that have a record. A group may have many more members than there
    are records, so the function runs through the shorter of the two.
    """
    ranks = record.groups[message.group].ranks
    if len(ranks) <= len(records):
        return [other for other in ranks if other in records and other != record.rank]
    return [other for other in records if other in ranks and other != record.rank]


def _started(record: RankRecord, group: str) -> int:
    """Number of messages that a rank has started in a group, or 0 if the rank has not used the group yet."""
    return record.groups[group].started if group in record.groups else 0


def _blockers(
    rank: int, message: RankMessage, records: Mapping[int, RankRecord], silent: Mapping[int, Process]
) -> set[int]:
    """Find the ranks with a record that `rank` waits for: members of the message's group that have not started the
    message. If all members have a record and have started it, the silent members count, because a member may have
    started the message and then stopped.
    """
    record = records[rank]
    others = _others(record, message, records)
    behind = {other for other in others if _started(records[other], message.group) < message.count}
    has_unseen = len(others) < len(record.groups[message.group].ranks) - 1
    return behind if behind or has_unseen else set(others) & set(silent)


def _roots(
    blockers: Mapping[int, set[int]], records: Mapping[int, RankRecord], awaited: Mapping[int, RankMessage]
) -> set[int]:
    """Find the ranks at the ends of the chains: ranks that block another rank but do not wait for any rank. If no rank
    waits, every rank is a cause.
    """
    if not awaited:
        return set(records)
    blocking = set().union(*blockers.values())
    return {rank for rank in blocking if not blockers.get(rank) and rank not in awaited}


def _missing(
    cause: int, awaited: Mapping[int, RankMessage], blockers: Mapping[int, set[int]], records: Mapping[int, RankRecord]
) -> Missing | None:
    """Find the first message that other ranks wait for because `cause` has not started it. A cause without a record
    blocks all ranks that wait in one of its groups.
    """
    if cause in records:
        blocked = {rank: awaited[rank] for rank, by in blockers.items() if cause in by}
    else:
        blocked = {rank: one for rank, one in awaited.items() if cause in records[rank].groups[one.group].ranks}
    if not blocked:
        return None
    first = min(blocked.values(), key=lambda message: (message.step, message.number))
    alike = (first.group, first.count)
    return Missing(cause, first, tuple(sorted(r for r, m in blocked.items() if (m.group, m.count) == alike)))


def _different_calls(awaited: Mapping[int, RankMessage], records: Mapping[int, RankRecord]) -> tuple[Disagreement, ...]:
    """Find pairs of ranks whose n-th message of the same group has different kinds or different numbers of elements."""
    found: list[Disagreement] = []
    for rank, mine in awaited.items():
        for other in sorted(_others(records[rank], mine, records)):
            theirs = records[other].message(mine.group, mine.count)
            if theirs is None or theirs.state == STARTING or _agree(mine, theirs):
                continue
            if not any({rank, other} == {pair.first, pair.second} for pair in found):
                found.append(Disagreement(rank, mine, other, theirs))
    return tuple(found)


def _agree(first: RankMessage, second: RankMessage) -> bool:
    kinds = {first.kind, second.kind}
    if first.kind is MessageKind.OBJECTS:  # pickled values may have different lengths
        return second.kind is MessageKind.OBJECTS
    return first.elements == second.elements and (len(kinds) == 1 or kinds == {MessageKind.SEND, MessageKind.RECEIVE})


def _circle(blockers: Mapping[int, set[int]], awaited: Mapping[int, RankMessage]) -> tuple[Disagreement, ...]:
    """Find a circle of ranks that block each other, and return its first two ranks as a disagreement. The result is
    empty if there is no circle.
    """
    for start in sorted(blockers):
        rank, path = start, [start]
        while nexts := sorted(blockers.get(rank, ())):
            rank = nexts[0]
            if rank == start:
                other = path[1]
                return (Disagreement(start, awaited[start], other, awaited[other]),)
            if rank in path or rank not in awaited:
                break
            path.append(rank)
    return ()
