"""Equal parts of a step, which a dry run runs only once.

Tensors have no values, so most chunks of a loss are equal, and so are most micro-batches. In both cases, each part
after the first frees what the part before it has left. Only the first two parts and the last one run, and the FLOPs and
messages of the second part count for all parts in between.

Without this, a thousand chunks of a loss or hundreds of micro-batches take nearly all the time of a dry run.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from crosscut.model import Batch
from crosscut.parallel import CollectiveRecorder, cross_entropy
from crosscut.rehearsal.ledger import Ledger
from crosscut.training import step
from crosscut.training.watching.storages import replaced

_T = TypeVar("_T")

MOST_PARTS = 3
"""Number of parts that run: the first, the second and the last."""


@contextmanager
def equal_parts_once(ledger: Ledger, recorder: CollectiveRecorder) -> Iterator[None]:
    """Context under which equal chunks of a loss run once, and so do equal micro-batches if the layout has no pipeline.
    `ledger` and `recorder` count them as often as they would run.
    """

    def unequal(parts: Sequence[_T]) -> Iterator[_T]:
        if (skipped := len(parts) - MOST_PARTS) < 1:
            yield from parts
            return
        yield parts[0]
        flops, sent = ledger.flops, len(recorder.sent)
        yield parts[1]
        ledger.flops += skipped * (ledger.flops - flops)
        recorder.sent += skipped * recorder.sent[sent:]
        recorder.element_bytes += skipped * recorder.element_bytes[sent:]
        yield parts[-1]

    def starts(num_tokens: int, chunk: int) -> Iterable[int]:
        return unequal(range(0, num_tokens, chunk))

    def turns(micro_batches: Sequence[Batch]) -> Iterator[tuple[int, Batch]]:
        for index, batch in unequal(list(enumerate(micro_batches))):
            if index == 1:  # which stands for those that are left out, and holds their tensors, too
                for skipped in micro_batches[2:-1]:
                    _enter_like(ledger, skipped, micro_batches[0])
            yield index, batch

    with replaced(cross_entropy, starts_of_chunks=starts), replaced(step, in_turn=turns):
        yield


def _enter_like(ledger: Ledger, batch: Batch, other: Batch) -> None:
    for name, value in vars(batch).items():
        if isinstance(value, Tensor):
            ledger.enter_like(value, getattr(other, name))
