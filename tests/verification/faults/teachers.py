"""Faults of a teacher: its part in the loss, and the exchange of its inputs and results. `mutations` says how a fault
is planted. A fault that would change the uncut model as well is planted in the cut one only.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config import Layout
from crosscut.model import Batch
from crosscut.parallel import Mixture, cross_entropy, distillation
from crosscut.parallel.distillation import VocabularyPart
from crosscut.parallel.owners import teacher as owners
from crosscut.parallel.owners.teacher import TeacherMesh
from crosscut.training.teachers.teacher import ComputedTeacher
from tests.verification.mutations import DATA, PACKED, TENSOR, Patch, fault, instead_of
from tests.verification.runs import STORED, TEACHER

CONTEXT = Layout(context=2, tensor=2)
Distil = Callable[[Tensor, Tensor, VocabularyPart, Mixture], tuple[Tensor, Tensor]]


def of_teacher(description: str, layout: Layout = TENSOR, **options: Any) -> Any:
    return fault(description, "loss", layout, teacher=TEACHER, **options)


def in_loss(changed: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Patch], None]:
    """Decorator for a fault in the teacher's part in the loss of the cut model."""

    @instead_of(cross_entropy, "distil")
    def plant(distil: Distil, log_p: Tensor, logits: Tensor, part: VocabularyPart, mixture: Mixture) -> Any:
        faulty = changed if part.axis.size > 1 else lambda plain, *arguments: plain(*arguments)
        return faulty(distil, log_p, logits, part, mixture)

    return plant


def of_messages(wrong: Callable[[int, str], bool]) -> Callable[[Patch], None]:
    """Return a fault in which the result of some messages of a loss with a teacher is not used. Their number, from 0,
    and their operation tell which.
    """

    def plant(patch: Patch) -> None:
        plain, number = distillation.all_reduce, [0]

        def all_reduce(x: Tensor, axis: Any, operation: str = "sum") -> Tensor:
            number[0] += 1
            found = plain(x, axis, operation)
            return x.clone() if wrong((number[0] - 1) % 3, operation) else found

        patch.setattr(distillation, "all_reduce", all_reduce)

    return plant


of_teacher("the largest logits of teacher and model are those of a rank")(of_messages(lambda i, _: i == 0))
of_teacher("the sums of teacher and model are those of a rank")(of_messages(lambda i, _: i == 1))
of_teacher("the divergence is that of a rank's part of the vocabulary")(of_messages(lambda i, _: i == 2))


@of_teacher("the teacher's loss has no square of the temperature")
@in_loss
def no_square(distil: Distil, log_p: Tensor, logits: Tensor, part: VocabularyPart, mixture: Mixture) -> Any:
    losses, error = distil(log_p, logits, part, mixture)
    return losses / mixture.temperature**2, error / mixture.temperature**2


@of_teacher("the gradient of the teacher's loss has the square of the temperature")
@in_loss
def gradient_squared(distil: Distil, log_p: Tensor, logits: Tensor, part: VocabularyPart, mixture: Mixture) -> Any:
    losses, error = distil(log_p, logits, part, mixture)
    return losses, error * mixture.temperature


@of_teacher("teacher and model change places in the mixture")
@in_loss
def swapped_beta(distil: Distil, log_p: Tensor, logits: Tensor, part: VocabularyPart, mixture: Mixture) -> Any:
    return distil(log_p, logits, part, mixture._replace(beta=1 - mixture.beta))


