"""`crosscut prepare teacher`: compute a run's teacher once over the run's samples, and store its likeliest logits.

The ranks are as many as those of the run. The teacher is cut over `teacher.tensor` of them, and each group of tensor
ranks computes parts of the store of its own. The logits stay cut: the ranks of a group exchange only their k largest.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from crosscut.config import IGNORED, ConfigError, Layout, ResolvedRun, RunConfig, TrainingError, default_loss_chunk
from crosscut.config.system.folder_lock import FolderLock
from crosscut.config.system.terminal import echo
from crosscut.data import open_tokens
from crosscut.data.folders import unwritable
from crosscut.data.logits import LogitForm, LogitStore, Rows
from crosscut.evaluation.progress import Bar, progress
from crosscut.launch import Ranks, in_ranks
from crosscut.launch.door import Done
from crosscut.launch.processes import choose_device
from crosscut.logbook.skips import own_record
from crosscut.model import Batch
from crosscut.parallel import TopLogits, make_mesh, top_logits
from crosscut.parallel.distillation import VocabularyPart
from crosscut.pretrained import ModelSource
from crosscut.training.batches import TokenBatches, batches_of, samples_of
from crosscut.training.driving.preparation import tokens_of, with_vocabulary
from crosscut.training.precision import resolve_on, torch_dtype
from crosscut.training.spikes.record import new_record
from crosscut.training.teachers.cache import form_of, num_samples_of
from crosscut.training.teachers.requirements import find_teacher
from crosscut.training.teachers.teacher import Teacher, make_teacher


@dataclass(frozen=True)
class _Task:
    """Work of the ranks."""

    run: ResolvedRun
    """The run, with a teacher that is computed."""
    folder: Path
    form: LogitForm
    source: ModelSource
    parts: tuple[range, ...]
    """Samples of each part of the store that is missing."""


def prepare_teacher(run: RunConfig) -> None:
    """Store the teacher's logits for all samples that a run reads, on the ranks of the run. If the store has some of
    them, the rest is added.

    Raises `ConfigError`, `LayoutError`, `DataError` or `CheckpointError` before any rank starts, for a teacher that
    cannot teach the run, a folder with other content, and too little space on the disk.
    """
    for name in ("folder", "cache"):
        if not getattr(run.teacher, name):
            raise ConfigError(
                f"`teacher.{name}` must be given to store the logits of a teacher, but is empty. Set "
                f"`teacher.{name}` to {'the folder of the teacher' if name == 'folder' else 'a new folder'}."
            )
    run.require_objective()
    resolved = resolve_on(run, choose_device(run.training.device))
    tensor = run.teacher_ranks.tensor
    layout = Layout(tensor=tensor, data=max(run.layout.world_size // tensor, 1))
    ranks = Ranks(layout=layout, device=run.training.device)
    with ExitStack() as until_the_end:
        in_ranks(ranks, partial(_store, layout), prepare=partial(_task_of, resolved, until_the_end))


def _task_of(resolved: ResolvedRun, until_the_end: ExitStack) -> _Task | Done[None]:
    """Prepare the tokens, check the teacher, lock the folder until the stack is closed, check it, and print the size of
    the store.
    """
    tokens = tokens_of(resolved.config, is_resumed=False)
    run = with_vocabulary(resolved.config, tokens)
    computed = resolved.with_config(replace(run, teacher=run.teacher.computed))
    source = find_teacher(computed, tokens.tokenizer())
    assert source is not None, "the run computes no teacher"
    _require_exact(resolved.with_config(run), source)
    form, number = form_of(resolved.with_config(run), tokens, source), _num_samples(run)
    folder = Path(run.teacher.cache)
    until_the_end.enter_context(FolderLock(folder).held(partial(echo, err=True)))
    store = LogitStore.find(folder, form)
    parts = tuple(store.missing(number))
    samples = sum(map(len, parts))
    size = number * form.sample_bytes
    echo(
        f"{folder}: {form.k:,} logits of {source.title} in {form.precision}, with ids in {form.row['ids'].base.name}, "
        f"for {number * form.length:,} tokens: {form.row.itemsize:,} bytes each, {size / 1e9:,.2f} GB in all, of which "
        f"{(number - samples) * form.sample_bytes / 1e9:,.2f} GB are stored."
    )
    _require_space(folder, samples * form.sample_bytes)
    store.begin()
    return _Task(computed, folder, store.form, source, parts) if parts else Done(None)


def _require_exact(run: ResolvedRun, source: ModelSource) -> None:
    """Raise `ConfigError` for a teacher whose logits lose digits in the type in which they are stored."""
    precision = run.config.teacher.precision_in(run.precision)
    if source.model.logit_softcap and precision not in ("float32", "float64"):
        raise ConfigError(
            f"`teacher.precision` must be float32 or float64 to store the logits of `{source.title}`, because its soft "
            f'cap is computed in float32, but is {precision}. Set teacher.precision="float32".'
        )


def _num_samples(run: RunConfig) -> int:
    """Number of sequences that the run reads or leaves out, as a new run or after its own record of spikes."""
    own = own_record(Path(run.output.folder))
    return max(num_samples_of(run, record.skips) for record in (new_record(run), own) if record)


def _require_space(folder: Path, needed: int) -> None:
    """Raise `ConfigError` if the disk has too little space."""
    if needed > (free := shutil.disk_usage(folder).free):
        raise ConfigError(
            f"`teacher.cache` must be on a disk with {needed / 1e9:,.1f} GB of free space, but `{folder}` has "
            f"{free / 1e9:,.1f} GB. Lower `teacher.k`, choose a narrower `teacher.precision`, or choose another disk."
        )


def _store(layout: Layout, task: _Task, device: torch.device) -> None:
    """On a rank: compute the parts of its group, and write them on the group's first rank."""
    run, mesh = task.run.config, make_mesh(layout, device)
    teacher = make_teacher(task.run, mesh)
    assert teacher is not None, "the run computes no teacher"
    teacher.load(task.source)
    tokens = open_tokens(run.data, Path(run.tokens_folder), verify=False)  # `_task_of` has checked the hashes
    writer = _Writer(task.form, teacher, batches_of(run, samples_of(run, tokens), mesh))
    store, (rank, size) = LogitStore(task.folder, task.form), mesh.reader
    own, length = task.parts[rank::size], task.form.length
    bar = Bar("logits", mesh.is_first_rank, f"{sum(map(len, own)) * length:,} tokens on each group of ranks")
    with progress(bar, sum(map(len, own)) * length) as advance:
        for part in own:
            rows = np.empty((len(part), length), task.form.row)
            for place, found in writer.rows(part):
                rows[place] = found
                advance(found.size)
            if mesh.tensor.rank == 0:
                try:
                    store.write(part, rows)
                except OSError as error:
                    kept = "The parts that are written are kept."
                    raise unwritable(task.folder, error, setting="teacher.cache", kept=kept) from None


