"""Write the report about a hang: the ranks that block the others, the messages that they have not started, and the
state of the other ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from crosscut.flight.analysis import Disagreement, Finding, Missing, find_causes
from crosscut.flight.places import place_name
from crosscut.flight.reading import (
    Process,
    RankMessage,
    RankRecord,
    RankStatus,
    is_here,
    outside_stack,
    process_of,
)
from crosscut.flight.record import MessageKind, RecordWord, RunPhase
from crosscut.flight.traces import (
    Traces,
    by_group,
    describe_collective,
    describe_trace,
    find_behind,
    find_differences,
    first_awaited,
)

_KINDS = {
    MessageKind.ALL_REDUCE: "all-reduce",
    MessageKind.REDUCE_SCATTER: "reduce-scatter",
    MessageKind.ALL_GATHER: "all-gather",
    MessageKind.ALL_TO_ALL: "all-to-all",
    MessageKind.SHIFT: "shift to the next rank",
    MessageKind.SEND: "message to the next stage",
    MessageKind.RECEIVE: "message from another stage",
    MessageKind.VOTE: "vote on stopping",
    MessageKind.OBJECTS: "exchange of Python values",
    MessageKind.BARRIER: "barrier",
}

PHASES = {
    RunPhase.START: "start of the run",
    RunPhase.DATA: "reading of a batch",
    RunPhase.FORWARD: "forward pass",
    RunPhase.BACKWARD: "backward pass",
    RunPhase.REDUCTION: "gradient reduction",
    RunPhase.OPTIMIZER: "optimizer step",
    RunPhase.RESULT: "wait for the result of a step",
    RunPhase.VALIDATION: "validation",
    RunPhase.EVALUATION: "evaluation",
    RunPhase.COMPARISON: "comparison of replicas",
    RunPhase.CHECKPOINT: "checkpoint",
    RunPhase.END: "end of the run",
}

_STATES = {
    Process.STOPPED: "is stopped (by SIGSTOP, a debugger or job control)",
    Process.GONE: "has ended",
    Process.BLOCKED: "is blocked in a system call that cannot be interrupted (a disk, a network disk or a device)",
    Process.RUNS: "runs, but its watching thread does not answer (perhaps a library holds Python's lock)",
    Process.UNKNOWN: "does not answer, and is on another machine or has left no record",
}

_MOST_RANKS = 8
"""Maximum number of ranks that a report describes in detail."""
_MOST_GROUPS = 16
"""Maximum number of process groups whose collectives a report lists."""


@dataclass(frozen=True)
class Hang:
    """State of a run that hangs or may hang, as seen by one process."""

    seconds: float
    """Time without progress, in seconds."""
    bound: float
    """Time without progress after which a run counts as hanging, in seconds. 0 if the run makes progress."""
    records: Mapping[int, RankRecord]
    statuses: Mapping[int, RankStatus]
    """Statuses of the ranks that answer, keyed by rank."""
    silent: Mapping[int, Process]
    """State of the process of each rank that does not answer, keyed by rank."""
    finding: Finding
    outside: Mapping[int, str] = field(default_factory=dict)
    """Python stacks of ranks that do not answer, read from outside the process, keyed by rank."""
    traces: Traces = field(default_factory=dict)
    """Traces from PyTorch's Flight Recorder of the ranks that answer, keyed by rank."""

    @property
    def step(self) -> int:
        """Step in which the run hangs, counted from 1."""
        return 1 + min((record.step for record in self.records.values()), default=0)

    @property
    def cause(self) -> int:
        """First rank that blocks the others, or -1 if no rank can be named."""
        return self.finding.causes[0] if self.finding.causes else -1


