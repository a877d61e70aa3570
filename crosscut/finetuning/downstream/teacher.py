"""Teacher of a model that is fine-tuned for a task: the checks of its labels and of its inputs."""

from pathlib import Path

from crosscut.config import ConfigError, ResolvedRun
from crosscut.data import Tokenizer
from crosscut.finetuning.downstream.folder import TaskRuns
from crosscut.finetuning.downstream.task import TRAIN
from crosscut.pretrained import ModelSource
from crosscut.training.teachers.requirements import find_teacher


def teacher_for(kept: TaskRuns, run: ResolvedRun, tokenizer: Path) -> ModelSource | None:
    """Return the teacher of fine-tuning runs; None without a teacher. `tokenizer` is the file of the tokenizer.

    Raises `ConfigError` if the teacher does not have the labels of the task in the same order, or reads other rows.
    Also raises the errors of `find_teacher`.
    """
    teacher = find_teacher(run, Tokenizer.load(tokenizer))
    if teacher is None:
        return None
    folder, task = run.config.teacher.folder, kept.task
    if run.model.num_classes and teacher.labels != task.labels:
        ours, theirs = (", ".join(map(repr, names)) or "no names" for names in (task.labels, teacher.labels))
        raise ConfigError(
            f"`teacher.folder` must hold a model with the classes of the run in the same order ({ours:.300}), but "
            f"`{folder}` has {theirs:.300}. Choose a teacher that was fine-tuned for these classes."
        )
    if task.is_causal and teacher.special != task.special:
        raise ConfigError(
            "`teacher.folder` must hold a model with the token ids of the run around a text "
            f"({task.special.begin}, {task.special.end}), but `{folder}` has {teacher.special.begin}, "
            f"{teacher.special.end}. Choose a teacher that was fine-tuned from a model of the same family."
        )
    if teacher.model.token_types > 1 >= run.model.token_types and kept.rows(TRAIN).types.any():
        raise ConfigError(
            f"`model.token_types` must be at least 2 for pairs of texts with the teacher in `{folder}`, which reads "
            f"the text of each token, but is {run.model.token_types}. Choose another model, or another teacher."
        )
    return teacher
