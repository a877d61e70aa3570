"""Checks whether a teacher's model can teach the model of a run."""

from crosscut.config.errors import ConfigError, LayoutError
from crosscut.config.layouts.limits import require_tensor_axis
from crosscut.config.parts.rotary import Positions
from crosscut.config.run import RunConfig
from crosscut.config.teachers.shape import teacher_model


def require_teachable(run: RunConfig) -> None:
    """Raise `ConfigError` unless the teacher's model can teach the run's model on the run's layout."""
    teacher, model, folder = teacher_model(run.teacher.folder), run.model, run.teacher.folder
    for name, value in (("head", model.head), ("vocab_size", model.vocab_size), ("num_classes", model.num_classes)):
        if (theirs := getattr(teacher, name)) != value:
            raise ConfigError(
                f"`teacher.folder` must hold a model whose `model.{name}` is that of the run ({value}), but "
                f"`{folder}` has {theirs}. Choose another teacher, or train a model with model.{name}={theirs}."
            )
    length, longest = run.training.sequence_length, teacher.max_sequence_length
    if teacher.positions is Positions.LEARNED and length > longest:
        raise ConfigError(
            f"`training.sequence_length` must be at most {longest}, the number of positions of the teacher in "
            f"`{folder}`, but is {length}. Set training.sequence_length={longest}, or choose another teacher."
        )
    try:
        require_tensor_axis(teacher, run.teacher_ranks.tensor)
    except LayoutError as error:
        told = str(error).replace("layout.tensor", "teacher.tensor")
        raise LayoutError(f"{told} The numbers are those of the teacher in `{folder}`.") from None
