"""Weights of a run's teacher on one rank."""

from dataclasses import replace
from functools import lru_cache

from crosscut.architecture import Decoder, Target, describe, layer_parameters, root_parameters
from crosscut.architecture.pipeline import Stage
from crosscut.config import Layout, ModelConfig
from crosscut.config.precision import PRECISIONS
from crosscut.config.teachers import teacher_model
from crosscut.planner.candidate import Planned


def model_of_teacher(run: Planned) -> ModelConfig:
    """Model of the run's teacher. Its vocabulary is padded like that of the run's model."""
    return replace(teacher_model(run.teacher.folder), vocab_multiple=run.model.vocab_multiple)


def teacher_bytes(run: Planned) -> int:
    """Bytes of the teacher's weights on one rank that has the teacher, for a run whose precision is decided."""
    size = PRECISIONS[run.teacher.precision_in(run.training.precision)].compute_bytes
    return size * sum(_elements(part, tensor) for part, tensor in parts_of_teacher(run))


def parts_of_teacher(run: Planned) -> list[tuple[Decoder, int]]:
    """Parts of the teacher that a rank has, and the number of tensor ranks over which each is cut: the layers and the
    head, or the whole teacher if both are cut alike.
    """
    whole, ranks = describe(model_of_teacher(run)), run.teacher_ranks
    if not ranks.is_apart:
        return [(whole, ranks.tensor)]
    layers = len(whole.layers)
    trunk, head = Stage(range(layers), is_last=False), Stage(range(layers, layers), is_first=False)
    return [(whole.part([trunk]), ranks.tensor), (whole.part([head]), ranks.student.tensor)]


@lru_cache(maxsize=256)
def _elements(part: Decoder, tensor: int) -> int:
    """Number of parameters of a part of the teacher on one rank."""
    target = Target.of(Layout(tensor=tensor))
    layers = sum(count * sum(p.size for p in layer_parameters(layer, target)) for layer, count in part.kinds.items())
    return layers + sum(p.size for p in root_parameters(part, target))
