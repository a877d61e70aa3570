"""Messages between the stages of a pipeline: one-way channels between neighbouring ranks.

A stage sends its output to the next stage, and the gradient of its input to the stage before it. Each direction between
two ranks is a *channel* with a process group of its own. A channel delivers messages in the order in which they were
sent, so the receiver must take them in this order. `architecture.pipeline.simulate` checks that a schedule does so.

The groups are created together with the mesh, in the same order on all ranks. On GPUs, each group is also connected
immediately. Otherwise, NCCL would connect the two ranks of a group at their first message. Each of the two ranks would
then wait for the other one, which may be waiting for a third rank, so the pipeline could deadlock. NCCL also runs the
messages of a group one after another. If both directions shared a group, two ranks that both send first would wait for
each other forever. Gloo does not run messages in order, so such a program would work on CPUs and hang on GPUs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from crosscut.architecture.pipeline import Channel, Message, Pass
from crosscut.flight import RECORD, MessageKind


class Arriving:
    """Tensor that is on its way from another rank to this rank."""

    def __init__(self, buffer: Tensor, work: dist.Work) -> None:
        self._buffer, self._work = buffer, work

    def wait(self) -> Tensor:
        """Wait until the tensor has arrived, and return it."""
        _wait(self._work)
        return self._buffer


class Channels:
    """Channels of one rank to and from the other ranks of its pipeline."""

    def __init__(
        self, ranks: Sequence[int], groups: Mapping[Channel, dist.ProcessGroup], *, device: torch.device
    ) -> None:
        """`ranks` lists the ranks of the pipeline's processes in the whole run, in the order of the stages. `groups`
        maps each channel to or from this rank to the process group of the channel.
        """
        self.device = device
        self._ranks, self._groups = tuple(ranks), dict(groups)
        self._leaving: dict[Message, tuple[dist.Work, Tensor]] = {}

    @property
    def group_names(self) -> list[str]:
        """Names of the process groups of this rank's channels."""
        return [group.group_name for group in self._groups.values()]

    def send(self, message: Message, x: Tensor) -> None:
        """Start sending `x` to the receiver of `message`. `x` must not be changed before `release` or `finish`.

        The method returns immediately, unless an earlier `send` of the same message has not finished yet.
        """
        self.release([message])
        x, channel = x.contiguous(), message.channel
        self._leaving[message] = self._start(MessageKind.SEND, channel, x, dist.isend, channel.receiver), x

    def start_receiving(self, message: Message, shape: Sequence[int], dtype: torch.dtype) -> Arriving:
        """Start receiving the tensor of `message`. Call this method for the messages of a channel in the order in which
        the other rank sends them.
        """
        buffer = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        channel = message.channel
        return Arriving(buffer, self._start(MessageKind.RECEIVE, channel, buffer, dist.irecv, channel.sender))

    def release(self, messages: Iterable[Message]) -> None:
        """Wait until the tensors of these messages may be changed or freed. Without this call, all tensors that the
        rank sends in a step stay in memory until `finish`, because gloo does not report the end of a message until the
        rank waits for it.
        """
        for message in messages:
            if (leaving := self._leaving.pop(message, None)) is not None:
                _wait(leaving[0])

    def finish(self) -> None:
        """Wait until all sent tensors may be changed or freed."""
        self.release(list(self._leaving))

    def _start(
        self, kind: MessageKind, channel: Channel, x: Tensor, start: Callable[..., dist.Work | None], place: int
    ) -> dist.Work:
        """Start a message of `x` with `start`, to or from the rank at `place` of the pipeline, and record it."""
        process_group, number = self._groups[channel], 0
        if RECORD.is_open:
            axis = f"pipeline ({channel.kind.name.lower()})"
            ends = channel.sender, channel.receiver
            group = RECORD.group(process_group.group_name, axis, lambda _: [self._ranks[end] for end in ends])
            number = RECORD.start(kind, group, x.numel())
        work = start(x, self._ranks[place], group=process_group)
        assert work is not None, "this rank is in the group"
        if number:
            RECORD.started(number, id(work))
        return work


def _wait(work: dist.Work) -> None:
    """Wait for a message, and record the wait."""
    if not RECORD.is_open:
        work.wait()
        return
    number = RECORD.wait(id(work))
    work.wait()
    RECORD.waited(number)


def channels_of(num_ranks: int, *, is_ring: bool) -> list[Channel]:
    """Return the channels of a pipeline of `num_ranks` ranks: forward and backward between neighbours. With `is_ring`,
    the last rank and the first rank are also neighbours. A pipeline with several stages per rank needs this.
    """
    pairs = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks if is_ring else num_ranks - 1)]
    forward = [Channel(first, second, Pass.FORWARD) for first, second in pairs]
    return [*forward, *(Channel(second, first, Pass.BACKWARD) for first, second in pairs)]


def make_channels(lines: Sequence[Sequence[int]], *, is_ring: bool, device: torch.device) -> Channels:
    """Create the channels of all pipelines, and return the channels of this rank. `lines` lists the processes of each
    pipeline. Every process must call this function with the same `lines`.
    """
    rank, own, own_line = dist.get_rank(), {}, tuple(lines[0])
    for line in lines:
        for channel in channels_of(len(line), is_ring=is_ring):
            members = [line[channel.sender], line[channel.receiver]]
            group = dist.new_group(members)
            if rank in members:
                own[channel], own_line = group, tuple(line)
                if device.type == "cuda":  # connects the group
                    dist.all_reduce(torch.zeros(1, device=device), group=group)
    return Channels(own_line, own, device=device)


def make_ends(lines: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """For each pipeline, create a process group of its first and its last process. Return the group of this process, or
    None if this process is neither the first nor the last of its pipeline. `lines` lists the processes of each
    pipeline. Every process must call this function with the same `lines`.
    """
    own = None
    for line in lines:
        group = dist.new_group([line[0], line[-1]])
        own = group if dist.get_rank() in (line[0], line[-1]) else own
    return own
