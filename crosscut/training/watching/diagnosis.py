"""Search for the origin of a loss or gradient that is NaN or infinite: the step, the layer and the documents. Check
that the replicas of each parameter are equal.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from crosscut.config import IGNORED, TrainingError
from crosscut.flight import RECORD, RunPhase
from crosscut.model import GPT
from crosscut.model.stages import forward_loss
from crosscut.parallel import ParallelMesh, TopLogits, find_drift, global_gradient_norm
from crosscut.parallel.collectives import all_gather_objects, from_all_ranks
from crosscut.training.batches import BatchSource
from crosscut.training.result import NonFiniteError
from crosscut.training.speed.compilation import uncompiled
from crosscut.training.step import Trainer

_MAX_DOCUMENTS = 8
_ROWS = 256
"""Number of tokens whose logits of the teacher are checked at once."""


class _Origin(NamedTuple):
    """Origin of the non-finite values: the module or parameter with the first of these values. Origins are ordered by
    time: the smallest origin is the earliest.
    """

    micro_batch: int
    depth: int
    """Depth of the module in a pipeline (`_depth`). In the backward pass, the negative of this depth."""
    order: int
    """Number of inputs and outputs of modules that this rank checked until it found the first non-finite value. In the
    backward pass, number of gradients that this rank checked before it found the first one that is not finite."""
    data_rank: int
    place: str


def require_equal_replicas(trainer: Trainer, step: int) -> None:
    """Raise `TrainingError` on all ranks if replicas of a parameter, or of its average, differ after `step` steps."""
    average = {} if trainer.average is None else trainer.average.tensors
    averages = {f"average of {name}": tensor for name, tensor in average.items()}
    RECORD.phase(RunPhase.COMPARISON)
    drift = find_drift({**dict(trainer.model.named_parameters()), **averages}, trainer.mesh)
    if drift is None:
        return
    ranks = ", ".join(map(str, drift.ranks))
    where = f"differs from the majority (ranks: {ranks})" if drift.others else f"differs between ranks {ranks}"
    more = f" (other parameters that differ: {drift.num_parameters - 1})" if drift.num_parameters > 1 else ""
    raise TrainingError(
        f"`{drift.name}` must have identical values in all its replicas, but after step {step} it {where}, by up "
        f"to {drift.size:.1e} of its largest element{more}. "
        "These weights are not saved; the earlier checkpoints are safe. Check these ranks for failing memory or a "
        "failing device, and run again with --resume auto."
    )


def explain_non_finite(failure: NonFiniteError, trainer: Trainer, batches: BatchSource) -> TrainingError:
    """Return the error that tells the user where the first non-finite value of a step appeared. Every rank must call
    this function.

    The step is repeated with the same dropout and weights. The origin is the first module with an input or output that
    is not finite on at least one rank. If all inputs and outputs are finite, the origin is the non-finite parameter
    gradient closest to the loss. If the repeated step is finite, gradient norm included, neither the batch nor the
    weights are the cause, and the error says that a device has probably failed. If only some ranks had a value that was
    not finite, the error names these ranks.

    If the model's forward pass is finite and its teacher's is not, the error names the teacher. A loss scale that has
    fallen too low affects only the backward pass. If the failure has the error `exhausted` and both forward passes are
    finite, the function therefore returns `exhausted`.
    """
    step, exhausted = failure.step, failure.exhausted
    forward = _first_over_ranks(_origin_in_forward(step, trainer, batches), trainer)
    if forward is None and not all(from_all_ranks(_teacher_is_finite(step, trainer, batches), trainer.mesh)):
        return _fault_of_teacher(step, trainer)
    if forward is None and exhausted is not None:
        return exhausted
    backward = _first_over_ranks(_origin_in_backward(step, trainer, batches), trainer)
    if forward is None and backward is None and _norm_is_finite(trainer):
        return _fault_of_machine(failure, trainer.mesh)
    origin = forward or backward or _Origin(0, 0, 0, 0, "the sum of the gradients (each gradient is finite)")
    mine = [batches.documents(step, index) for index in range(batches.num_micro_batches(step))]
    parts = all_gather_objects(mine, trainer.mesh.data)  # by data rank, by micro-batch
    if forward:
        documents = parts[origin.data_rank][origin.micro_batch]
    else:  # gradients are sums over all micro-batches of all ranks
        documents = [document for part in parts for micro_batch in part for document in micro_batch]
    shown = ", ".join(f"{source}:{record}" for source, record in documents[:_MAX_DOCUMENTS])
    more = f" and {len(documents) - _MAX_DOCUMENTS} more" if len(documents) > _MAX_DOCUMENTS else ""
    way_out = "lower `optimizer.learning_rate`"
    if exhausted is not None:  # the precision is float16, which overflows above 65,504
        way_out = 'lower `optimizer.learning_rate`, or set training.precision="bfloat16",'
    return TrainingError(
        f"The loss and its gradient must be finite, but at step {step + 1} they are not. The first non-finite value "
        f"appeared in {origin.place}, on a batch made of {shown}{more}. The weights and checkpoints are those from "
        f"before the step. Check these documents, or {way_out} and run again with --resume auto."
    )


def _fault_of_teacher(step: int, trainer: Trainer) -> TrainingError:
    """Return the error for a step in which the teacher's predictions are not finite."""
    teacher = trainer.run.config.teacher
    whose, remedy = (
        f"`teacher.folder` (`{teacher.folder}`)",
        'Set teacher.precision="float32", or choose another teacher',
    )
    if teacher.cache:
        whose = f"`teacher.cache` (`{teacher.cache}`)"
        remedy = "Store them in a new folder, with `crosscut prepare teacher`"
    return TrainingError(
        f"The teacher's predictions must be finite, but at step {step + 1}, those of {whose} are not, and those of the "
        "model are. The weights and checkpoints are those from before the step. "
        f"{remedy}, and run again with --resume auto."
    )


