"""Description of a task that a model is fine-tuned for, and the files of its examples."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from crosscut.config.checks import listed
from crosscut.config.errors import ConfigError, DataError
from crosscut.config.parts.head import HeadKind
from crosscut.data.tokenization.decoder_rows import Special
from crosscut.finetuning.encoding.options import encode_options
from crosscut.finetuning.encoding.questions import STRIDE, encode_questions
from crosscut.finetuning.encoding.texts import EncodedTask, Long, encode_texts
from crosscut.finetuning.encoding.tokens import TextEncoder
from crosscut.finetuning.tasks import (
    GLUE,
    ChoiceExample,
    Examples,
    SpanExample,
    TableColumns,
    TextExample,
    read_glue,
    read_race,
    read_squad,
    read_table,
)
from crosscut.finetuning.tasks.tables import column_names

Example = TextExample | SpanExample | ChoiceExample
_Example = TypeVar("_Example", TextExample, SpanExample, ChoiceExample)

TABLE, SQUAD, RACE = "table", "squad", "race"
TASKS = (*GLUE, SQUAD, RACE, TABLE)
"""Names of the tasks."""

TRAIN, DEV, TEST = "train", "dev", "test"
PARTS = (TRAIN, DEV, TEST)
"""Parts of the examples: for training, for choosing the best checkpoint, and for scoring the chosen checkpoint."""

_FILES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mnli": {TRAIN: ("train.tsv",), DEV: ("dev_matched.tsv",), TEST: ("dev_mismatched.tsv",)},
    SQUAD: {TRAIN: ("train-v1.1.json", "train-v2.0.json"), DEV: ("dev-v1.1.json", "dev-v2.0.json"), TEST: ()},
    RACE: {part: (part,) for part in PARTS},
    TABLE: {part: (f"{part}.tsv", f"{part}.jsonl") for part in PARTS},
}
_NO_COLUMNS, _NO_SPECIAL = TableColumns(""), Special(None, 0)

_GLUE_FILES = {part: (f"{part}.tsv",) for part in PARTS}


@dataclass(frozen=True, kw_only=True)
class TunedTask:
    """Description of a task. The description is kept in the run's folder, so that a resumed run and `predict` need no
    options.
    """

    name: str
    """Name of the task, one of `TASKS`."""
    labels: tuple[str, ...] = ()
    """Names of the labels, by index. Empty for numbers, and for questions about a text."""
    columns: TableColumns = _NO_COLUMNS
    """Columns of the files of the task "table"."""
    is_regression: bool = False
    """Whether the labels of the task "table" are numbers to predict."""
    may_be_empty: bool = False
    """Whether a question may have no answer in its text, as in SQuAD 2.0."""
    threshold: float = 0.0
    """Margin by which the score of "no answer" must exceed the score of the best span for "no answer" to be
    predicted."""
    stride: int = STRIDE
    """Number of tokens that successive windows of a text share."""
    long: Long = Long.CUT
    """Treatment of examples that are longer than a sequence."""
    special: Special = _NO_SPECIAL
    """Special token ids of a decoder."""
    is_causal: bool = False
    """Whether the model is a decoder, whose summary token is the last token of a row."""

    @property
    def head(self) -> HeadKind:
        """Head that the model needs."""
        if self.is_regression or (self.name in GLUE and GLUE[self.name].is_number):
            return HeadKind.NUMBER
        return {SQUAD: HeadKind.SPANS, RACE: HeadKind.CHOICE}.get(self.name, HeadKind.CLASSES)

    @property
    def num_classes(self) -> int:
        """Number of classes of the head; 0 for heads without classes."""
        return len(self.labels) if self.head is HeadKind.CLASSES else 0

    @property
    def score_names(self) -> tuple[str, ...]:
        """Names of the task's scores. The first one decides which checkpoint is best."""
        if self.head is HeadKind.SPANS:
            more = ("exact_with_answer", "f1_with_answer", "exact_without_answer") if self.may_be_empty else ()
            return ("f1", "exact", *more)
        if self.name in GLUE:
            return GLUE[self.name].scores
        if self.head is HeadKind.NUMBER:
            return ("pearson", "spearman")
        if self.name == TABLE and len(self.labels) == 2:
            return ("accuracy", "f1", "matthews")
        return ("accuracy",)

    def read(self, path: Path, *, has_labels: bool | None = True) -> tuple["TunedTask", tuple[Example, ...], int]:
        """Read the examples in a file, or in a RACE folder. Returns the task, the examples, and the number of lines
        that were left out. If the task has no labels yet, the returned task has the labels of the file.

        If `has_labels` is false, the labels of texts are not read. None means that the file may lack them. Raises
        `DataError` if `has_labels` is true and an example has no label, and the errors of the readers.
        """
        if self.name == SQUAD:
            questions = read_squad(path)
            is_new = any(not question.answers for question in questions)
            return dataclasses.replace(self, may_be_empty=self.may_be_empty or is_new), questions, 0
        if self.name == RACE:
            choices = read_race(path)
            letters = tuple("ABCDEFGH"[: len(choices[0].options)])
            return dataclasses.replace(self, labels=self.labels or letters), choices, 0
        found = self._read_texts(path, has_labels)
        if has_labels and not all(example.is_labelled for example in found.examples):
            raise DataError(f"`{path}` must have labels, but has none. Use a file with labels, such as `dev.tsv`.")
        return dataclasses.replace(self, labels=found.labels), found.examples, found.skipped

    def _read_texts(self, path: Path, has_labels: bool | None) -> Examples:
        if self.name in GLUE:
            return read_glue(self.name, path, has_labels=has_labels is not False)
        columns = self.columns
        if has_labels is False or (has_labels is None and columns.label not in column_names(path)):
            columns = columns._replace(label="")
        return read_table(path, columns=columns, labels=self.labels, are_numbers=self.is_regression)

    def encode(self, encoder: TextEncoder, examples: Sequence[Example], *, name: str, may_drop: bool) -> EncodedTask:
        """Encode examples. `long` says what is done with examples that are too long. If `may_drop` is false, they are
        cut instead of dropped. `name` is the name of the file, for error messages. Raises the errors of the encoders.
        """
        long = Long.CUT if self.long is Long.DROP and not may_drop else self.long
        if self.head is HeadKind.SPANS:
            questions = of_kind(SpanExample, examples)
            rows, counts = encode_questions(encoder, questions, name=name, stride=self.stride, is_trained=may_drop)
            notice = counts.notice(name, is_trained=may_drop)
            return EncodedTask(rows.without_offsets() if may_drop else rows, 0, notice)
        if self.head is HeadKind.CHOICE:
            return encode_options(encoder, of_kind(ChoiceExample, examples), name=name, long=long)
        return encode_texts(encoder, of_kind(TextExample, examples), name=name, long=long)