@dataclass(frozen=True, eq=False)
class _Writer:
    """Computes the rows of a store on one rank."""

    form: LogitForm
    teacher: Teacher
    batches: TokenBatches

    @torch.no_grad()
    def rows(self, samples: range) -> Iterator[tuple[slice, Rows]]:
        """Yield the rows of consecutive samples, one micro-batch after the other, and their place among the samples.
        Every tensor rank of the group must call this method.
        """
        batches, most = self.batches, self.batches.run.micro_batch_size
        for first in range(0, len(samples), most):
            count = min(most, len(samples) - first)
            arrays = batches.training.batch_from(samples.start + first, batch_size=count)
            batch = self.teacher.taught(batches.batch(arrays).to_device(batches.mesh.device))
            assert self.teacher.teaching is not None, "the rank computes no logits"
            top = self._top(self.teacher.teaching.of(batch).logits, count * self.form.length)
            self._require_finite(top, batch, samples.start + first)
            yield slice(first, first + count), self._encoded(top).reshape(count, self.form.length)

    def _require_finite(self, top: TopLogits, batch: Batch, first: int) -> None:
        """Raise `TrainingError` if a logit of a token with a target is not finite. `first` is the first sample."""
        assert batch.targets is not None
        if not bool((top.known | (batch.targets.flatten() == IGNORED)).all()):
            raise TrainingError(
                f"The teacher's predictions must be finite, but those of `teacher.folder` "
                f"(`{self.batches.run.teacher.folder}`) are not, in or after sequence {first}. The parts that are "
                'written are kept. Set teacher.precision="float32", or choose another teacher.'
            )

    def _top(self, logits: Callable[[slice], Tensor | TopLogits], num_tokens: int) -> TopLogits:
        """Return the likeliest logits of all tokens of a micro-batch, in chunks."""
        mesh, form, temperature = self.batches.mesh, self.form, self.batches.run.teacher.temperature
        chunk = default_loss_chunk(-(-form.vocab_size // mesh.tensor.size), num_tokens, device=mesh.device.type)
        found = []
        for start in range(0, num_tokens, chunk):
            whole = logits(slice(start, start + chunk))
            assert isinstance(whole, Tensor), "the logits are stored ones"
            part = VocabularyPart.of(mesh.tensor, whole.shape[1], form.vocab_size)
            found.append(top_logits(whole, part, form.k, temperature))
        return TopLogits(*(torch.cat(each) for each in zip(*found, strict=True)))

    def _encoded(self, top: TopLogits) -> Rows:
        """Return the rows of a store, [N]."""
        rows = np.empty(len(top.ids), self.form.row)
        known = top.logits[:, :-1].to(torch_dtype(self.form.precision)).cpu()
        bits = known.view(torch.int16) if known.dtype == torch.bfloat16 else known
        rows["ids"], rows["logits"], rows["rest"] = top.ids.cpu().numpy(), bits.numpy(), top.logits[:, -1].cpu().numpy()
        return rows