def _teacher_is_finite(step: int, trainer: Trainer, batches: BatchSource) -> bool:
    """Whether the teacher's logits are finite on this rank for all targets of the step. Every rank must call this
    function.
    """
    teacher = trainer.teacher
    if teacher is None or teacher.teaching is None:
        return True
    found = True
    for batch in batches.micro_batches(step):  # to the end, because the other ranks wait for the exchange
        taught = teacher.taught(batch)
        if taught.teacher_labels is not None:
            found &= bool(taught.teacher_labels.isfinite().all())
            continue
        logits = teacher.teaching.of(taught).logits
        assert batch.targets is not None
        counts = batch.targets.flatten() != IGNORED
        counts = counts if batch.predicted is None else counts[batch.predicted]
        for start in range(0, len(counts), _ROWS):
            piece = logits(slice(start, start + _ROWS))
            known = piece.known if isinstance(piece, TopLogits) else piece.isfinite().all(1)
            found &= bool((known | ~counts[start : start + _ROWS]).all())
    return found


def _fault_of_machine(failure: NonFiniteError, mesh: ParallelMesh) -> TrainingError:
    """Return the error for a step that is finite when it is repeated. Every rank must call this function."""
    ranks, places = _ranks_at_fault(failure, mesh)
    where, checked = "", "the machines"
    if ranks:
        numbers = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        where, checked = f" on {numbers}{places}", f"the machine{'s' if len(ranks) > 1 else ''} of {numbers}"
    return TrainingError(
        f"The loss and its gradient must be finite, but at step {failure.step + 1} they were not{where}. The same "
        "step, repeated, is finite, so neither the documents nor the learning rate are the cause. Probably a value has "
        "changed in the memory of a device. The weights and checkpoints are those from before the step. Check "
        f"{checked} for failing memory or a failing device, and run again with --resume auto."
    )


def _ranks_at_fault(failure: NonFiniteError, mesh: ParallelMesh) -> tuple[list[int], str]:
    """Return the ranks on which a value was not finite, and a clause with the positions that these ranks share on the
    axes of the layout. Both results are empty if all ranks had only finite values, or if every rank had a non-finite
    value, as after a sum over all ranks. Every rank must call this function.
    """
    place = {axis.name: axis.rank for axis in mesh.axes if axis.size > 1}
    told = from_all_ranks((failure.is_finite_here, place), mesh)
    found = {rank: at for rank, (is_finite, at) in enumerate(told) if not is_finite}
    if not found or len(found) == len(told):
        return [], ""
    shared = [name for name in place if len({at[name] for at in found.values()}) == 1]
    first = next(iter(found.values()))
    clause = ", ".join(f"position {first[name]} on the axis `{name}`" for name in shared)
    return list(found), f" ({clause})" if clause else ""


