"""Reader for the published files of GLUE (Wang et al., 2019): tab-separated tables without quoting."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from crosscut.config.checks import listed
from crosscut.config.errors import ConfigError, DataError
from crosscut.finetuning.tasks.scores import CORRELATIONS, SCORES
from crosscut.finetuning.tasks.tables import Examples, TableColumns, lines_of, require_columns, to_examples

_ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """File format of a GLUE task, and the scores that are reported for the task."""

    columns: TableColumns
    """Columns to read from a file with labels."""

    labels: tuple[str, ...]
    """Labels in the order of their indexes. Empty if the task is to predict a number."""

    scores: tuple[str, ...]
    """Official scores: `accuracy`, `f1` (of the label with index 1), `matthews` or, for numbers, `pearson` and
    `spearman`."""

    header: tuple[str, ...] = ()
    """Column names, if the task's files with labels have no header. Empty if these files have a header."""

    drops_short_lines: bool = False
    """Whether to leave out lines with too few columns. The published training file of some tasks has such lines."""

    @property
    def is_number(self) -> bool:
        """Whether the task is to predict a number."""
        return not self.labels


GLUE = {
    "mnli": GlueTask(
        columns=TableColumns("sentence1", "sentence2", "gold_label"),
        labels=("entailment", "neutral", "contradiction"),
        scores=("accuracy",),
    ),
    "qqp": GlueTask(
        columns=TableColumns("question1", "question2", "is_duplicate"),
        labels=("0", "1"),
        scores=("accuracy", "f1"),
        drops_short_lines=True,
    ),
    "sst-2": GlueTask(columns=TableColumns("sentence", "", "label"), labels=("0", "1"), scores=("accuracy",)),
    "rte": GlueTask(columns=TableColumns("sentence1", "sentence2", "label"), labels=_ENTAILMENT, scores=("accuracy",)),
    "qnli": GlueTask(columns=TableColumns("question", "sentence", "label"), labels=_ENTAILMENT, scores=("accuracy",)),
    "cola": GlueTask(
        columns=TableColumns("sentence", "", "label"),
        labels=("0", "1"),
        scores=("matthews",),
        header=("source", "label", "mark", "sentence"),
    ),
    "stsb": GlueTask(
        columns=TableColumns("sentence1", "sentence2", "score"), labels=(), scores=("pearson", "spearman")
    ),
}
"""GLUE tasks, keyed by name."""


def read_glue(task: str, path: Path, *, has_labels: bool = True) -> Examples:
    """Read a file of a GLUE task, such as `train.tsv`, `dev_matched.tsv` or `test.tsv`. Examples of a file without the
    label's column, such as `test.tsv`, have no labels. With `has_labels=False`, labels are not read.

    Raises `ConfigError` for an unknown task, and `DataError` for a file that cannot be read, missing columns, an
    unknown label or a label that must be a number but is not.
    """
    if task not in GLUE:
        raise ConfigError(f"A GLUE task must be {listed(repr(name) for name in GLUE)}, but is {task!r}.")
    wanted = GLUE[task]
    lines = lines_of(path)
    header = lines[0].split("\t") if lines else []
    first = 1
    if wanted.header and wanted.columns.text not in header:  # the training and development files of CoLA
        header, first = list(wanted.header), 0
    has_labels = has_labels and wanted.columns.label in header
    columns = wanted.columns if has_labels else wanted.columns._replace(label="")
    require_columns(path, 1, columns, header)
    rows, skipped = [], 0
    for number, line in enumerate(lines[first:], start=first + 1):
        fields = line.split("\t")
        if len(fields) == len(header):
            rows.append((number, dict(zip(header, fields, strict=True))))
        elif len(fields) < len(header) and wanted.drops_short_lines:
            skipped += 1
        else:
            raise DataError(
                f"Line {number} of `{path}` must have {len(header)} columns ({', '.join(header)}), but has "
                f"{len(fields)}. Check that this is a file of the task {task!r}."
            )
    return replace(to_examples(path, rows, columns, wanted.labels, are_numbers=wanted.is_number), skipped=skipped)


def score_glue(task: str, predicted: Sequence[float], examples: Examples) -> dict[str, float]:
    """Return the official scores of predicted labels or numbers, keyed by name (`GlueTask.scores`). Raises `DataError`
    if the examples have no labels, or if the number of predictions is not the number of examples.
    """
    found = examples.examples
    if not all(example.is_labelled for example in found):
        raise DataError("A score needs labels, but the file has none. Use a file with labels, such as `dev.tsv`.")
    if GLUE[task].is_number:
        numbers = [example.number or 0.0 for example in found]
        return {name: CORRELATIONS[name](predicted, numbers) for name in GLUE[task].scores}
    labels = [example.label or 0 for example in found]
    return {name: SCORES[name]([int(one) for one in predicted], labels) for name in GLUE[task].scores}
