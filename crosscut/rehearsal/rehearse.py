"""Dry run of one rank's training step."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import torch

from crosscut.architecture import Target, describe
from crosscut.architecture.inputs import Element
from crosscut.config import (
    ConfigError,
    LayoutError,
    ResolvedRun,
    RunConfig,
    default_loss_chunk,
    resolve,
)
from crosscut.config.precision import precision_on
from crosscut.config.training import Compile
from crosscut.model import Batch
from crosscut.parallel import Axis, CollectiveRecorder, ParallelMesh, Sent, make_mesh
from crosscut.parallel.pretended import pretended_ranks
from crosscut.planner.candidate import Candidate
from crosscut.planner.parameters import known_vocab_size
from crosscut.rehearsal.chunks import MOST_PARTS, equal_parts_once
from crosscut.rehearsal.ledger import Ledger, Peak
from crosscut.rehearsal.pretence import Device, WithoutMemory, as_on
from crosscut.training.optimization.optimizer import STATE
from crosscut.training.step import Trainer
from crosscut.training.teachers.cache import made_up_fields
from crosscut.training.watching.storages import resizing_told_to

_MOST_RANKS = 1 << 17
"""Largest world of a dry run. PyTorch's process groups hold a list of all ranks."""
_MOST_MICRO_BATCHES = 1 << 12
_MOST_TOKENS = 1 << 26
"""Most tokens of a micro-batch. The loss runs in chunks of some thousand tokens."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Memory, FLOPs and messages of one rank's training step, counted in the running program."""

    run: RunConfig
    rank: int
    device: Device
    peak: Peak
    """Peak memory of a step after the first. (The optimizer state exists from the end of the first step on.)"""
    flops: int
    """FLOPs of the rank's matrix products."""
    sent: list[Sent]
    element_bytes: list[int]
    """Bytes per element of each collective in `sent`."""
    seconds: float
    """Seconds that the dry run took."""

    @property
    def planned(self) -> Candidate:
        """Settings with which the planner forecasts this rank's step."""
        return Candidate.at(self.run, self.run.layout.ranks.owners.place_of(self.rank))


def rehearse(
    run: RunConfig,
    *,
    rank: int = 0,
    device: Device = "cuda",
    precision: str | None = None,
    tell: Callable[[int, int], None] = lambda _done, _total: None,
) -> Rehearsal:
    """Run the training step that rank `rank` of `run` would run on `device`, with fake tensors. The other ranks are
    simulated.

    If `training.precision` is "auto", the step uses `precision`, or the device's usual precision if `precision` is
    None. Layers run uncompiled, so the figures do not show the effect of `training.compile`. `tell` is called with the
    number of finished passes of layers and with the number of passes that the dry run makes. Raises `ConfigError` if
    `model.vocab_size` is 0 or the step is too large to be simulated, and `LayoutError` if `rank` is not a rank of the
    layout.
    """
    known_vocab_size(run.model)
    _require_possible(run)
    start = time.perf_counter()
    uncompiled = replace(run, training=replace(run.training, compile=Compile.OFF))
    resolved = resolve(uncompiled, device=device, precision=precision or precision_on(device))
    with pretended_ranks(run.layout.world_size, rank), torch.random.fork_rng(devices=()):
        mesh = make_mesh(replace(run.layout, symmetric_memory=False), torch.device("cpu"))
        with WithoutMemory(allow_non_fake_inputs=True), as_on(device):
            ledger, recorder = _count(resolved, mesh, tell)
            peak = ledger.peak()
    seconds = time.perf_counter() - start
    return Rehearsal(
        run=resolved.config,
        rank=rank,
        device=device,
        peak=peak,
        flops=ledger.flops,
        sent=recorder.sent,
        element_bytes=recorder.element_bytes,
        seconds=seconds,
    )


def _require_possible(run: RunConfig) -> None:
    """Raise `ConfigError` for a layout or a step that is too large to be simulated."""
    layout, (name, batch) = run.layout, run.training.smallest_batch
    if layout.world_size > _MOST_RANKS:
        raise LayoutError(
            f"The layout of a dry run must have at most {_MOST_RANKS:,} ranks, but {layout} has "
            f"{layout.world_size:,}. Use fewer data ranks; apart from messages, all of them do the same work."
        )
    if run.num_micro_batches > _MOST_MICRO_BATCHES:
        raise ConfigError(
            f"A step of a dry run must have at most {_MOST_MICRO_BATCHES:,} micro-batches, but `{name}` ({batch:,}) "
            f"gives {run.num_micro_batches:,}. Lower it, or raise `training.micro_batch_size`."
        )
    tokens = run.micro_batch_size * run.training.sequence_length
    if tokens > _MOST_TOKENS:
        raise ConfigError(
            f"A micro-batch of a dry run must have at most {_MOST_TOKENS:,} tokens, but has {tokens:,}. Set "
            "`training.micro_batch_size`."
        )