def examine(
    records: Mapping[int, RankRecord],
    statuses: Mapping[int, RankStatus],
    traces: Traces | None = None,
    *,
    seconds: float,
    bound: float = 0.0,
) -> Hang:
    """Find out which ranks block the others. A rank counts as not answering if it has no status, or if its process is
    stopped or gone, even if it wrote a status before.

    If no rank waits according to the records, the ranks may wait for collectives that only PyTorch's Flight Recorder
    has, such as the collectives of compiled code. The result is then taken from `traces`.
    """
    traces = {rank: found for rank, found in (traces or {}).items() if rank in records}
    silent = {}
    for rank, record in records.items():
        process = process_of(record)
        if rank not in statuses or process in (Process.STOPPED, Process.GONE):
            silent[rank] = process
    there = [rank for rank, process in silent.items() if process is not Process.GONE]
    outside = {rank: outside_stack(records[rank]) for rank in there[:_MOST_RANKS]}
    finding = find_causes(records, silent)
    if not (finding.waiting or finding.disagreements or silent):
        causes, waiting = find_behind(traces)
        differing = {rank for found in find_differences(traces) for rank in (found.first, found.second)}
        causes = tuple(sorted(differing)) or causes
        finding = Finding(causes, (), waiting) if causes else finding
    return Hang(seconds, bound, records, statuses, silent, finding, outside, traces)


def describe(hang: Hang) -> str:
    """Return the report about a hang, as lines of text."""
    lines = [_title(hang)]
    for found in hang.finding.disagreements:
        lines += _disagreement(found)
    lines += _differences(hang.traces)
    for rank in hang.finding.causes[:_MOST_RANKS]:
        lines += _cause(hang, rank)
    if not hang.finding.causes:
        lines.append("No single rank can be named: all ranks have started the message that they wait for.")
    lines += _waiting(hang)
    lines += _traces(hang)
    lines += _stacks(hang)
    return "\n".join(lines) + "\n"


def _title(hang: Hang) -> str:
    if not hang.bound:
        return (
            f"The run is making progress, most recently {hang.seconds:.1f} s ago, in step {hang.step}. A rank that has "
            "not arrived may arrive at any moment."
        )
    return f"The run has made no progress for {hang.seconds:.0f} s (bound: {hang.bound:.0f} s), in step {hang.step}."


def _who(record: RankRecord) -> str:
    return f"rank {record.rank} (host {record.host}, process {record.pid})"


def _where(phase: RunPhase, place: int, step: int) -> str:
    name = place_name(place)
    return f"{PHASES[phase]}{f' of {name}' if name else ''}, step {step + 1}"


def _cause(hang: Hang, rank: int) -> list[str]:
    """Write the lines about a rank that blocks the others."""
    record = hang.records.get(rank)
    if record is None:
        return [f"DID NOT ARRIVE: rank {rank}, which has left no record."]
    told = ["", f"DID NOT ARRIVE: {_who(record)}", f"  position   {_where(record.phase, record.place, record.step)}"]
    if rank in hang.silent:
        told.append(f"  process    {_STATES[hang.silent[rank]]}")
    elif record.awaited is None:
        told.append(f"  process    runs, and waits for {_open_collective(hang, rank) or 'no message'}")
    told += [f"  missing    {_missing(found)}" for found in hang.finding.missing if found.rank == rank]
    return told


def _missing(found: Missing) -> str:
    return f"{_message(found.message)}; waiting: {_listed(found.waiting)}"


def _message(message: RankMessage) -> str:
    """Describe a message."""
    size = f" of {message.elements:,} elements" if message.elements else ""
    place = f" ({_where(message.phase, message.place, message.step)})"
    return f"{_KINDS[message.kind]}{size} over the axis `{message.axis}`{place}, number {message.count} of its group"


def _disagreement(found: Disagreement) -> list[str]:
    return [
        "",
        f"THE RANKS DISAGREE: ranks {found.first} and {found.second} wait for each other with different messages.",
        f"  rank {found.first}: {_message(found.first_message)}",
        f"  rank {found.second}: {_message(found.second_message)}",
    ]


