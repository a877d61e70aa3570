"""Collectives that PyTorch's Flight Recorder has recorded, group by group.

PyTorch's recorder also has the collectives of compiled code and of libraries, which Crosscut's own record does not
have. During a hang, each rank reads its own recorder as JSON and writes a summary for the other ranks. PyTorch can also
write the recorder's content to files, as pickles. Crosscut never reads these files, because a pickle can run code.

The members of a process group must start the same collectives under the same numbers. A rank is *behind* if it has not
started a collective that another rank waits for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from math import prod
from typing import Any, NamedTuple

from crosscut.config.system.files import parse_json
from crosscut.config.system.records import from_json

_BEFORE, _AFTER = 4, 12
"""Numbers of collectives that a summary keeps: before the first collective that is not completed, and from that
collective on."""
_ALIKE = ("all_reduce", "allreduce", "reduce", "all_gather", "allgather", "broadcast")
"""Prefixes of the names of collectives in which all members send the same number of elements."""


class CollectiveState(StrEnum):
    """State of a collective in PyTorch's recorder."""

    SCHEDULED = "scheduled"
    STARTED = "started"
    COMPLETED = "completed"


SCHEDULED, STARTED, COMPLETED = CollectiveState

Sizes = tuple[tuple[int, ...], ...]


class RecordedCollective(NamedTuple):
    """Collective that one rank has scheduled."""

    number: int
    """Sequence number in the process group."""
    name: str
    """Name in PyTorch, such as "all_reduce"."""
    inputs: Sizes
    outputs: Sizes
    types: tuple[str, ...]
    """Element type of each input, or of each output if there are no inputs."""
    state: CollectiveState

    @property
    def tensors(self) -> Sizes:
        """Sizes of the inputs, or of the outputs if the rank only receives."""
        return self.inputs or self.outputs


class Trace(NamedTuple):
    """Collectives of one rank in one process group, in order."""

    group: str
    description: str
    backend: str
    ranks: tuple[int, ...]
    """Members of the group. Empty if they are unknown."""
    collectives: tuple[RecordedCollective, ...]

    @property
    def open(self) -> RecordedCollective | None:
        """First collective that is not completed."""
        return next((one for one in self.collectives if one.state != COMPLETED), None)

    @property
    def last(self) -> int:
        """Number of the last collective that the rank has scheduled."""
        return self.collectives[-1].number

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        """Key that identifies the group. The name alone does not suffice, because groups of different ranks may have
        the same name.
        """
        return self.group, self.backend, self.ranks


Traces = Mapping[int, Sequence[Trace]]
"""Traces of the ranks that have answered, keyed by rank. A rank has one trace for each of its groups."""


class Difference(NamedTuple):
    """Two ranks that have started different collectives under the same number."""

    trace: Trace
    first: int
    first_collective: RecordedCollective
    second: int
    second_collective: RecordedCollective


def read_dump(dump: str | bytes, ranks_of: Callable[[str], Sequence[int]], since: int = 0) -> list[Trace]:
    """Read the JSON dump of PyTorch's recorder in this process. `ranks_of` returns the members of a group. Sends and
    receives are left out. Collectives from before `since`, a time in nanoseconds since 1970, are left out too, because
    they may belong to an earlier group with the same name. Raises `ValueError` if the dump has another form.
    """
    found: dict[tuple[str, str, str], dict[int, RecordedCollective]] = {}
    try:
        for entry in parse_json(dump).get("entries", []):
            if not entry["is_p2p"] and entry["time_created_ns"] >= since:
                name, description = entry["process_group"]
                backend, _, operation = entry["profiling_name"].rpartition(":")
                one = _collective(entry, operation)
                found.setdefault((name, description, backend), {})[one.number] = one
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the dump does not have the form of PyTorch's Flight Recorder: {error!r}") from error
    return [
        Trace(name, description, backend, tuple(ranks_of(name)), _shortened(list(collectives.values())))
        for (name, description, backend), collectives in found.items()
    ]


def _collective(entry: Mapping[str, Any], name: str) -> RecordedCollective:
    """Read the collective of an entry. A retired entry counts as completed, because Gloo never reports a collective as
    completed.
    """
    inputs, outputs = (tuple(map(tuple, entry[f"{end}_sizes"])) for end in ("input", "output"))
    types = tuple(entry["input_dtypes"] or entry["output_dtypes"])
    state = COMPLETED if entry["retired"] else CollectiveState(entry["state"])
    return RecordedCollective(entry["collective_seq_id"], name, inputs, outputs, types, state)