def of_kind(kind: type[_Example], examples: Sequence[Example]) -> list[_Example]:
    """Return the examples of one task, which are all of this `kind`."""
    return [example for example in examples if isinstance(example, kind)]


def files_of(name: str, folder: str, given: Mapping[str, str]) -> dict[str, Path]:
    """Find the file of each part of a task. `given` maps a part to the file that the user named. The files of the other
    parts have the published names and are in `folder`. An empty `folder` means that the user named no folder.

    Raises `ConfigError` if the training or the development file is missing, or if `folder` has several files for one
    part.
    """
    files = {part: Path(path) for part, path in given.items() if path}
    for part in PARTS:
        names = _FILES.get(name, _GLUE_FILES)[part]
        found = [Path(folder) / one for one in names if folder and (Path(folder) / one).exists()]
        if len(found) > 1 and part not in files:
            told = " and ".join(f"`{path}`" for path in found)
            raise ConfigError(
                f"`--data` must name a folder with exactly one file that can serve as --{part}, but the folder has "
                f"{told}. Name the file with --{part}."
            )
        if found:
            files.setdefault(part, found[0])
        if part not in files and part != TEST:
            lack = f"`{folder}` has no {listed(f'`{one}`' for one in names)}" if folder else "neither option is given"
            raise ConfigError(
                f"`--{part}` must name the examples of the task, or `--data` must name a folder that contains them, "
                f"but {lack}. Pass --{part}."
            )
    return files
