"""Compute the outputs of a model for the encoded examples of a task, on any layout.

Examples of similar length are read together, and the batches are distributed over the data ranks. Each rank writes its
outputs to a table for all examples, and the sum of the tables over the ranks is the complete table.

Shapes: E examples, C classes or options, T tokens of all rows, B examples of a batch, S tokens of its longest row.
"""

import numpy as np
import torch
from torch import Tensor

from crosscut.architecture import describe
from crosscut.config.parts.head import HeadKind
from crosscut.evaluation.perplexity import evaluating
from crosscut.evaluation.scoring import Follow, rounds_of
from crosscut.finetuning.downstream.batches import MULTIPLE
from crosscut.finetuning.downstream.predictions import Outputs
from crosscut.finetuning.encoding.rows import EncodedRows
from crosscut.model import GPT, Batch
from crosscut.parallel.collectives import all_reduce
from crosscut.training.speed.compilation import uncompiled


@torch.no_grad()
def task_outputs(model: GPT, rows: EncodedRows, *, batch_size: int, padding: int, follow: Follow = iter) -> Outputs:
    """Return the logits of a task, computed without dropout: [E, C], or [T, 2] for spans. Every rank must call this
    function and gets the same result.

    Each data rank reads `batch_size` examples at a time. `padding` is the token id that fills up short rows. A rank
    reads its examples in rounds, one batch per round. The generator function `follow` receives the rounds and yields
    them again; it can act before and after each round. Communication: the forward passes' collectives, and one
    all-reduce of the table over `mesh.tokens`, the data axis.
    """
    device, reader = model.mesh.device, model.mesh.reader
    reads = describe(model.config).reads(document_mask=False)
    table = torch.zeros(_shape(model, rows), dtype=torch.float64, device=device)
    lengths = rows.lengths.reshape(-1, rows.width).max(1).tolist()
    with evaluating(model), uncompiled(model):
        for group in follow(rounds_of(lengths, batch_size, rank=reader.rank, size=reader.size)):
            chosen = np.array(group or [-1], dtype=np.int64)  # a rank without examples makes the same calls
            length = min(rows.longest(chosen, multiple=MULTIPLE), model.config.max_sequence_length)
            batch = Batch.of(rows.padded(chosen, length=length, padding=padding), reads).to_device(device)
            logits = model.task_logits(batch, num_choices=rows.width)
            if group:
                _put(table, logits.double(), rows, chosen)
    found: Outputs = all_reduce(table, model.mesh.tokens).cpu().numpy()
    return found


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