@of_teacher("the mixture is that of a rank's part of the vocabulary")
@instead_of(distillation, "partial_divergences")
def mixture_of_part(plain: Any, log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    found: Tensor = plain(log_s - log_s.logsumexp(1, True), log_t - log_t.logsumexp(1, True), beta)
    return found


@of_teacher("teacher and data change places in the loss")
@instead_of(cross_entropy, "_taught")
def swapped_alpha(plain: Any, chunk: Any, log_p: Tensor, losses: Tensor, plan: Any) -> Any:
    teaching = plan.settings.distillation
    if plan.part.axis.size > 1:
        other = replace(teaching, mixture=teaching.mixture._replace(alpha=1 - teaching.mixture.alpha))
        plan = plan._replace(settings=replace(plan.settings, distillation=other))
    return plain(chunk, log_p, losses, plan)


def _is_cut(teacher: ComputedTeacher) -> bool:
    return teacher.mesh.ranks.student.world_size > 1


@of_teacher("the teacher sees all documents of a sequence", training=PACKED)
@instead_of(ComputedTeacher, "taught")
def all_documents(taught: Any, self: ComputedTeacher, batch: Batch) -> Batch:
    if not _is_cut(self):
        return taught(self, batch)  # type: ignore[no-any-return]
    found = taught(self, replace(batch, documents=None, positions=None))
    return replace(batch, teacher=found.teacher)


@of_teacher("the teacher drops like a model that learns")
@instead_of(ComputedTeacher, "taught")
def drops(taught: Any, self: ComputedTeacher, batch: Batch) -> Batch:
    found: Batch = taught(self, batch)
    assert found.teacher is not None
    return replace(found, teacher=F.dropout(found.teacher, 0.1)) if _is_cut(self) else found


@of_teacher("every context rank gets the teacher's results of the first one", CONTEXT)
@instead_of(TeacherMesh, "returned")
def results_of_the_first(returned: Any, self: TeacherMesh, results: Tensor, size: int) -> Tensor:
    first: TeacherMesh = replace(self, tokens=replace(self.tokens, rank=0))
    found: Tensor = returned(first, results, size)
    return found


@of_teacher("all groups compute the teacher for the first sequences")
@instead_of(TeacherMesh, "gathered")
def first_sequences(gathered: Any, self: TeacherMesh, fields: Tensor) -> Tensor:
    found: Tensor = gathered(replace(self, shares=replace(self.shares, rank=0)), fields)
    return found


@of_teacher("the teacher reads the pieces of a sequence in the order of the ranks", CONTEXT)
@instead_of(owners, "join_zigzag")
def pieces_in_order(_plain: Any, parts: Any, dim: int) -> Tensor:
    return torch.cat(tuple(parts), dim)


def of_stored(description: str, layout: Layout = TENSOR, **options: Any) -> Any:
    return fault(description, "loss", layout, teacher=STORED, **options)


of_stored("the stored logits' rest of the vocabulary is that of a rank")(of_messages(lambda i, _: i == 1))


@of_stored("each rank takes the ids of stored logits for those of its own part")
@instead_of(distillation, "_columns")
def own_ids(plain: Any, ids: Tensor, part: VocabularyPart) -> Tensor:
    return plain(ids, part._replace(first=0))  # type: ignore[no-any-return]


@of_stored("stored logits of other ranks fall into the last column of a rank")
@instead_of(distillation, "_columns")
def last_column(plain: Any, ids: Tensor, part: VocabularyPart) -> Tensor:
    found: Tensor = plain(ids, part)
    return found.clamp(max=part.num_real - 1) if part.axis.size > 1 else found


@of_stored("the stored logits are not divided by the temperature")
@instead_of(distillation, "_beside")
def not_heated(plain: Any, log_s: Tensor, top: Any, part: VocabularyPart, heat: float) -> Tensor:
    colder = top._replace(logits=top.logits * heat) if part.axis.size > 1 else top
    return plain(log_s, colder, part, heat)  # type: ignore[no-any-return]


@of_stored("the rest of the vocabulary has no part in the loss of stored logits")
@instead_of(distillation, "_beside")
def no_rest(plain: Any, log_s: Tensor, top: Any, part: VocabularyPart, heat: float) -> Tensor:
    if part.axis.size > 1:
        top = top._replace(logits=torch.cat([top.logits[:, :-1], top.logits[:, -1:] - 100], 1))
    return plain(log_s, top, part, heat)  # type: ignore[no-any-return]


@of_stored("every data rank reads the stored logits of the first one", DATA)
@instead_of(Batch, "chunk")
def of_first_reader(chunk: Any, self: Batch, num_parts: int) -> Any:
    parts = chunk(self, num_parts)  # without micro-batches, these are the parts of the data ranks
    return [replace(part, teacher=parts[0].teacher, teacher_ids=parts[0].teacher_ids) for part in parts]


@of_stored("every context rank reads the stored logits of the first one", CONTEXT)
@instead_of(Batch, "part_of_rank")
def part_of_first(part_of_rank: Any, self: Batch, axis: Any) -> Batch:
    found, first = part_of_rank(self, axis), part_of_rank(self, replace(axis, rank=0))
    return replace(found, teacher=first.teacher, teacher_ids=first.teacher_ids)