def _differences(traces: Traces) -> list[str]:
    """Write the lines about collectives in which ranks differ, according to PyTorch's Flight Recorder."""
    lines = []
    for found in find_differences(traces):
        who, group = f"ranks {found.first} and {found.second}", found.trace.group
        what = f"have started different collectives in group `{group}` (PyTorch's Flight Recorder)."
        lines += ["", f"THE RANKS DISAGREE: {who} {what}"]
        for rank, one in ((found.first, found.first_collective), (found.second, found.second_collective)):
            lines.append(f"  rank {rank}: {describe_collective(one)}, {one.state}")
    return lines


def _traces(hang: Hang) -> list[str]:
    """Write the lines about the last collectives of each group in PyTorch's Flight Recorder."""
    groups = by_group(hang.traces)
    axes = {name: group.axis for record in hang.records.values() for name, group in record.groups.items()}
    lines = ["", "PYTORCH'S FLIGHT RECORDER"] if groups else []
    for members in groups[:_MOST_GROUPS]:
        trace = next(iter(members.values()))
        axis = f"axis `{axes[trace.group]}`" if trace.group in axes else f"description `{trace.description}`"
        lines.append(f"  group `{trace.group}` ({axis}, {trace.backend})")
        alike: dict[str, list[int]] = {}
        for rank, own in members.items():
            alike.setdefault(describe_trace(own, first_awaited(members.values())), []).append(rank)
        for rank in sorted(set(trace.ranks) - set(members)):
            text = "has started no collective" if rank in hang.traces else "does not answer"
            alike.setdefault(text, []).append(rank)
        lines += [f"    {_listed(tuple(ranks))}: {text}" for text, ranks in alike.items()]
    more = len(groups) - _MOST_GROUPS
    return [*lines, f"  and {more} more groups"] if more > 0 else lines


def _waiting(hang: Hang) -> list[str]:
    """Write the lines about the ranks that wait."""
    shown = [hang.records[rank] for rank in hang.finding.waiting]
    if not shown:
        return []
    lines = ["", f"WAITING: {_listed(hang.finding.waiting)}"]
    for record in shown[:_MOST_RANKS]:
        awaited = f"the {_message(record.awaited)}" if record.awaited else _open_collective(hang, record.rank)
        lines.append(f"  {_who(record)} for {awaited or 'its GPU'}")
    return lines


def _open_collective(hang: Hang, rank: int) -> str:
    """Describe the first collective that a rank has not completed, according to PyTorch's Flight Recorder. Empty if
    there is none.
    """
    for trace in hang.traces.get(rank, ()):
        if trace.open is not None:
            return f"collective {describe_collective(trace.open)} of group `{trace.group}`"
    return ""


def _stacks(hang: Hang) -> list[str]:
    """Return lines with the Python stacks of the ranks that cause the hang and of one waiting rank."""
    ranks = [*hang.finding.causes[:_MOST_RANKS], *hang.finding.waiting[:1]]
    lines: list[str] = []
    for rank in ranks:
        stacks: Mapping[str, str] = {}
        if rank not in hang.silent and rank in hang.statuses:
            stacks = hang.statuses[rank].stacks
        elif rank in hang.silent and (stack := hang.outside.get(rank)):
            stacks = {"by py-spy": stack}
        for thread, stack in stacks.items():
            lines += ["", f"PYTHON STACK of rank {rank}, {thread}:"]
            lines += [f"  {line}" for line in stack.splitlines()]
    return lines


def _listed(ranks: tuple[int, ...]) -> str:
    """Ranks as text, such as "rank 3" or "ranks 0 to 2 and 5"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def seconds_without_progress(records: Mapping[int, RankRecord], now: int) -> float:
    """Return the seconds since any rank on this machine last made progress, or 0 if no rank is on this machine. `now`
    is a time in nanoseconds on the monotonic clock.
    """
    times = [record.since(RecordWord.PROGRESS_AT, now) for record in records.values() if is_here(record)]
    return min(times, default=0.0)
