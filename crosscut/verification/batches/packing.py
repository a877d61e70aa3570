"""Check that packed documents give the same results as the same documents in separate sequences.

With `training.document_mask`, a sequence holds several documents that do not attend to each other. The check runs the
cut model on packed sequences, and again on one sequence per document, without the mask and with ordinary positions.
Both runs must have the same loss and the same gradients. Plain Python code here cuts out the documents. It shares
nothing with the code that finds documents during training.

Shapes: B sequences, S tokens per sequence, D documents per sequence.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from crosscut.config import IGNORED
from crosscut.model import Batch
from crosscut.training.speed.compilation import uncompiled
from crosscut.training.step import Trainer
from crosscut.verification.comparison import FLOOR, check_of_largest, relative_difference
from crosscut.verification.report import DOCUMENTS, ReportCheck
from crosscut.verification.watching import gradients_of

MOST_DOCUMENTS = 4
"""Maximum number of documents in a verified sequence."""


def pack(tokens: Tensor, *, end_of_text: int, num_free: int, generator: torch.Generator) -> None:
    """Write end-of-text tokens into `tokens` [B, S + 1], in place, so that every sequence has D documents of random
    lengths.

    D is `MOST_DOCUMENTS`, or fewer if a sequence is too short. End-of-text tokens that `tokens` already holds are first
    replaced by another token. The new end-of-text tokens are written only to the positions 1 to `num_free` of a
    sequence.
    """
    tokens[tokens == end_of_text] = end_of_text - 1 if end_of_text else 1
    num_borders = max(min(MOST_DOCUMENTS - 1, num_free), 0)
    for row in tokens:
        row[1 + torch.randperm(max(num_free, 0), generator=generator)[:num_borders]] = end_of_text


def separated(batch: Batch, *, end_of_text: int) -> list[Batch]:
    """Return the documents of a packed batch as D batches of B sequences each. Each sequence holds one document and is
    filled up with padding: tokens without a target, of type 0, to which no token attends.
    """
    length = batch.tokens.shape[1]
    plain = {"tokens": 0, "targets": IGNORED, "segments": 0, "mask": False}
    stored = ("teacher", "teacher_ids")  # a token without a target has any of them
    given = {name: getattr(batch, name).tolist() for name in (*plain, *stored) if getattr(batch, name) is not None}
    fillings = {name: plain.get(name, values[0][0]) for name, values in given.items()}
    rows: dict[str, list[list[int]]] = {name: [] for name in given}
    for i, tokens in enumerate(given["tokens"]):
        starts = [0, *(place for place in range(1, length) if tokens[place] == end_of_text), length]
        for start, stop in pairwise(starts):
            for name, values in given.items():
                rows[name].append([*values[i][start:stop], *[fillings[name]] * (length - stop + start)])
    like = {name: getattr(batch, name) for name in rows}
    parts = {name: torch.tensor(x, dtype=like[name].dtype, device=like[name].device) for name, x in rows.items()}
    return Batch(**parts).chunk(len(rows["tokens"]) // len(batch.tokens))


def compare_documents(
    trainer: Trainer, micro_batches: Sequence[Batch], *, end_of_text: int, tolerance: float
) -> list[ReportCheck]:
    """Compare packed sequences with the same documents in separate sequences. Check that both give the same loss and
    the same gradients. `micro_batches` are the packed micro-batches of this data rank. They hold whole sequences, of
    which this function takes the part of each context rank. Every rank must call this function. The list has one check
    on the first rank and is empty on the others.
    """
    apart = [part for batch in micro_batches for part in separated(batch, end_of_text=end_of_text)]
    with uncompiled(trainer.model):  # the shapes are as in training, but there is no mask
        expected_loss, expected = _loss_and_gradients(trainer, apart)
    loss, gradients = _loss_and_gradients(trainer, micro_batches)
    floor = FLOOR * max(float(gradient.abs().max()) for gradient in expected.values() if gradient.numel())
    found = {name: relative_difference(gradients[name], own, floor=floor) for name, own in expected.items()}
    found["the loss"] = relative_difference(loss, expected_loss)
    told = f"{len(apart) // len(micro_batches)} per sequence, against separate sequences"
    return check_of_largest(DOCUMENTS, found, tolerance, told)


def _loss_and_gradients(trainer: Trainer, batches: Sequence[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and this tensor rank's part of each gradient, gathered over the data ranks. Terms of the layers
    are left out: a loss that balances the loads of experts looks at a sequence, however many documents it holds.
    """
    trainer.optimizer.zero_grad()
    with trainer.model.without_layer_terms():
        parts = [batch.part_of_rank(trainer.mesh.context) for batch in batches]
        loss = trainer.summed(trainer.accumulate(0, parts))
    gradients = {name: kept.tensor for name, kept in gradients_of(trainer.model).items()}
    trainer.optimizer.zero_grad()
    return loss.detach().cpu(), gradients
