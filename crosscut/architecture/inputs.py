"""Inputs of a model: a table of the fields of a batch, and the fields that each part of a model reads.

Batches of NumPy arrays (`crosscut.data`) and of tensors (`crosscut.model.Batch`) have the fields of this table. A field
says what its rows are, and this decides how ranks and micro-batches divide the field. The embedding and the head of a
model list the fields that they read (`Read`), so made-up batches have the form of real ones.

Legend: B sequences, S tokens of a sequence, C context ranks, N predicted tokens.
"""

from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import Annotated, Generic, NamedTuple, TypeVar, get_type_hints

from crosscut.config import IGNORED

Array = TypeVar("Array")
"""Type of the fields: a NumPy array or a tensor."""


class Per(Enum):
    """Kind of the rows of a field."""

    TOKEN = auto()
    """One row for each token, [B, S]."""
    SEQUENCE = auto()
    """One row for each sequence, [B]."""
    LABEL = auto()
    """One row for each label: [B], or fewer if several successive sequences share a label."""
    PREDICTED = auto()
    """One row for each token whose logits are computed, [N]."""
    PLACE = auto()
    """One row for each token of a rank's part of the sequences, [S / C]."""

    @property
    def is_divided_by_context(self) -> bool:
        """Whether each context rank has the rows of its own tokens. Sequences with other rows cannot be shared."""
        return self is Per.TOKEN

    @property
    def is_divided_by_micro_batches(self) -> bool:
        """Whether each micro-batch has the rows of its own sequences. Indexes into a whole batch cannot be divided."""
        return self in (Per.TOKEN, Per.SEQUENCE, Per.LABEL)


class Element(Enum):
    """Type of the elements of a field."""

    ID = auto()
    """Integer that numbers values from 0."""
    PLACE = auto()
    """Index of a token."""
    FLAG = auto()
    """True or false."""
    REAL = auto()
    """Number in floating point."""


class Field(NamedTuple):
    """Row of the table: what the rows and the elements of a field are."""

    per: Per
    element: Element = Element.ID
    padding: int = 0
    """Value of a padding token. For fields without rows for tokens: value of a row that has none, such as a missing
    label. A missing number in floating point is NaN.
    """


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs(Generic[Array]):
    """Sequences that are read together, as arrays. None means that a field is not given."""

    tokens: Annotated[Array, Field(Per.TOKEN)]
    """Token ids."""
    targets: Annotated[Array | None, Field(Per.TOKEN, padding=IGNORED)] = None
    """Target of each token, or `IGNORED` if nothing is to be predicted. The target is the id of the next token or, for
    masked tokens, the id of the original token.
    """
    positions: Annotated[Array | None, Field(Per.TOKEN, Element.PLACE)] = None
    """Position of each token in its document, from 0. Positions are given if and only if documents are given. None
    means that positions count from the start of the sequence.
    """
    documents: Annotated[Array | None, Field(Per.TOKEN)] = None
    """Number of the document to which each token belongs, from 0 in each sequence. Documents do not see each other.
    None means that each sequence is one document.
    """
    segments: Annotated[Array | None, Field(Per.TOKEN)] = None
    """Number of the segment to which each token belongs, such as one of two sentences. This number is the token's type
    (`model.token_types`). None means that every token has type 0.
    """
    mask: Annotated[Array | None, Field(Per.TOKEN, Element.FLAG)] = None
    """Whether each token may be attended to; false for padding. None means that every token may be attended to."""
    order: Annotated[Array | None, Field(Per.SEQUENCE, padding=IGNORED)] = None
    """Order of the two segments of each sequence: 0 if they are in their original order, 1 if they are swapped,
    `IGNORED` if the sequence has no order to predict. None means that the order is not predicted.
    """
    labels: Annotated[Array | None, Field(Per.LABEL, padding=IGNORED)] = None
    """Labels for a model that solves a task. Their meaning depends on the model's head. Head `classes`: the class of
    each sequence [B]. Head `number`: the number of each sequence [B], in floating point. Head `choice`: the index of
    the right one of the texts of each question; the texts of a question are successive sequences. Head `spans`: the
    first and the last token of the answer in each sequence [B, 2]. A missing label is `IGNORED`, and a missing number
    is NaN.
    """
    teacher: Annotated[Array | None, Field(Per.TOKEN, Element.REAL)] = None
    """Last hidden states of a teacher for each token, [B, S, its hidden size], from which its logits follow; or, with
    `teacher_ids`, the stored logits of its likeliest tokens and of the rest [B, S, k + 1]. None means that no teacher
    has a share of the loss.
    """
    teacher_ids: Annotated[Array | None, Field(Per.TOKEN)] = None
    """Ids of the teacher's likeliest tokens, [B, S, k]. None if its logits are not stored ones."""
    teacher_labels: Annotated[Array | None, Field(Per.SEQUENCE, Element.REAL)] = None
    """Logits of a teacher for a model that solves a task, as the teacher's head gives them for each sequence: [B, C] or
    [B, S, 2]. None means that no teacher has a share of the loss.
    """
    predicted: Annotated[Array | None, Field(Per.PREDICTED, Element.PLACE)] = None
    """Indexes of the tokens whose logits are computed, in the flattened batch. None means all tokens."""
    places: Annotated[Array | None, Field(Per.PLACE, Element.PLACE)] = None
    """Indexes of this rank's tokens in the whole sequences, if context ranks share the sequences. None means that the
    sequences are whole.
    """

    def given(self) -> dict[str, Array]:
        """Return the fields that are given, by name, in the order of the table."""
        values = {name: getattr(self, name) for name in FIELDS}
        return {name: value for name, value in values.items() if value is not None}


FIELDS: dict[str, Field] = {
    field.name: get_type_hints(Inputs, include_extras=True)[field.name].__metadata__[0] for field in fields(Inputs)
}
"""Table of the fields of a batch, by name."""


@dataclass(frozen=True)
class Read:
    """A field that a part of a model reads, and the values that the field may have."""

    name: str
    num_values: int = 0
    """Number of the different values of an element, for `Element.ID`. 0 means that the batch decides the number."""
    width: int = 1
    """Number of elements of a row."""
    element: Element | None = None
    """Type of the elements; None means the type in the table. Only labels have another type."""
    is_shared: bool = False
    """Whether several successive sequences share a row."""

    def __post_init__(self) -> None:
        assert self.name in FIELDS, f"{self.name} is no field of a batch"

    @property
    def kind(self) -> Element:
        """Type of the elements."""
        return FIELDS[self.name].element if self.element is None else self.element

    def shape(self, sequences: int, length: int, *, sharing: int = 1, predicted: int = 0) -> tuple[int, ...]:
        """Return the shape of the field in a batch of `sequences` whole sequences of `length` tokens. If sequences
        share rows, `sharing` sequences share each row. `predicted` is the number of tokens whose logits are computed.
        """
        shared = sequences // (sharing if self.is_shared else 1)
        sizes = {Per.TOKEN: (sequences, length), Per.PREDICTED: (predicted,), Per.PLACE: (length,)}
        rows = sizes.get(FIELDS[self.name].per, (shared,))
        return rows if self.width == 1 else (*rows, self.width)


class LossTerm(NamedTuple):
    """A term of the loss: a sum over the rows of a field that hold something to predict. Training divides the sum by
    the number of these rows in the whole batch. The z-loss is a part of the terms of tokens, and is divided with them.
    """

    name: str
    field: str
    """Name of the field that holds what is predicted. For a term of the layers, this is `tokens`: the sum is over all
    tokens."""
    coefficient: float = 1.0
    """Factor of the term in the loss."""
