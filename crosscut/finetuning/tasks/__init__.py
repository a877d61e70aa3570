"""Tasks on which a model is fine-tuned: readers of their published files, and their official scores (docs/tasks.md).

The package reads files and compares answers. It runs no model and imports no torch.
"""

from crosscut.finetuning.tasks.choices import ChoiceExample, read_race
from crosscut.finetuning.tasks.glue import GLUE, GlueTask, read_glue, score_glue
from crosscut.finetuning.tasks.scores import accuracy, confusion, exact_match_and_f1, f1, matthews, pearson, spearman
from crosscut.finetuning.tasks.spans import SpanExample, read_squad
from crosscut.finetuning.tasks.tables import Examples, TableColumns, TextExample, read_table

__all__ = [
    "GLUE",
    "ChoiceExample",
    "Examples",
    "GlueTask",
    "SpanExample",
    "TableColumns",
    "TextExample",
    "accuracy",
    "confusion",
    "exact_match_and_f1",
    "f1",
    "matthews",
    "pearson",
    "read_glue",
    "read_race",
    "read_squad",
    "read_table",
    "score_glue",
    "spearman",
]
