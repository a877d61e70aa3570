"""A model that learns from a teacher: the loss and its gradients on every layout, beside published logits."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from crosscut.config import IGNORED, Layout, RunConfig, load_run
from crosscut.model import Batch
from crosscut.parallel import CollectiveRecorder, make_mesh
from crosscut.pretrained import find_model
from crosscut.training.batches import BatchSource
from crosscut.training.precision import resolve_on
from crosscut.training.result import NonFiniteError
from crosscut.training.step import Trainer
from crosscut.training.teachers.record import digest_of, teacher_record
from crosscut.training.watching.diagnosis import explain_non_finite
from tests.parallel.test_distillation import trl_loss
from tests.pretrained.models import V, make, their_logits
from tests.ranks import RankPool

CPU = torch.device("cpu")
_SLOW = pytest.mark.slow  # another way to arrange the same exchange
S, BATCH = 16, 8
JSD = {"loss": "jsd", "beta": 0.3, "temperature": 2.0, "alpha": 0.6}
END = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of `transformers`, with an output projection of its own."""
    place = tmp_path_factory.mktemp("teacher")
    make(place, "llama")
    return place


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of `transformers`."""
    place = tmp_path_factory.mktemp("tied")
    make(place, "gpt2")
    return place


def test_the_record_of_a_teacher_changes_with_its_weights_and_not_with_its_place(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    ((_, one),), ((_, other),) = (teacher_record(find_model(place)).items() for place in (folder, copy))
    assert (one["name"], other["name"]) == (folder.name, "copy")
    assert one["sha256"] == other["sha256"]
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    ((_, changed),) = teacher_record(find_model(copy)).items()
    assert changed["sha256"] != one["sha256"]


def test_stored_logits_belong_to_every_byte_of_published_weights(tmp_path: Path) -> None:
    make(tmp_path, "llama")
    weights = tmp_path / "model.safetensors"
    source, tensors = find_model(tmp_path), load_file(weights)
    tensors["a.large"] = torch.zeros(1 << 20)
    found = []
    for value in (0.0, 1.0):
        tensors["a.large"][1 << 19] = value
        save_file(tensors, weights, metadata={"format": "pt"})
        found.append((digest_of(source), digest_of(source, whole=True)))
    (ends, whole), (same_ends, other) = found
    assert ends == same_ends
    assert whole != other


def run_of(layout: Layout, folder: Path, tensor: int, *, training: dict[str, Any] | None = None, **teacher: Any) -> Any:
    """A run of a student of 4 layers in float64, with micro-batches of two sequences on one reader."""
    return load_run(
        {
            "model": {
                "num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": V, "max_sequence_length": S,
                "dropout": 0.0,
            },
            "training": {
                "sequence_length": S, "steps": 10, "batch_size": BATCH, "precision": "float64", "z_loss": 0.01,
                "micro_batch_size": max(1, 2 // layout.data), "document_mask": True, **(training or {}),
            },
            "optimizer": {"warmup_steps": 0},
            "teacher": {"folder": str(folder), "tensor": tensor, **teacher},
            "layout": asdict(layout),
        }
    )  # fmt: skip


def whole_batch() -> Batch:
    """A batch with documents and with targets that are not predicted, of uneven numbers on the data ranks."""
    ids = torch.randint(1, V, (BATCH, S + 1), generator=torch.Generator().manual_seed(1))
    ids[:, 5] = END
    batch = Batch.from_ids(ids)
    targets = batch.targets.clone()
    targets[1, :9] = targets[6, 3] = IGNORED
    return replace(batch, targets=targets)


def steps(run: RunConfig, num_steps: int = 2) -> dict[str, Any]:
    """On a rank: run steps on that batch. Returns losses, gradient norms, and the largest number of elements of a
    message for each token.
    """
    mesh = make_mesh(run.layout, CPU)
    trainer = Trainer(resolve_on(run, CPU), mesh)
    assert trainer.teacher is not None
    trainer.teacher.load(find_model(run.teacher.folder))
    batch = whole_batch().with_documents(END) if run.training.document_mask else whole_batch()
    own = batch.chunk(mesh.reader.size)[mesh.reader.rank]
    told = []
    for step in range(num_steps):
        micro_batches = [part.part_of_rank(mesh.context) for part in own.chunk(run.num_micro_batches)]
        with CollectiveRecorder(mesh, more=trainer.teacher.axes) as recorder:
            values = trainer.step(step, micro_batches).values()
        told += [values[name] for name in ("loss", "gradient_norm", "data_loss", "distillation_loss")]
    weights = [] if trainer.teacher.models is None else [*trainer.teacher.models.trunk.parameters()]
    return {
        "told": told,
        "sent": list(recorder.sent),
        "is_fixed": not any(weight.requires_grad or weight.grad is not None for weight in weights),
    }


class _Given(BatchSource):
    """The batch of `whole_batch` at each step."""

    validation_bytes = 0

    def share(self, step: int) -> Batch:
        del step
        return whole_batch().chunk(self.mesh.reader.size)[self.mesh.reader.rank]

    def validation_batches(self) -> Iterator[Batch]:
        yield from ()

    def documents(self, step: int, micro_batch: int) -> list[tuple[str, int]]:
        return [("chat.jsonl", step + micro_batch)]


def explained(run: RunConfig, of_teacher: bool) -> str:
    """On a rank: the error about a step in which the teacher, or the model, is not finite."""
    trainer = Trainer(resolve_on(run, CPU), make_mesh(run.layout, CPU))
    teacher = trainer.teacher
    assert teacher is not None
    teacher.load(find_model(run.teacher.folder))
    broken = teacher.each[-1:] if of_teacher else (trainer.model,)
    for model in broken:
        next(model.parameters()).data.fill_(float("inf"))
    batches = _Given(run, trainer.mesh)
    with pytest.raises(NonFiniteError) as failure:
        trainer.step(0, batches.micro_batches(0)).wait()
    return str(explain_non_finite(failure.value, trainer, batches))


@pytest.mark.parametrize("layout", [Layout(), pytest.param(Layout(pipeline=2, data=2), marks=_SLOW)], ids=str)
def test_a_teacher_that_is_not_finite_is_named_and_not_the_data(ranks: RankPool, folder: Path, layout: Layout) -> None:
    run = run_of(layout, folder, 1)
    for told in ranks.run(layout.world_size, explained, run, True):
        assert told.startswith("The teacher's predictions must be finite, but at step 1, those of `teacher.folder`")
        assert "chat.jsonl" not in told
    for told in ranks.run(layout.world_size, explained, run, False):
        assert "on a batch made of chat.jsonl:0" in told


def student_logits(run: RunConfig) -> Tensor:
    """On a rank: the logits of the student before training."""
    trainer = Trainer(resolve_on(run, CPU), make_mesh(run.layout, CPU))
    with torch.no_grad():
        hidden = trainer.model.hidden_states(whole_batch())
        return trainer.model.logits_of(hidden.flatten(0, 1))


@pytest.mark.parametrize(
    "settings",
    [JSD, pytest.param({"loss": "forward_kl", "alpha": 1.0}, marks=pytest.mark.slow)],
    ids=["jsd", "forward"],
)
def test_the_teacher_is_that_of_transformers(ranks: RankPool, folder: Path, settings: dict[str, Any]) -> None:
    training = {"document_mask": False, "z_loss": 0.0}
    run = run_of(Layout(), folder, 1, training=training, precision="float64", **settings)
    (found,) = ranks.run(1, steps, run, 1)
    (student,) = ranks.run(1, student_logits, run)
    batch = whole_batch()
    targets, teacher = batch.targets.flatten(), their_logits(folder, torch.float64, batch.tokens).flatten(0, 1)
    kept, beta, heat = targets != IGNORED, run.teacher.mixed_beta, run.teacher.temperature
    learned = heat**2 * trl_loss(student, teacher, beta, heat)[kept].mean() / (beta * (1 - beta) or 1.0)
    data = F.cross_entropy(student, targets, ignore_index=IGNORED)
    loss = (1 - run.teacher.alpha) * data + run.teacher.alpha * learned
    assert found["told"][0] == pytest.approx(float(loss), rel=1e-12)
    assert found["told"][2:] == pytest.approx([float(data), float(learned)], rel=1e-12)
    assert found["is_fixed"]


_SPLIT = Layout(tensor=2, sequence_parallel=True, data=2, sharding="zero3")
LAYOUTS = [
    (Layout(data=2, tensor=2), 4),
    pytest.param(Layout(tensor=2), 1, marks=_SLOW),
    pytest.param(Layout(context=2, tensor=2), 1, marks=_SLOW),
    pytest.param(Layout(pipeline=2, tensor=2), 1, marks=_SLOW),
    pytest.param(Layout(tensor=2), 2, marks=_SLOW),
    pytest.param(_SPLIT, 1, marks=_SLOW),
    pytest.param(_SPLIT, 4, marks=_SLOW),
    pytest.param(Layout(data=4), 2, marks=_SLOW),
    pytest.param(Layout(context=2, data=2), 4, marks=_SLOW),
    pytest.param(Layout(context=2, tensor=2, sequence_parallel=True), 2, marks=_SLOW),
    pytest.param(Layout(pipeline=2, data=2), 2, marks=_SLOW),
    pytest.param(Layout(pipeline=2, stages_per_rank=2), 1, marks=_SLOW),
    pytest.param(Layout(pipeline=2, schedule="zero_bubble"), 1, marks=_SLOW),
]


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tied: Path) -> list[float]:
    """Figures of the uncut student with an uncut teacher."""
    found: list[float] = ranks.run(1, steps, run_of(Layout(), tied, 1, **JSD))[0]["told"]
    return found


@pytest.mark.parametrize(("layout", "tensor"), LAYOUTS, ids=str)
def test_the_layouts_of_student_and_teacher_change_nothing(
    ranks: RankPool, tied: Path, alone: list[float], layout: Layout, tensor: int
) -> None:
    """The second step shows the gradients of the first one. No rank gets the logits of the whole vocabulary."""
    for result in ranks.run(layout.world_size, steps, run_of(layout, tied, tensor, **JSD), time_limit=120.0):
        assert result["told"] == pytest.approx(alone, rel=1e-10)
        widest = {sent.axis: sent.elements for sent in result["sent"] if sent.axis.startswith(("teacher", "tensor"))}
        assert all(elements < BATCH * S * V / 2 for elements in widest.values())


@pytest.mark.slow  # compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_and_recomputed_layers_change_nothing(ranks: RankPool, tied: Path, alone: list[float]) -> None:
    training = {"compile": "on", "recompute": "full"}
    run = run_of(Layout(tensor=2), tied, 1, training=training, **JSD)
    for result in ranks.run(2, steps, run, time_limit=240.0):
        assert result["told"] == pytest.approx(alone, rel=1e-10)
