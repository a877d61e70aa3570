"""Functions that tests of training run on ranks."""

import contextlib
import io
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crosscut.config import RunConfig, TrainingError
from crosscut.data import open_tokens
from crosscut.logbook.contents import read_metrics
from crosscut.model import Batch
from crosscut.parallel import CollectiveRecorder, make_mesh
from crosscut.training.batches import TokenBatches, batches_of, samples_of
from crosscut.training.job import Resume, run_training
from crosscut.training.loop import Loop
from crosscut.training.precision import resolve_on
from crosscut.training.profiling.profiler import Profiler
from crosscut.training.result import NonFiniteError
from crosscut.training.step import Trainer
from crosscut.training.watching.diagnosis import explain_non_finite

CPU = torch.device("cpu")


def parts(run: RunConfig) -> tuple[Trainer, TokenBatches]:
    """Trainer and batches of a run on this rank. The run's folder is created."""
    Path(run.output.folder).mkdir(parents=True, exist_ok=True)
    mesh = make_mesh(run.layout, CPU)
    tokens = open_tokens(run.data, Path(run.tokens_folder), verify=False)
    return Trainer(resolve_on(run, CPU), mesh), batches_of(run, samples_of(run, tokens), mesh)


def losses_of(run: RunConfig, num_steps: int) -> list[float]:
    trainer, batches = parts(run)
    return [trainer.step(step, batches.micro_batches(step)).loss for step in range(num_steps)]


def loop(
    run: RunConfig, resume_from: Path | None = None, identity: dict[str, Any] | None = None, profile: bool = False
) -> dict[str, Any]:
    """Train the run on the ranks of the pool. Returns the outcome and the whole weights."""
    trainer, batches = parts(run)
    profiler = Profiler(trainer, Path(run.output.folder)) if profile else None
    outcome = Loop(trainer, batches, identity=identity, profiler=profiler).train(resume_from)
    vocab_size = run.model.vocab_size
    weights = {
        name: p.detach().full_tensor()[: vocab_size if name == "tokens.weight" else None].clone()
        for name, p in trainer.model.named_parameters()
    }
    return {"before": outcome.before.loss, "after": outcome.after.loss, "weights": weights}


def error_of(trainer: Trainer, batches: TokenBatches, resume_from: Path | None = None) -> str:
    """Train the run. Returns the text of the error that ended the run, or an empty text if all steps are done."""
    loop = Loop(trainer, batches)
    try:
        with loop.checkpoints.completed():
            loop.train(resume_from)
    except TrainingError as error:
        return str(error)
    return ""


def rows_of(run: RunConfig) -> list[dict[str, Any]]:
    """Rows of the run's metrics."""
    return read_metrics(Path(run.output.folder))


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of this rank's parts of the parameters."""
    return [p.detach().to_local().clone() for p in trainer.parameters]


def are_equal(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def whole_run(run: RunConfig, resume: Resume = False) -> str:
    """Run a whole training, from the tokens to the report, on ranks that are already running. Returns the output of
    this rank.
    """
    printed = io.StringIO()
    with started_ranks(), contextlib.redirect_stdout(printed):
        run_training(run, resume=resume)
    return printed.getvalue()


@contextlib.contextmanager
def started_ranks() -> Iterator[None]:
    """Context in which a command joins the ranks of the pool."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(dist.get_rank()))
        patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        patch.setattr(
            "crosscut.launch.door.process_group", lambda *_: contextlib.nullcontext()
        )  # the pool has created the group
        yield


def record_step(run: RunConfig) -> list[tuple[str, str, int, int]]:
    """Messages of one step: operation, axis, number of elements, and bytes per element."""
    trainer, batches = parts(run)
    micro_batches = batches.micro_batches(0)
    with CollectiveRecorder(trainer.mesh) as recorder:
        trainer.step(0, micro_batches)
    return [(*sent, size) for sent, size in zip(recorder.sent, recorder.element_bytes, strict=True)]


def poisoned_step(run: RunConfig, name: str, value: float) -> dict[str, Any]:
    """Run a step with one weight set to `value`. Returns the text of the error, and whether the other weights are
    unchanged.
    """
    trainer, batches = parts(run)
    for other, parameter in trainer.model.named_parameters():
        if other == name:
            parameter.data.to_local().view(-1)[0] = value
    before = weights_of(trainer)
    try:
        trainer.step(0, batches.micro_batches(0)).wait()
    except NonFiniteError as failure:
        error = explain_non_finite(failure, trainer, batches)
        assert isinstance(error, TrainingError)
        pairs = zip(before, weights_of(trainer), strict=True)
        same = all(torch.equal(a, b) or math.isnan(a.sum()) for a, b in pairs)
        return {"message": str(error), "unchanged": same}
    return {"message": "", "unchanged": False}


def masked_loss_and_gradient(run: RunConfig, num_ignored: list[int]) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of a batch whose sequences each have some targets ignored."""
    trainer, batches = parts(run)
    whole = batches.training.batch(0, batch_size=run.training.batch_size)
    tokens, targets = whole.tokens, whole.targets.copy()  # the targets are a view into the tokens
    for row, count in zip(targets, num_ignored, strict=True):
        row[:count] = -100
    data, micro = trainer.mesh.data, run.micro_batch_size
    first = data.rank * (run.training.batch_size // data.size)
    mine = [
        Batch(tokens=torch.from_numpy(tokens[i : i + micro]), targets=torch.from_numpy(targets[i : i + micro]))
        for i in range(first, first + run.training.batch_size // data.size, micro)
    ]
    loss = trainer.summed(trainer.accumulate(0, mine))
    return loss.item(), [p.grad.full_tensor()[: run.model.vocab_size] for p in trainer.parameters]