def _shortened(collectives: list[RecordedCollective]) -> tuple[RecordedCollective, ...]:
    """Keep only the collectives around the first one that is not completed, and the last collective."""
    places = (place for place, one in enumerate(collectives) if one.state != COMPLETED)
    first = next(places, len(collectives))
    kept = collectives[max(0, first - _BEFORE) : first + _AFTER]
    return tuple(kept if kept[-1] is collectives[-1] else [*kept, collectives[-1]])


def parse_traces(value: object) -> list[Trace]:
    """Read the traces of another rank from JSON. Raises `ValueError` if the value has another form."""
    traces = from_json(list[Trace], value)
    if not all(trace.collectives for trace in traces):
        raise ValueError("a trace has no collectives")
    return traces


def by_group(traces: Traces) -> list[dict[int, Trace]]:
    """Sort traces into process groups. Returns one dictionary for each group, with the group's traces keyed by rank.
    Groups with collectives that are not completed come first.
    """
    groups: dict[tuple[str, str, tuple[int, ...]], dict[int, Trace]] = {}
    for rank in sorted(traces):
        for trace in traces[rank]:
            groups.setdefault(trace.key, {})[rank] = trace
    return sorted(groups.values(), key=lambda members: all(trace.open is None for trace in members.values()))


def find_differences(traces: Traces) -> list[Difference]:
    """Find the first collective of each group that two ranks have started differently."""
    found = (next(_differences(members), None) for members in by_group(traces))
    return [difference for difference in found if difference is not None]


def _differences(members: Mapping[int, Trace]) -> Iterator[Difference]:
    """Yield, in order, each collective of a rank that differs from the first rank's collective with the same number."""
    numbered: dict[int, list[tuple[int, RecordedCollective]]] = {}
    for rank, trace in members.items():
        for one in trace.collectives:
            numbered.setdefault(one.number, []).append((rank, one))
    for number in sorted(numbered):
        first, mine = numbered[number][0]
        for second, theirs in numbered[number][1:]:
            if not _agree(mine, theirs):
                yield Difference(members[first], first, mine, second, theirs)


def _agree(first: RecordedCollective, second: RecordedCollective) -> bool:
    if first.name != second.name:
        return False
    if not first.name.lstrip("_").startswith(_ALIKE) or not (first.inputs and second.inputs):
        return True
    return first.types == second.types and _elements(first.inputs) == _elements(second.inputs)


def _elements(sizes: Sizes) -> int:
    return sum(map(prod, sizes))


def find_behind(traces: Traces) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find two sets of ranks: ranks that are behind but do not wait for any rank themselves, and ranks that wait."""
    blockers: dict[int, set[int]] = {rank: set() for rank in traces}
    for members in by_group(traces):
        for rank, trace in members.items():
            if trace.open is not None:
                others = [other for other in trace.ranks or members if other != rank and other in traces]
                blockers[rank] |= {other for other in others if not _has_started(members, other, trace.open.number)}
    causes = {rank for behind in blockers.values() for rank in behind if not blockers[rank]}
    return tuple(sorted(causes)), tuple(sorted(rank for rank, behind in blockers.items() if behind))


def _has_started(members: Mapping[int, Trace], rank: int, number: int) -> bool:
    return rank in members and members[rank].last >= number


def describe_trace(trace: Trace, awaited: int) -> str:
    """Describe the last completed, started and scheduled collectives of a trace. `awaited` is the number of the first
    collective that any rank of the group waits for, or 0 if no rank waits.
    """
    texts = []
    for state in (COMPLETED, STARTED, SCHEDULED):
        of_state = [one for one in trace.collectives if one.state == state]
        first, last = of_state[:1], of_state[-1:]
        shown = last if state == COMPLETED or first == last else [*first, *last]
        if shown:
            texts.append(f"{state} {' to '.join(map(describe_collective, shown))}")
    if trace.last < awaited:
        texts.append(f"has not scheduled {awaited}")
    return "; ".join(texts)


def describe_collective(collective: RecordedCollective) -> str:
    """Describe a collective by number, name, element types and sizes, such as "10 (all_reduce, Float [4, 8])"."""
    pairs = list(zip(collective.types, collective.tensors, strict=False))
    tensors = [f"{kind} {list(sizes)}" for kind, sizes in pairs[:2]]
    more = [f"{len(pairs) - 2} more tensors"] if len(pairs) > 2 else []
    return f"{collective.number} ({', '.join([collective.name, *tensors, *more])})"


def first_awaited(members: Iterable[Trace]) -> int:
    """Number of the first collective of a group that some rank has not completed, or 0 if there is none."""
    return min((trace.open.number for trace in members if trace.open is not None), default=0)
