"""Scores of many windows by a model at any layout.

Windows of about the same length are read together, and the batches go round the data ranks. Each rank keeps what it
finds in a table with a row for every window of all ranks; their sum, made once at the end, is the whole table. So each
window counts once, however many ranks there are, and sums over windows are made in one order on every layout.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from crosscut.config import IGNORED
from crosscut.evaluation.token_scores import score_tokens
from crosscut.evaluation.windows import Window
from crosscut.model import GPT, Batch
from crosscut.parallel import reshard
from crosscut.parallel.collectives import all_reduce

Ids = npt.NDArray[np.int64]

Rounds = Iterable[Sequence[int]]
"""Which windows a rank reads together, round by round."""

Follow = Callable[[Rounds], Rounds]
"""Goes along with the rounds of a rank, such as a progress bar, or a request to stop that ends them."""


class WindowScores(NamedTuple):
    """Scores of each window, over its targets."""

    losses: npt.NDArray[np.float64]
    """Sum of the cross entropies, in nats."""
    hits: npt.NDArray[np.int64]
    """Number of targets that are the model's likeliest token."""
    last_hits: npt.NDArray[np.int64]
    """1 where the last target is the model's likeliest token, else 0."""


@torch.no_grad()
def score_windows(
    model: GPT, texts: Sequence[Ids], windows: Sequence[Window], *, batch_size: int, follow: Follow = iter
) -> WindowScores:
    """Score the windows over `texts` without dropout; the same result on every rank, and every rank calls it.

    A data rank reads `batch_size` windows together. Communication: that of the forward passes, and one all-reduce of
    three elements a window over `mesh.tokens`, the data axis.
    """
    was_training = model.training
    model.eval()
    data, device = model.mesh.data, model.mesh.device
    table = torch.zeros(len(windows), 3, dtype=torch.float64, device=device)
    try:
        for group in follow(rounds_of(windows, batch_size, rank=data.rank, size=data.size)):
            batch, last = _batch(texts, [windows[i] for i in group])
            losses, hits = score_tokens(model, *batch.to_device(device).plain())
            rows = torch.arange(len(group), device=device)
            found = torch.stack([losses.double().sum(1)[rows], hits.sum(1)[rows], hits[rows, last.to(device)]], dim=1)
            table[torch.tensor(group, dtype=torch.long, device=device)] = found
    finally:
        reshard(model)
        model.train(was_training)
    losses, hits, last_hits = all_reduce(table, model.mesh.tokens).cpu().unbind(1)
    return WindowScores(losses.numpy(), hits.long().numpy(), last_hits.long().numpy())


def rounds_of(windows: Sequence[Window], batch_size: int, *, rank: int, size: int) -> list[list[int]]:
    """The windows that a data rank reads, round by round; as many rounds on every rank, the last one maybe empty.

    Longest windows first: what does not fit in memory is known at once.
    """
    order = sorted(range(len(windows)), key=lambda i: -windows[i].length)
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    return [batches[i + rank] if i + rank < len(batches) else [] for i in range(0, len(batches), size)]


def _batch(texts: Sequence[Ids], windows: Sequence[Window]) -> tuple[Batch, Tensor]:
    """Tokens and targets, filled up at their ends, and the place of each last target [B].

    A round without windows reads one token and scores nothing, so that ranks which share layers stay together.
    """
    size = (max(1, len(windows)), max((window.length for window in windows), default=1))
    tokens, targets = np.zeros(size, dtype=np.int64), np.full(size, IGNORED, dtype=np.int64)
    for row, window in enumerate(windows):
        text, length = texts[window.text], window.length
        tokens[row, :length] = text[window.start : window.stop - 1]
        targets[row, length - window.num_targets : length] = text[window.first : window.stop]
    last = torch.tensor([window.length - 1 for window in windows], dtype=torch.long)
    return Batch(tokens=torch.from_numpy(tokens), targets=torch.from_numpy(targets)), last
