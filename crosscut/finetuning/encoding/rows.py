"""Encoded examples of a task: the token ids of all rows, one after the other, and the labels of the examples.

A row is a sequence that the model reads. An example has `width` successive rows: one for each option of a question with
options, and otherwise a single row. A batch depends only on the seed and the step:

    epoch = step // steps of an epoch,    examples = shuffled(seed, epoch)[step of the epoch x B ...]

The last batch of an epoch is filled up with rows without a label, so every example counts once in each epoch, on any
layout.

Shapes: T tokens of all rows, R rows, E examples, B examples of a batch, S tokens of the longest row of a batch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from crosscut.architecture.inputs import Inputs
from crosscut.config.conventions import IGNORED
from crosscut.data.sampler import Arrays, Ids, shuffled
from crosscut.finetuning.arrays import load_arrays, save_arrays

if TYPE_CHECKING:
    import tokenizers

Numbers = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Labels = npt.NDArray[np.int64] | npt.NDArray[np.float64]

_ORDER_KEY = 12
"""Key of the random order of the examples. It differs from the keys in `data.sampler` and in `chat.packing`."""


class EncodedRow(NamedTuple):
    """Tokens of one row. Both arrays are [tokens]."""

    ids: Numbers
    types: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, found: "tokenizers.Encoding") -> "EncodedRow":
        """Make the row of an encoded text."""
        return cls(np.array(found.ids, dtype=np.int32), np.array(found.type_ids, dtype=np.uint8))


@dataclass(frozen=True, eq=False)
class EncodedRows:
    """Encoded examples."""

    ids: Numbers
    """Token ids [T]."""
    types: npt.NDArray[np.uint8]
    """Type of each token [T]: 0 for a first text, 1 for a second text."""
    ends: Ids
    """Index in `ids` after the last token of each row [R]."""
    labels: Labels
    """Label of each example [E], or first and last token of its answer [E, 2]. `IGNORED` if an example has no label.
    Numbers to predict are floating-point, and NaN takes the place of `IGNORED`."""
    sources: Ids
    """Index of each example in its file [E]. Several windows of one question have the same index."""
    offsets: Numbers
    """Position of each token in the text that a question is about [T, 2]: the index of the token's first character, and
    the index after its last character. Both are -1 for a token outside of this text. Empty for other tasks.
    """

    @property
    def num_examples(self) -> int:
        """Number E of examples."""
        return len(self.labels)

    @property
    def width(self) -> int:
        """Number of rows of each example."""
        return len(self.ends) // max(1, len(self.labels))

    @property
    def lengths(self) -> Ids:
        """Number of tokens of each row [R]."""
        return np.diff(self.ends, prepend=0)

    @property
    def fingerprint(self) -> str:
        """Hash of all tokens and labels."""
        parts = (self.ids, self.types, self.ends, self.labels)
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:16]

    def steps_per_epoch(self, batch_size: int) -> int:
        """Number of batches in an epoch. The last batch may contain padding examples."""
        return -(-self.num_examples // batch_size)

    def batch(self, step: int, *, batch_size: int, seed: int) -> Ids:
        """Return the indices of the examples of a training step [B]. In the last batch of an epoch, -1 stands for a
        padding example.
        """
        epoch, within = divmod(step, self.steps_per_epoch(batch_size))
        order = _order(self.num_examples, seed, epoch)
        found = np.full(batch_size, -1, dtype=np.int64)
        chosen = order[within * batch_size : (within + 1) * batch_size]
        found[: len(chosen)] = chosen
        return found

    def longest(self, examples: Ids, *, multiple: int = 1) -> int:
        """Return the number of tokens of the longest row of `examples`, rounded up to a multiple of `multiple`."""
        lengths = self.lengths.reshape(-1, self.width)[examples[examples >= 0]]
        longest = int(lengths.max()) if lengths.size else 1
        return -(-longest // multiple) * multiple

    def row(self, number: int) -> slice:
        """Return the slice of `ids` that holds the tokens of a row."""
        return slice(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))

    def padded(self, examples: Ids, *, length: int, padding: int) -> Arrays:
        """Return the rows of some examples, padded to `length` tokens with the id `padding`, with their labels. The
        segment of a token is 0 in a first text, and 1 in a second text. An index of -1 stands for a padding example,
        which has no label.
        """
        width = self.width
        shape = (len(examples) * width, length)
        tokens, segments = np.full(shape, padding, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        mask, labels = np.zeros(shape, dtype=np.bool_), self.labels[examples]
        labels[examples < 0] = np.nan if labels.dtype.kind == "f" else IGNORED
        mask[:, 0] = True  # attention must have at least one token to attend to
        for place, example in enumerate(examples.tolist()):
            for option in range(width if example >= 0 else 0):
                row, own = place * width + option, self.row(example * width + option)
                size = own.stop - own.start
                tokens[row, :size], segments[row, :size], mask[row, :size] = self.ids[own], self.types[own], True
        return Inputs(tokens=tokens, segments=segments, mask=mask, labels=labels)

    def without_offsets(self) -> "EncodedRows":
        """Return the rows without the offsets, which training does not need."""
        return replace(self, offsets=np.empty((0, 2), dtype=np.int32))

    def save(self, path: Path) -> None:
        """Write the rows to a file."""
        save_arrays(self, path)

    @classmethod
    def load(cls, path: Path) -> "EncodedRows":
        """Read the rows from a file. Raises `DataError` if the file cannot be read, or if its arrays contradict each
        other.
        """
        remedy = "Remove the folder, and start the run again."
        return load_arrays(cls, path, _fit, content="the encoded examples", remedy=remedy)

    @classmethod
    def of(cls, rows: Sequence[EncodedRow], labels: npt.ArrayLike, sources: Sequence[int]) -> "EncodedRows":
        """Join rows in one object. `labels` are the labels of the examples, and `sources` are the indices of the
        examples in their file.
        """
        found = np.asarray(labels)
        own: Labels = found.astype(np.float64) if found.dtype.kind == "f" and found.size else found.astype(np.int64)
        return cls(
            ids=np.concatenate([row.ids for row in rows]),
            types=np.concatenate([row.types for row in rows]),
            ends=np.cumsum([len(row.ids) for row in rows], dtype=np.int64),
            labels=own,
            sources=np.asarray(sources, dtype=np.int64),
            offsets=np.empty((0, 2), dtype=np.int32),
        )


def _fit(rows: EncodedRows) -> bool:
    """Whether the types, shapes and values of the arrays agree with each other."""
    flat, number = (rows.ids, rows.types, rows.ends, rows.sources), len(rows.sources) if rows.sources.ndim else 0
    shapes = {(number,), (number, 2)}, {(0, 2), (rows.ids.size, 2)}
    has_shapes = all(array.ndim == 1 for array in flat) and rows.labels.shape in shapes[0]
    if not has_shapes or rows.offsets.shape not in shapes[1] or not number or not rows.ends.size:
        return False
    if any(array.dtype.kind not in "iu" for array in (*flat, rows.offsets)):
        return False
    are_numbers = rows.labels.dtype.kind == "f" and rows.labels.ndim == 1 and not np.isinf(rows.labels).any()
    if rows.labels.dtype.kind not in "iu" and not are_numbers:
        return False
    sizes = rows.ids.size == rows.types.size == int(rows.ends[-1]) and rows.ends.size % number == 0
    return bool(sizes and (rows.lengths > 0).all() and (rows.ids >= 0).all() and (rows.sources >= 0).all())


@lru_cache(maxsize=2)
def _order(number: int, seed: int, epoch: int) -> Ids:
    """Return the order of the examples in an epoch. The result is cached, because every step of the epoch needs it."""
    return shuffled(number, seed, _ORDER_KEY, epoch)
