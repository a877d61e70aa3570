"""Reasons why a layout is impossible or does not fit, as clauses for the user: sentences without the full stop."""

from functools import lru_cache
from math import isqrt

from crosscut.config import Layout, ModelConfig
from crosscut.config.layouts.compilation import reason_against_compiling
from crosscut.config.layouts.context import reason_against_exchange
from crosscut.config.layouts.limits import tensor_limits
from crosscut.config.teachers import TeacherConfig, teacher_model
from crosscut.planner.candidate import Candidate, Planned
from crosscut.planner.hardware import Hardware
from crosscut.planner.memory import MemoryForecast

MOST_PASSES = 250_000
"""Maximum number of micro-batches times stages of a step with a pipeline. Simulating so many takes about a second."""
_MOST_PIPELINE = isqrt(MOST_PASSES)


def reason_against_arrangement(run: Planned, layout: Layout) -> str:
    """Reason why the model or the batch rules out this arrangement of ranks, whatever the memory. Empty if the
    arrangement is possible.
    """
    _, batch = run.training.smallest_batch
    model = run.model
    if reason := reason_against_tensor(model, layout.tensor) or reason_against_exchange(model, layout):
        return reason
    if run.teacher.is_computed and (reason := _reason_against_teacher(run.teacher, layout)):
        return reason
    if model.num_experts % layout.expert:
        return f"{model.num_experts} experts cannot be divided evenly over {layout.expert} expert ranks"
    own, num_ranks = layout.share_of(batch), layout.pipeline
    if not layout.divides(batch):
        return f"a batch of {batch} sequences cannot be divided evenly over {layout.data} data ranks"
    if num_ranks > model.num_layers:
        return f"{model.num_layers} layers cannot be cut into {num_ranks} pipeline stages"
    if num_ranks > _MOST_PIPELINE:
        return f"a pipeline of more than {_MOST_PIPELINE:,} ranks cannot be forecast"
    if own < num_ranks:
        return (
            f"a data rank's share of the batch ({own} sequences) gives fewer micro-batches than "
            f"the {num_ranks} pipeline ranks need"
        )
    return ""


def _reason_against_teacher(teacher: TeacherConfig, layout: Layout) -> str:
    """Reason why the ranks of a layout cannot have the teacher, as a clause. Empty if they can."""
    tensor, ranks = teacher.tensor or layout.tensor, layout.ranks.per_owner
    if ranks % tensor:
        return f"{tensor} tensor ranks of the teacher do not divide the {ranks} ranks that compute the loss"
    reason = reason_against_tensor(teacher_model(teacher.folder), tensor)
    return reason and f"the teacher cannot be cut: {reason}"


def reason_against_several_stages(run: Planned, layout: Layout) -> str:
    """Reason why no rank of a pipeline can have several stages, as a clause. Empty if several stages per rank are
    possible.
    """
    layers, each, num_ranks = run.model.num_layers, layout.share_of(run.training.smallest_batch[1]), layout.pipeline
    if layers % num_ranks or layers == num_ranks:
        return f"{layers} layers cannot be divided evenly over {num_ranks} ranks with several stages each"
    if each % num_ranks:
        return (
            f"with several stages per rank, the number of micro-batches must be a multiple of the number of pipeline "
            f"ranks ({num_ranks}), but a data rank has {each} sequences per step"
        )
    return ""


@lru_cache
def reason_against_tensor(model: ModelConfig, tensor: int) -> str:
    """Reason why the model cannot be cut over `tensor` ranks, as a clause. Empty if the model can be cut."""
    return next((each.reason_against(tensor) for each in tensor_limits(model) if not each.allows(tensor)), "")


def memory_of_rank(hardware: Hardware, num_ranks: int) -> int:
    """Bytes of memory available to one rank. The ranks on a CPU divide the memory of the CPU evenly."""
    return hardware.memory // num_ranks if hardware.device == "cpu" else hardware.memory


def reason_against_memory(candidate: Candidate, memory: MemoryForecast, hardware: Hardware) -> str:
    """Reason why a candidate does not fit into the memory of a rank. Empty if the candidate fits.

    The reason names the weights and the optimizer if their bytes alone exceed the memory. If only the bytes of weights,
    optimizer and gradients together exceed the memory, the reason names all three. Otherwise, the reason names the
    activations and buffers of a micro-batch.
    """
    num_ranks = candidate.layout.world_size
    limit = memory_of_rank(hardware, num_ranks)
    who = f"each of {num_ranks} ranks has" if hardware.device == "cpu" else "the GPU has"
    if memory.total <= limit:
        return ""
    weights = memory.weights + memory.master_weights + memory.optimizer
    if weights > limit:
        return f"weights and optimizer need {_gigabytes(weights)} GB per rank; {who} {_gigabytes(limit)} GB"
    if weights + memory.gradients > limit:
        with_gradients = _gigabytes(weights + memory.gradients)
        return f"weights, optimizer and gradients need {with_gradients} GB per rank; {who} {_gigabytes(limit)} GB"
    rest = memory.total - weights - memory.gradients
    return (
        f"activations and buffers of a micro-batch of {candidate.micro_batch_size} need {_gigabytes(rest)} GB per rank "
        f"besides {_gigabytes(weights + memory.gradients)} GB of state; {who} {_gigabytes(limit)} GB"
    )


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.0f}" if num_bytes >= 10e9 else f"{num_bytes / 1e9:.1f}"


def reason_against_asked_compiling(run: Planned, layout: Layout) -> str:
    """Reason why the layers cannot be compiled although `training.compile` is "on", as a clause. Empty if the layers
    can be compiled or need not be compiled.
    """
    reason = reason_against_compiling(run.model, layout) if run.training.compile == "on" else ""
    return f'`training.compile` is "on", but {reason}' if reason else ""
