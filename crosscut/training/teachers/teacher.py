"""A run's teacher on one rank: a trained model that computes its last hidden states for the tokens of the run.

The teacher's layers (its trunk) are cut over its own tensor ranks. Its head is cut like the head of the run's model:
each rank holds the rows of the teacher's output projection for its own part of the vocabulary. The logits of both
models are therefore cut alike, and no logits are sent (decision 99). If both are cut over as many tensor ranks, trunk
and head are one model. The logits of a task are few: the teacher's own ranks compute them, too, and only these logits
are returned.

In a pipeline, the ranks of the last stage have the teacher. It has no gradients and no optimizer state.

Shapes: B sequences, S tokens of a sequence, C context ranks, H hidden size of the teacher, F fields.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from crosscut.architecture import describe
from crosscut.architecture.inputs import Element
from crosscut.architecture.pipeline import Stage
from crosscut.config import ModelConfig, ResolvedRun
from crosscut.config.teachers import TeacherConfig, TeacherRanks, teacher_model
from crosscut.model import GPT, Batch, initialize
from crosscut.model.heads.head import Teaching
from crosscut.model.running import Runners
from crosscut.parallel import Axis, Mixture, ParallelMesh, RandomStreams
from crosscut.parallel.owners.teacher import TeacherMesh, make_teacher_mesh
from crosscut.pretrained import ModelSource
from crosscut.training.precision import torch_dtype

PARTS = ("data_loss", "distillation_loss")
"""Names of the two parts of the loss in metrics."""


def make_teacher(run: ResolvedRun, mesh: ParallelMesh) -> "Teacher | None":
    """Return the run's teacher on this rank, with weights of zero; None if the run has none. Every rank must call this
    function. The layout of the run may have more ranks than the mesh.
    """
    settings, wide = run.config.teacher, torch.promote_types(torch_dtype(run.training.numbers.compute), torch.float32)
    if not settings.teaches:
        return None
    if not settings.is_computed:
        stored = Teacher(mesh.device)
        stored.teaching = Teaching(mixture=mixture_of(settings), dtype=wide) if mesh.has_loss else None
        return stored
    tensor = min(run.config.teacher_ranks.tensor, mesh.layout.ranks.per_owner)
    model = replace(teacher_model(settings.folder), vocab_multiple=run.model.vocab_multiple)
    dtype = torch_dtype(settings.precision_in(run.precision))
    own = make_teacher_mesh(TeacherRanks(mesh.layout, tensor), mesh)
    found = ComputedTeacher(own)
    if mesh.has_loss:
        found.models = _Models.of(model, own, dtype)
        head = None if _solves(model) else found.models.head.head
        found.teaching = Teaching(head=head, mixture=mixture_of(settings), dtype=wide)
    return found


def mixture_of(settings: TeacherConfig) -> Mixture:
    """Return the mixture of the teacher's loss and the data's loss."""
    return Mixture(settings.alpha, settings.mixed_beta, settings.temperature)


def _solves(model: ModelConfig) -> bool:
    """Whether a teacher solves a task, and predicts no tokens."""
    return describe(model).head.vocabulary is None


class Teacher:
    """Teacher of a run on one rank. Its logits are stored ones, and the batches have them (`teachers.cache`)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.teaching: Teaching | None = None
        """Part of the teacher in the loss; None on a rank that computes no loss."""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Axes along which the teacher's messages are sent."""
        return ()

    @property
    def each(self) -> tuple[GPT, ...]:
        """Models of the teacher on the rank, each once."""
        return ()

    def load(self, source: ModelSource) -> None:
        """Load the teacher's weights. Raises `CheckpointError` if they cannot be read."""
        for model in self.each:
            source.fill(model)

    def initialize(self, seed: int) -> None:
        """Give the teacher random weights, which depend on the seed and the names of the parameters only."""
        for model in self.each:
            initialize(model, seed)

    def taught(self, batch: Batch) -> Batch:
        """Return this rank's part of a micro-batch with the teacher's results."""
        return batch

    def taken(self) -> Tensor:
        """Return the sums of the data's losses and of the teacher's losses [2] since the last call, on this rank."""
        sums = [] if self.teaching is None else self.teaching.sums
        total = sum((each.double() for each in sums), torch.zeros(2, dtype=torch.float64, device=self.device))
        sums.clear()
        return total


class ComputedTeacher(Teacher):
    """Teacher that computes its results in every step."""

    def __init__(self, mesh: TeacherMesh) -> None:
        super().__init__(mesh.trunk.device)
        self.mesh = mesh
        self.models: _Models | None = None
        """Models of the teacher; None on a rank that computes no loss."""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Axes along which the teacher's messages are sent."""
        return self.mesh.axes

    @property
    def each(self) -> tuple[GPT, ...]:
        """Models of the teacher on the rank, each once."""
        return () if self.models is None else self.models.each

    @torch.no_grad()
    def taught(self, batch: Batch) -> Batch:
        """Return this rank's part of a micro-batch with the teacher's last hidden states, [B, S/C, H], or with its
        logits of a task.

        Communication: the ranks of a block gather the fields that the teacher reads and its results, and the teacher's
        tensor ranks send the messages of a forward pass.
        """
        assert self.models is not None, "the rank computes no loss"
        read = {name: getattr(batch, name) for name in self.models.reads if getattr(batch, name) is not None}
        fields = self.mesh.gathered(torch.stack([each.long() for each in read.values()]))
        flags = {name for name, each in self.models.reads.items() if each is Element.FLAG}
        whole = Batch(**{name: x.bool() if name in flags else x for name, x in zip(read, fields.unbind(), strict=True)})
        if _solves(self.models.trunk.config):
            logits = self.mesh.returned(self.models.trunk.task_logits(whole), len(batch.tokens))
            return replace(batch, teacher_labels=logits)
        hidden = self.mesh.returned(self.models.trunk(whole), len(batch.tokens))
        return replace(batch, teacher=self.models.ended(hidden))


@dataclass(frozen=True, eq=False)
class _Models:
    """Trunk and head of a teacher on one rank. They are the same object if they are cut alike."""

    trunk: GPT
    head: GPT

    @classmethod
    def of(cls, model: ModelConfig, mesh: TeacherMesh, dtype: torch.dtype) -> "_Models":
        """Make the models on the mesh of the teacher, in evaluation mode and without gradients."""
        layers = model.num_layers
        stages = [Stage(range(layers))]
        if mesh.ranks.is_apart and not _solves(model):
            stages = [Stage(range(layers), is_last=False), Stage(range(layers, layers), is_first=False)]
        made = [
            GPT(model, mesh=on, streams=RandomStreams(on, seed=0), dtype=dtype, runners=Runners(stages=(stage,)))
            for stage, on in zip(stages, (mesh.trunk, mesh.head), strict=False)
        ]
        for each in made:
            each.eval().requires_grad_(False)
        return cls(made[0], made[-1])

    @property
    def each(self) -> tuple[GPT, ...]:
        """The models, each once."""
        return (self.trunk,) if self.trunk is self.head else (self.trunk, self.head)

    @property
    def reads(self) -> dict[str, Element]:
        """Type of each field that the teacher reads, by the field's name."""
        fields = describe(self.trunk.config).reads_without_loss
        return {name: read.kind for name, read in fields.items()}

    def ended(self, hidden: Tensor) -> Tensor:
        """Return the last hidden states, given the results of the trunk."""
        return hidden if self.trunk is self.head else self.head.ended(hidden)