def _count(run: ResolvedRun, mesh: ParallelMesh, tell: Callable[[int, int], None]) -> tuple[Ledger, CollectiveRecorder]:
    target = Target.of(run.layout)
    vocabulary = describe(run.model).embedding.tokens.on(target).shape[0]
    chunk = default_loss_chunk(vocabulary, run.config.predicted_tokens, device=run.device)
    trainer = Trainer(run, mesh, loss_chunk_tokens=chunk)
    trainer.optimizer.prepare()
    shapes = {parameter.on(target).shape for parameter in describe(run.model).parameters()}
    ledger = Ledger(vocabulary=vocabulary, shapes=shapes, host_apart=run.device == "cuda")
    _enter_state(ledger, trainer)
    ledger.watch(trainer.model)
    is_piped = run.layout.num_stages > 1
    number = run.config.num_micro_batches
    _watch_progress(trainer, number if is_piped else min(number, MOST_PARTS), tell)
    batches, ahead = (blank_batches(run.config, mesh.context, has_loss=mesh.has_loss) for _ in range(2))
    for batch in (*batches, *ahead):  # those of the next step are read ahead
        ledger.enter("activations", {name: each for name, each in batch.given().items() if name.startswith("teacher")})
    recorder = CollectiveRecorder(mesh, more=() if trainer.teacher is None else trainer.teacher.axes)
    with recorder, ledger, resizing_told_to(ledger.resized), equal_parts_once(ledger, recorder):
        loss = trainer.accumulate(0, batches)
        for parameter in trainer.parameters:
            ledger.name_gradient(parameter)
        trainer.update(0, loss)
        trainer.optimizer.zero_grad()
    return ledger, recorder


def _watch_progress(trainer: Trainer, num_micro_batches: int, tell: Callable[[int, int], None]) -> None:
    """Call `tell` after each forward and each backward pass of a layer. A layer has ended its backward pass when its
    first trained parameter has a gradient.
    """
    blocks = list(trainer.model.blocks)
    done, total = count(1), 2 * len(blocks) * num_micro_batches
    for block in blocks:
        block.register_forward_hook(lambda *_: tell(min(next(done), total), total))
        trained = (parameter for parameter in block.parameters() if parameter.requires_grad)
        if (first := next(trained, None)) is not None:
            first.register_post_accumulate_grad_hook(lambda _: tell(min(next(done), total), total))


def _enter_state(ledger: Ledger, trainer: Trainer) -> None:
    """Record the weights, their moving average and the memories of gradients in low rank. Also record the moments,
    unless the moments are in host memory.
    """
    precision = trainer.run.training.numbers
    is_mixed = precision.compute != precision.accumulation
    parameters = dict(trainer.model.named_parameters())
    ledger.enter("master_weights" if is_mixed else "weights", parameters)
    if trainer.teacher is not None:
        for model in trainer.teacher.each:
            ledger.enter("weights", dict(model.named_parameters()))
    if trainer.average is not None:
        trainer.average.begin()
        ledger.enter("optimizer", trainer.average.tensors)
    if trainer.low_rank is not None:
        ledger.enter("optimizer", trainer.low_rank.state())
    for name in STATE:
        states = {key: trainer.optimizer.state[p] for key, p in parameters.items()}
        moments = {key: state[name] for key, state in states.items() if name in state}
        if trainer.run.device == "cuda" and "optimizer" in trainer.run.training.offload:
            ledger.pass_over(moments.values())
        else:
            ledger.enter("optimizer", moments)


def blank_batches(run: RunConfig, context: Axis, *, has_loss: bool = True) -> list[Batch]:
    """Return micro-batches of zeros, with the fields that the model reads and, on a rank that computes the loss
    (`has_loss`), stored logits of a teacher. In a multiple-choice task, all sequences of a micro-batch are options of
    one question.
    """
    fields = describe(run.model).reads(document_mask=run.training.document_mask).values()
    size = run.micro_batch_size
    sizes = {"sharing": size, "predicted": run.predicted_tokens}
    shapes = {read: read.shape(size, run.training.sequence_length, **sizes) for read in fields}
    dtypes = {Element.FLAG: torch.bool, Element.REAL: torch.float64}
    batches: list[Batch] = []
    for _ in range(run.num_micro_batches):
        zeros = {
            read.name: torch.zeros(shape, dtype=dtypes.get(read.kind, torch.long)) for read, shape in shapes.items()
        }
        logits = made_up_fields(run, (size, run.training.sequence_length), torch.Generator()) if has_loss else {}
        batches.append(Batch(**zeros, **logits).part_of_rank(context))
    return batches
