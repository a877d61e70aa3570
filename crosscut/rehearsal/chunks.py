"""Chunks of a loss that are equal, which a dry run runs only once.

A micro-batch of millions of tokens has a thousand chunks, which took nearly all the time of a dry run. Tensors have no
values, so all full chunks after the first are equal, and each of them frees what the chunk before it has left. Only the
first two chunks and the last one run, and the FLOPs and messages of the second chunk count for all chunks in between.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from crosscut.parallel import CollectiveRecorder, cross_entropy
from crosscut.rehearsal.ledger import Ledger


@contextmanager
def equal_chunks_once(ledger: Ledger, recorder: CollectiveRecorder) -> Iterator[None]:
    """Context under which equal chunks of a loss run once. `ledger` and `recorder` count them as often as they would
    run.
    """

    def starts(num_tokens: int, chunk: int) -> Iterable[int]:
        begins = range(0, num_tokens, chunk)
        if (skipped := len(begins) - 3) < 1:
            yield from begins
            return
        yield begins[0]
        flops, sent = ledger.flops, len(recorder.sent)
        yield begins[1]
        ledger.flops += skipped * (ledger.flops - flops)
        recorder.sent += skipped * recorder.sent[sent:]
        recorder.element_bytes += skipped * recorder.element_bytes[sent:]
        yield begins[-1]

    module: Any = cross_entropy
    whole, module.starts_of_chunks = module.starts_of_chunks, starts
    try:
        yield
    finally:
        module.starts_of_chunks = whole