def _first_over_ranks(origin: _Origin | None, trainer: Trainer) -> _Origin | None:
    """Return the earliest origin of all ranks. None if no rank found an origin. Every rank must call this function."""
    return min(filter(None, from_all_ranks(origin, trainer.mesh)), default=None)


def _origin_in_forward(step: int, trainer: Trainer, batches: BatchSource) -> _Origin | None:
    """Run the forward pass of every micro-batch and return the origin of the first non-finite value on this rank.

    A rank never stops early, because the other ranks wait for its collectives in every micro-batch.
    """
    first: _Origin | None = None
    for index, batch in enumerate(batches.micro_batches(step)):
        seen: list[tuple[str, str]] = []
        trainer.streams.restart(step=step, micro_batch=index)
        with torch.no_grad(), uncompiled(trainer.model), _watched(trainer.model, seen) as order:
            loss = forward_loss(trainer.model, batch)
        if not seen and not loss.isfinite():
            seen.append(("loss", "the loss itself"))
        if seen and first is None:
            name, place = seen[0]
            first = _Origin(index, _depth(trainer.model, name), order[0], trainer.mesh.reader.rank, place)
    if trainer.mesh.channels is not None:
        trainer.mesh.channels.finish()
    return first


def _depth(model: GPT, name: str) -> int:
    """Depth of a module or parameter in a model whose layers are on several ranks: 0 for the embedding, 1 + i for layer
    i, and a larger number for the head and the loss. Without a pipeline, 0 for all.
    """
    if not model.mesh.is_staged:
        return 0
    part, _, rest = name.partition(".")
    if part == "blocks" and rest:
        return 1 + int(rest.partition(".")[0])
    return 0 if part in _EMBEDDING else 1 + model.config.num_layers


_EMBEDDING = ("tokens", "positions", "token_types", "embedding_norm", "dropout")
"""Modules before the first layer."""


@contextmanager
def _watched(model: nn.Module, seen: list[tuple[str, str]]) -> Iterator[list[int]]:
    """Context that finds the first input or output of a module that is not finite, and appends it to `seen` as (name of
    the module, text such as "the output of `blocks.0`"). The context yields a list with one number: the number of
    inputs and outputs that were checked, up to the appended one.

    The pass is never cut short, because the other ranks wait for this rank's collectives.
    """
    order = [0]

    def note(name: str, end: str, value: object) -> None:
        if not seen:
            order[0] += 1
            value = value[0] if isinstance(value, tuple) else value  # a layer returns sums beside its result
            if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
                seen.append((name, f"the {end} of `{name}`"))

    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _, a, n=name: note(n, "input", a[0])))
        handles.append(module.register_forward_hook(lambda _, __, y, n=name: note(n, "output", y)))
    try:
        yield order
    finally:
        for handle in handles:
            handle.remove()


def _norm_is_finite(trainer: Trainer) -> bool:
    """Whether the norm of the repeated step's gradients is finite. Every rank must call this function."""
    norm = global_gradient_norm(trainer.model.embedding.counted_once(trainer.parameters), trainer.mesh.owners)
    return all(from_all_ranks(bool(norm.isfinite()), trainer.mesh))


def _origin_in_backward(step: int, trainer: Trainer, batches: BatchSource) -> _Origin | None:
    trainer.optimizer.zero_grad()  # remove the gradients of a step that was launched after the failed step
    trainer.accumulate(step, batches.micro_batches(step))
    backward_order = reversed(list(trainer.model.named_parameters()))
    for order, (name, parameter) in enumerate(backward_order):
        if parameter.grad is not None and not parameter.grad.to_local().isfinite().all():  # type: ignore[attr-defined]
            return _Origin(
                0, -_depth(trainer.model, name), order, trainer.mesh.reader.rank, f"the gradient of `{name}`"
            )
    return None
