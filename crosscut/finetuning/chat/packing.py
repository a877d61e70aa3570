"""Pack conversations into sequences of equal length. Conversations in the same sequence do not see each other.

A sequence holds whole conversations, one after the other. The model reads all tokens of a conversation except the last,
and the target of a token is the conversation's next token, if the loss covers this next token:

    read       q1  q2  a1  a2  p1  b1  b2  -
    target     -   a1  a2  a3  b1  b2  b3  -       ("-": padding, or no target)
    document   0   0   0   0   1   1   1   2
    position   0   1   2   3   0   1   2   0

Conversations are packed by best fit, longest first. The sequences depend only on the conversations, and their order in
an epoch depends only on (seed, epoch), so batches do not depend on the layout.

Shapes: N sequences, S sequence length.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from crosscut.architecture.inputs import Inputs
from crosscut.config import IGNORED, DataError
from crosscut.config.conventions import CONFIG_FILE
from crosscut.data.sampler import Arrays, Ids, shuffled
from crosscut.finetuning.arrays import load_arrays, save_arrays
from crosscut.finetuning.chat.masking import EncodedConversation

Numbers = npt.NDArray[np.int32]

_ORDER_KEY = 11
"""Key of the random order of the sequences. It differs from the keys in `data.sampler`."""


@dataclass(frozen=True, eq=False)
class PackedChats:
    """Packed sequences. All arrays except `places` are [N, S]."""

    tokens: Numbers
    targets: Numbers
    """Target of each token; `IGNORED` if the loss does not cover the target."""
    documents: Numbers
    """Number of the conversation to which each token belongs, counted within the sequence. Padding counts as one more
    conversation."""
    positions: Numbers
    """Position of each token in its conversation."""
    places: npt.NDArray[np.str_]
    """Files and lines of each sequence's conversations, one per line, [N]."""

    @property
    def num_sequences(self) -> int:
        """Number N of sequences."""
        return len(self.tokens)

    @property
    def num_targets(self) -> int:
        """Number of tokens that the loss covers."""
        return int((self.targets != IGNORED).sum())

    def rows(self, indices: Ids) -> Arrays:
        """Return the sequences with these indices. An index of -1 stands for a sequence without targets."""
        arrays = (self.tokens, self.targets, self.documents, self.positions)
        tokens, targets, documents, positions = (array[indices].astype(np.int64) for array in arrays)
        targets[indices < 0] = IGNORED
        return Inputs(tokens=tokens, targets=targets, documents=documents, positions=positions)

    def indices(self, first_sample: int, count: int, *, seed: int) -> Ids:
        """Return the sequence indices of `count` consecutive training samples. `first_sample` is the number of the
        first sample, counted over all epochs.
        """
        found = np.empty(count, dtype=np.int64)
        for i, sample in enumerate(range(first_sample, first_sample + count)):
            epoch, within = divmod(sample, self.num_sequences)
            found[i] = shuffled(self.num_sequences, seed, _ORDER_KEY, epoch)[within]
        return found

    @property
    def fingerprint(self) -> str:
        """Hash of all tokens and targets."""
        return hashlib.sha256(self.tokens.tobytes() + self.targets.tobytes()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Write the sequences to a file."""
        save_arrays(self, path)

    @classmethod
    def load(cls, path: Path) -> "PackedChats":
        """Read the sequences from a file. Raises `DataError` if the file cannot be read, or if its arrays contradict
        each other.
        """
        remedy = f"Remove `{CONFIG_FILE}` and the checkpoints, and start the run again."
        return load_arrays(cls, path, _fit, content="the packed conversations", remedy=remedy)


def _fit(packed: PackedChats) -> bool:
    """Whether the types, shapes and values of the arrays agree with each other."""
    arrays = (packed.tokens, packed.targets, packed.documents, packed.positions)
    if packed.tokens.ndim != 2 or not packed.tokens.size or packed.places.shape != packed.tokens.shape[:1]:
        return False
    if any(array.shape != packed.tokens.shape or array.dtype.kind not in "iu" for array in arrays):
        return False
    has_targets = bool(((packed.targets >= 0) | (packed.targets == IGNORED)).all())
    are_counts = all((array >= 0).all() for array in (packed.tokens, packed.documents, packed.positions))
    return has_targets and are_counts and packed.places.dtype.kind == "U"


def pack(conversations: Sequence[EncodedConversation], *, length: int, padding: int) -> PackedChats:
    """Pack conversations into sequences of `length` tokens. `padding` is the token id that fills the rest of a
    sequence.

    Raises `DataError` if any conversations do not fit into a sequence. The message gives their number.
    """
    require_fit(conversations, length)
    groups = _groups(conversations, length)
    shape = (len(groups), length)
    tokens, targets = np.full(shape, padding, dtype=np.int32), np.full(shape, IGNORED, dtype=np.int32)
    documents, positions = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    for row, group in enumerate(groups):
        start = 0
        for number, index in enumerate(group):
            each = conversations[index]
            part = slice(start, start + len(each.ids) - 1)
            tokens[row, part] = each.ids[:-1]
            targets[row, part] = np.where(each.mask[1:], each.ids[1:], IGNORED)
            documents[row, part] = number
            positions[row, part] = np.arange(len(each.ids) - 1)
            start = part.stop
        documents[row, start:] = len(group)
        positions[row, start:] = np.arange(length - start)
    places = np.array(["\n".join(conversations[index].place for index in group) for group in groups], dtype=np.str_)
    return PackedChats(tokens, targets, documents, positions, places)


def require_fit(conversations: Sequence[EncodedConversation], length: int) -> None:
    """Raise `DataError` if a conversation has more than `length` + 1 tokens. One token more than `length` is allowed,
    because the last token is only a target.
    """
    long = [each for each in conversations if len(each.ids) - 1 > length]
    if not long:
        return
    longest = max(long, key=lambda each: len(each.ids))
    raise DataError(
        f"Every conversation must fit into `training.sequence_length` ({length} tokens), but {len(long)} of "
        f"{len(conversations)} do not. The longest, {longest.place}, has {len(longest.ids) - 1} tokens. Set "
        f"training.sequence_length={len(longest.ids) - 1}, or pass --drop-long to leave out long conversations."
    )


def _groups(conversations: Sequence[EncodedConversation], length: int) -> list[list[int]]:
    """Return the indices of the conversations in each sequence. Each conversation goes to the fullest sequence that has
    room.
    """
    order = sorted(range(len(conversations)), key=lambda i: -len(conversations[i].ids))
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    """Pairs (number of free tokens, index of the sequence), one for each sequence, in ascending order."""
    for index in order:
        size = len(conversations[index].ids) - 1
        place = bisect_left(rooms, (size, -1))
        if place == len(rooms):
            groups.append([])
            room, group = length, len(groups) - 1
        else:
            room, group = rooms.pop(place)
        groups[group].append(index)
        insort(rooms, (room - size, group))
    return groups
