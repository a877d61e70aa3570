"""Stored logits of a teacher in a run: what they depend on, whether a store has those of the run, and their fields of a
batch.
"""

import json
from collections.abc import Sequence
from math import gcd, inf
from pathlib import Path

import torch
from torch import Tensor

from crosscut.architecture import describe
from crosscut.config import ConfigError, ResolvedRun, RunConfig
from crosscut.config.system.records import to_json
from crosscut.data import Tokens
from crosscut.data.logits import LogitForm, LogitStore
from crosscut.logbook.skips import SampleSkip
from crosscut.pretrained import ModelSource, find_model
from crosscut.training.resuming import identity_of
from crosscut.training.spikes.order import SampleOrder
from crosscut.training.teachers.record import TEACHER, digest_of, stored_record, teacher_record
from crosscut.training.teachers.requirements import find_teacher

_SETTINGS = ("training.sequence_length", "training.seed", "training.document_mask")
"""Settings of `[training]` on which a teacher's logits depend: the cut of the samples, and their documents."""


def form_of(run: ResolvedRun, tokens: Tokens, source: ModelSource | None) -> LogitForm:
    """Return the form of a store with the logits that a run needs. `source` is the teacher; None for any teacher.
    Raises `ConfigError` if `teacher.k` is above the size of the vocabulary.
    """
    config, settings = run.config, run.config.teacher
    if settings.k > config.model.vocab_size:
        raise ConfigError(
            f"`teacher.k` must be at most the size of the vocabulary ({config.model.vocab_size}), but is {settings.k}. "
            f"Set teacher.k={config.model.vocab_size}."
        )
    identity = identity_of(config, tokens)
    reads = sorted(describe(config.model).reads(document_mask=config.training.document_mask))
    values = {
        **{name: value for name, value in identity.items() if name.startswith("data.") or name in _SETTINGS},
        "model.vocab_size": config.model.vocab_size,
        "fields of a batch": [name for name in reads if name != "targets"],
        "teacher.k": settings.k,
        "teacher.temperature": settings.temperature,
        "teacher.precision": settings.precision_in(run.precision),
        **({} if source is None else {TEACHER: digest_of(source, whole=True)}),
    }
    return LogitForm(
        k=settings.k,
        vocab_size=config.model.vocab_size,
        precision=settings.precision_in(run.precision),
        length=config.training.sequence_length,
        depends_on={name: json.dumps(to_json(value)) for name, value in values.items()},
    )


def num_samples_of(run: RunConfig, skips: Sequence[SampleSkip]) -> int:
    """Number of sequences that a run reads or leaves out until its last step."""
    return SampleOrder(run.training, tuple(skips)).samples_after(run.training.steps)


def teacher_of(run: ResolvedRun, tokens: Tokens, skips: Sequence[SampleSkip]) -> ModelSource | None:
    """Return the teacher that a run with these skips computes; None if the run computes none.

    Raises the errors of `find_teacher`. If the run reads stored logits, raises `ConfigError` for those of other data,
    of another teacher or of too few sequences, and `DamagedDataError` for damaged files.
    """
    settings = run.config.teacher
    if not settings.cache:
        return find_teacher(run, tokens.tokenizer())
    store = LogitStore.open(Path(settings.cache))
    store.require(form_of(run, tokens, find_model(settings.folder) if settings.folder else None))
    store.require_samples(num_samples_of(run.config, skips), verify=run.config.data.verify)
    return None


def record_of(run: RunConfig, teacher: ModelSource | None) -> dict[str, object]:
    """Return the entry about the run's teacher in its checkpoints, be it computed or stored."""
    cache = run.teacher.cache
    return stored_record(LogitStore.open(Path(cache)).form) if cache else teacher_record(teacher)


def stored_fields(store: LogitStore, first: int, count: int) -> dict[str, Tensor]:
    """Return the fields of a batch with the stored logits of consecutive samples, in host memory."""
    ids, logits = store.read(first, count)
    return {"teacher_ids": torch.from_numpy(ids), "teacher": torch.from_numpy(logits)}


def made_up_fields(run: RunConfig, shape: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Return fields of stored logits for tokens of the shape [B, S], with random numbers: different ids for each token,
    spread over the vocabulary. Empty if the run reads no stored logits.
    """
    settings, size = run.teacher, run.model.vocab_size
    if not settings.cache:
        return {}
    k = min(settings.k, size)
    stride = next(step for step in range(max(size // k, 1), 0, -1) if gcd(step, size) == 1)
    starts = torch.randint(0, size, (*shape, 1), generator=generator)
    wide = torch.float64 if settings.precision_in(run.training.precision) == "float64" else torch.float32
    logits = 2 * torch.randn((*shape, k + 1), generator=generator, dtype=torch.float64).to(wide)
    if k == size:
        logits[..., -1] = -inf
    return {"teacher_ids": ((starts + stride * torch.arange(k)) % size).int(), "teacher": logits}
