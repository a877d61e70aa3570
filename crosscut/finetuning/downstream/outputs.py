"""Compute the outputs of a model for the encoded examples of a task, on any layout.

Examples of similar length are read together, and the batches are distributed over the data ranks. Each rank writes its
outputs to a table for all examples, and the sum of the tables over the ranks is the complete table.

Shapes: E examples, C classes or options, T tokens of all rows, B examples of a batch, S tokens of its longest row.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from crosscut.config.model import HeadKind
from crosscut.finetuning.downstream.batches import MULTIPLE, to_batch
from crosscut.finetuning.downstream.predictions import Outputs
from crosscut.finetuning.encoding import EncodedRows
from crosscut.model import GPT
from crosscut.parallel import reshard
from crosscut.parallel.collectives import all_reduce
from crosscut.training.speed.compilation import uncompiled

Rounds = Iterable[Sequence[int]]
"""Indices of the examples that a rank reads: one sequence per round."""


@torch.no_grad()
def task_outputs(
    model: GPT, rows: EncodedRows, *, batch_size: int, padding: int, follow: Callable[[Rounds], Rounds] = iter
) -> Outputs:
    """Return the logits of a task, computed without dropout: [E, C], or [T, 2] for spans. Every rank must call this
    function and gets the same result.

    Each data rank reads `batch_size` examples at a time. `padding` is the token id that fills up short rows. A rank
    reads its examples in rounds, one batch per round. The generator function `follow` receives the rounds and yields
    them again; it can act before and after each round. Communication: the forward passes' collectives, and one
    all-reduce of the table over `mesh.tokens`, the data axis.
    """
    was_training, device = model.training, model.mesh.device
    model.eval()
    table = torch.zeros(_shape(model, rows), dtype=torch.float64, device=device)
    try:
        with uncompiled(model):
            for group in follow(rounds_of(rows, batch_size, rank=model.mesh.data.rank, size=model.mesh.data.size)):
                chosen = np.array(group or [-1], dtype=np.int64)  # a rank without examples makes the same calls
                length = min(rows.longest(chosen, multiple=MULTIPLE), model.config.max_sequence_length)
                batch = to_batch(rows.padded(chosen, length=length, padding=padding), model.config).to_device(device)
                tokens, _, context = batch.with_context()
                logits = model.task_logits(tokens, context._replace(labels=None), num_choices=rows.width)
                if group:
                    _put(table, logits.double(), rows, chosen)
    finally:
        reshard(model)
        model.train(was_training)
    found: Outputs = all_reduce(table, model.mesh.tokens).cpu().numpy()
    return found


def rounds_of(rows: EncodedRows, batch_size: int, *, rank: int, size: int) -> list[list[int]]:
    """Return the examples that the data rank `rank` of `size` ranks reads, round by round. All ranks have the same
    number of rounds. The longest examples come first, so that a lack of memory becomes apparent at once.
    """
    lengths = rows.lengths.reshape(-1, rows.width).max(1)
    order = np.argsort(-lengths, kind="stable").tolist()
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    return [batches[i + rank] if i + rank < len(batches) else [] for i in range(0, len(batches), size)]


def _shape(model: GPT, rows: EncodedRows) -> tuple[int, int]:
    if model.config.head is HeadKind.SPANS:
        return len(rows.ids), 2
    return rows.num_examples, model.config.num_classes or rows.width


def _put(table: Tensor, logits: Tensor, rows: EncodedRows, examples: "np.typing.NDArray[np.int64]") -> None:
    """Write the logits of some examples into the table. The logits of padding are left out."""
    if logits.dim() == 2:
        table[torch.from_numpy(examples).to(table.device)] = logits
        return
    for own, example in zip(logits, examples.tolist(), strict=True):
        place = rows.row(example)
        table[place] = own[: place.stop - place.start]
