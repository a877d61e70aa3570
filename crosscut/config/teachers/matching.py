"""Checks whether a teacher's model can teach the model of a run."""

from crosscut.config.errors import ConfigError, LayoutError
from crosscut.config.layouts.limits import require_tensor_axis
from crosscut.config.model import ModelConfig
from crosscut.config.parts.rotary import Positions
from crosscut.config.run import RunConfig, require_documents
from crosscut.config.teachers.shape import teacher_model


def require_teachable(run: RunConfig) -> None:
    """Raise `ConfigError` unless the run computes no teacher, or the teacher's model can teach the run's model on the
    run's layout. A vocabulary of size 0 is not known yet, and is not compared.

    Every command that reads a run with a teacher calls this function, so they refuse the same teachers.
    """
    if not run.teacher.is_computed:
        return
    teacher, model, folder = teacher_model(run.teacher.folder), run.model, run.teacher.folder
    for name in ("head", "attention", "vocab_size", "num_classes"):
        theirs, value = getattr(teacher, name), getattr(model, name)
        if theirs != value and (value or name != "vocab_size"):
            raise ConfigError(
                f"`teacher.folder` must hold a model whose `model.{name}` is that of the run ({value}), but "
                f"`{folder}` has {theirs}. Choose another teacher, or train a model with model.{name}={theirs}."
            )
    _require_inputs(run, teacher)
    try:
        require_tensor_axis(teacher, run.teacher_ranks.tensor)
    except LayoutError as error:
        told = str(error).replace("layout.tensor", "teacher.tensor")
        raise LayoutError(f"{told} The numbers are those of the teacher in `{folder}`.") from None


def _require_inputs(run: RunConfig, teacher: ModelConfig) -> None:
    """Raise `ConfigError` if the teacher cannot read the sequences of the run as it was made to read them."""
    length, longest, folder = run.training.sequence_length, teacher.max_sequence_length, run.teacher.folder
    if teacher.positions is not Positions.NONE and length > longest:
        raise ConfigError(
            f"`training.sequence_length` must be at most {longest}, the `model.max_sequence_length` of the teacher in "
            f"`{folder}`, but is {length}. Set training.sequence_length={longest}, or choose another teacher."
        )
    require_documents(teacher, run.training, of=f" of the teacher in `{folder}`", other="Choose another teacher")
    if run.data.has_sentences and run.data.pairs and teacher.token_types > 1 >= run.model.token_types:
        raise ConfigError(
            f"`model.token_types` must be at least 2 for pairs of segments with the teacher in `{folder}`, which reads "
            f"the segment of each token, but is {run.model.token_types}. Set model.token_types={teacher.token_types}, "
            "or choose another teacher."
        )
