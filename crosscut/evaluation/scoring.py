"""Scoring of many windows by a model, on any layout.

Windows of similar length are batched, and the batches are distributed over the data ranks. Each rank writes its scores
to a table with a row for every window of all ranks. The sum of the tables over the ranks, computed once at the end, is
the complete table. Each window therefore counts once for any number of ranks, and sums over windows are computed in the
same order on every layout.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from crosscut.config import IGNORED, GenerationError
from crosscut.evaluation.perplexity import evaluating
from crosscut.evaluation.token_scores import score_tokens
from crosscut.evaluation.windows import Window
from crosscut.model import GPT, Batch
from crosscut.parallel.collectives import all_reduce

Ids = npt.NDArray[np.int64]

Rounds = Iterable[Sequence[int]]
"""Indices of the windows that a rank reads: one sequence per round. The rank reads the windows of a round in one batch.
"""

Follow = Callable[[Rounds], Rounds]
"""Generator function around the rounds of a rank: it yields each round that it receives, and can act before and after
the round. It can, for example, advance a progress bar, or end the scoring early."""


@dataclass(frozen=True, eq=False)
class MaskedTexts:
    """Texts with masked tokens. The window of a text is the whole text."""

    read: list[Ids]
    """Tokens that the model reads, one array per text."""
    targets: list[Ids]
    """Original token at each masked position, and `IGNORED` elsewhere, one array per text."""


class WindowScores(NamedTuple):
    """Scores of each window over the window's targets. All arrays have shape [windows]."""

    losses: npt.NDArray[np.float64]
    """Sum of the cross entropies, in nats."""
    hits: npt.NDArray[np.int64]
    """Number of targets that the model predicts as the likeliest token."""
    last_hits: npt.NDArray[np.int64]
    """1 if the model predicts the last target as the likeliest token, else 0."""


@torch.no_grad()
def score_windows(
    model: GPT, texts: Sequence[Ids] | MaskedTexts, windows: Sequence[Window], *, batch_size: int, follow: Follow = iter
) -> WindowScores:
    """Score the windows over `texts` without dropout. Every rank must call this function and gets the same result.

    The targets are the next tokens of a text, or its masked tokens.

    Each data or context rank reads `batch_size` windows at a time. The rank takes its rounds from the generator
    `follow(rounds)`, which can act before and after each round. Communication: the messages of the forward passes, and
    one all-reduce of three elements per window over `mesh.tokens`, the data and context axes. In a pipeline, also one
    all-reduce over the stages.
    """
    tokens, device = model.mesh.tokens, model.mesh.device  # context ranks read whole windows, like data ranks
    table = torch.zeros(len(windows), 3, dtype=torch.float64, device=device)
    lengths = [window.length for window in windows]
    with evaluating(model):
        for group in follow(rounds_of(lengths, batch_size, rank=tokens.rank, size=tokens.size)):
            batch, last = _batch(texts, [windows[i] for i in group])
            moved = batch.to_device(device)
            losses, hits = score_tokens(model, moved)
            rows = torch.arange(len(group), device=device)
            found = torch.stack([losses.double().sum(1)[rows], hits.sum(1)[rows], hits[rows, last.to(device)]], dim=1)
            table[torch.tensor(group, dtype=torch.long, device=device)] = found
    table = all_reduce(table, model.mesh.tokens)
    for axis in model.mesh.owners:  # only the last stage has scores
        table = all_reduce(table, axis)
    losses, hits, last_hits = table.cpu().unbind(1)
    return WindowScores(losses.numpy(), hits.long().numpy(), last_hits.long().numpy())


def require_numbers(name: str, values: Iterable[float]) -> None:
    """Raise `GenerationError` if a figure or a loss in `values` is NaN. `name` is the name of the task.

    An infinite loss is a valid result: the model gives the target the probability 0. NaN is not valid: the model's
    logits are NaN or contain positive infinity.
    """
    if any(map(math.isnan, values)):
        raise GenerationError(
            f"The losses of `{name}` must be numbers, but some are NaN, because the model's logits are not finite. "
            "The weights are damaged, or the precision cannot hold the numbers. Try --precision float32; check a "
            "checkpoint with `crosscut checkpoint verify`."
        )


def rounds_of(lengths: Sequence[int], batch_size: int, *, rank: int, size: int) -> list[list[int]]:
    """Return the indices of the windows or examples that the data rank `rank` of `size` ranks reads, round by round.
    `lengths` holds the number of tokens of each. All ranks have the same number of rounds, and the last round of a rank
    may be empty.

    The longest windows come first, so that a lack of memory shows at once.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    return [batches[i + rank] if i + rank < len(batches) else [] for i in range(0, len(batches), size)]


def _batch(texts: Sequence[Ids] | MaskedTexts, windows: Sequence[Window]) -> tuple[Batch, Tensor]:
    """Return the tokens and targets, padded at the end, and the position of each window's last target [B]. For texts
    with masked tokens, the batch also has a mask that is false for padding.

    A rank without windows in this round reads one token and scores nothing. All ranks that share layers then make the
    same collective calls.
    """
    size = (max(1, len(windows)), max((window.length for window in windows), default=1))
    tokens, targets = np.zeros(size, dtype=np.int64), np.full(size, IGNORED, dtype=np.int64)
    mask = torch.zeros(size, dtype=torch.bool) if isinstance(texts, MaskedTexts) else None
    for row, window in enumerate(windows):
        length = window.length
        if isinstance(texts, MaskedTexts):
            tokens[row, :length], targets[row, :length] = texts.read[window.text], texts.targets[window.text]
        else:
            text = texts[window.text]
            tokens[row, :length] = text[window.start : window.stop - 1]
            targets[row, length - window.num_targets : length] = text[window.first : window.stop]
        if mask is not None:
            mask[row, :length] = True
    last = torch.tensor([window.length - 1 for window in windows], dtype=torch.long)
    return Batch(tokens=torch.from_numpy(tokens), targets=torch.from_numpy(targets), mask=mask), last
