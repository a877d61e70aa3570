"""Second implementation of the protocols, with `transformers`."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from crosscut.data import Tokenizer
from tests.pretrained.models import their_model


class Theirs:
    """Model in a Hugging Face folder, which scores one window or passage at a time. Texts end with `end_of_text`."""

    def __init__(self, folder: Path, end_of_text: int = 0) -> None:
        self.end_of_text = end_of_text
        self.model = their_model(folder, torch.float32).eval()
        self.tokenizer = Tokenizer.load(folder / "tokenizer.json")

    @torch.no_grad()
    def sliding(self, text: str, window: int, overlap: int) -> tuple[float, int]:
        """Sum of the losses of a text in sliding windows, and number of tokens."""
        ids = torch.tensor([self.end_of_text, *self.tokenizer.encode(text)])
        total = 0.0
        for first, last in self._pieces(len(ids), window, overlap):
            start = max(0, last - window)
            losses = F.cross_entropy(
                self.model(ids[start:last][None]).logits[0], ids[start + 1 : last + 1], reduction="none"
            )
            total += float(losses[first - start - 1 :].sum())
        return total, len(ids) - 1

    @staticmethod
    def _pieces(length: int, window: int, overlap: int) -> Iterator[tuple[int, int]]:
        """First and last target of each window."""
        done = 0
        while done < length - 1:
            last = min(length - 1, done + (overlap if done else window))
            yield done + 1, last
            done = last

    @torch.no_grad()
    def last_words(self, passages: Sequence[str]) -> Iterator[tuple[bool, bool, float]]:
        """For the last word of each passage: whether all tokens are right, whether the last token is right, and the sum
        of the losses.
        """
        for passage in passages:
            num = len(self.tokenizer.encode(passage.rpartition(" ")[0]))
            ids = torch.tensor(self.tokenizer.encode(passage))
            logits = self.model(ids[None]).logits[0, num - 1 : -1]
            right = logits.argmax(1) == ids[num:]
            yield bool(right.all()), bool(right[-1]), float(F.cross_entropy(logits, ids[num:], reduction="sum"))
