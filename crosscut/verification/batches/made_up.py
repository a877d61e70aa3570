"""Made-up batch of the verified step. It is the same on every layout."""

import torch
from torch import Tensor

from crosscut.architecture import Target, describe
from crosscut.architecture.inputs import Element, Read
from crosscut.config import IGNORED, ModelConfig, RunConfig
from crosscut.model import Batch
from crosscut.parallel import seed_of
from crosscut.training.teachers.cache import made_up_fields
from crosscut.verification.batches.packing import pack

END_OF_TEXT = 1
"""Id of the end-of-text token in the batch."""

_MADE_LATER = ("documents", "positions", "predicted")
"""Fields that are found in the tokens and the targets of a batch."""
_NUM_OPTIONS = 2
"""Number of options of a made-up multiple-choice question."""


def num_options_of(model: ModelConfig) -> int:
    """Number of sequences that share a label: the number of options of a multiple-choice question, otherwise 1."""
    labels = describe(model).head.reads.get("labels")
    return _NUM_OPTIONS if labels is not None and labels.is_shared else 1


def made_up_batch(run: RunConfig) -> Batch:
    """Generate the fields that the model reads for all data ranks: B sequences of S tokens. Documents are left to
    `Batch.with_documents`, and the indexes of predicted tokens to `Batch.with_predicted`.

    The first and last id of every tensor rank's shard of the vocabulary occur as tokens and as targets. The sequences
    have different numbers of targets, so the data ranks have different numbers of targets, too. With
    `training.document_mask`, every sequence holds several documents. If the model reads a mask, tokens without a target
    are padding. If the model reads segments, every token has a random one. A model that solves a task gets labels and
    another mask (`_labelled`).
    """
    reads = describe(run.model).reads(document_mask=run.training.document_mask)
    batch, length, vocabulary = run.training.batch_size, run.training.sequence_length, run.model.vocab_size
    generator = torch.Generator().manual_seed(seed_of("verify", run.training.seed))
    tokens = torch.randint(0, vocabulary, (batch, length + 1), generator=generator)
    part = describe(run.model).embedding.tokens.on(Target.of(run.layout)).shape[0]
    edges = {0, vocabulary - 1} | {edge + side for edge in range(part, vocabulary, part) for side in (-1, 0)}
    if run.training.document_mask:
        num_free = length - 1 - -(-len(edges) // batch)
        pack(tokens, end_of_text=END_OF_TEXT, num_free=num_free, generator=generator)
    for i, edge in enumerate(sorted(edges)):
        tokens[i % batch, -2 - (i // batch) % length] = edge  # near the end, where every sequence has targets
    targets = tokens[:, 1:].clone()
    for i in range(batch):
        targets[i, : i * length // (2 * batch)] = IGNORED
    num_types = reads["segments"].num_values if "segments" in reads else 1
    made = {"tokens": tokens[:, :-1], "targets": targets, "mask": targets != IGNORED}
    made["segments"] = torch.randint(0, num_types, targets.shape, generator=generator)
    if "labels" in reads:
        made |= _labelled(reads["labels"], (batch, length), generator)
    else:
        made["order"] = torch.randint(0, 2, (batch,), generator=generator)
        made["order"][0] = IGNORED  # so that the data ranks have different numbers of pairs
    if "predicted" in reads:
        made["targets"] = _few(run, targets)
    fields = {name: made[name] for name in reads if name not in _MADE_LATER}
    return Batch(**fields, **made_up_fields(run, (batch, length), generator))


def _few(run: RunConfig, targets: Tensor) -> Tensor:
    """Remove targets until each micro-batch of a data rank has about as many targets as in masked language modelling.
    This number differs between the data ranks. The last targets of the sequences are kept, because they include the
    edges of the vocabulary's shards.
    """
    parts = []
    for i, part in enumerate(targets.split(run.micro_batch_size)):
        from_the_end = part.flip(1).t()  # [S, B]
        has_target = from_the_end != IGNORED
        numbers = has_target.flatten().cumsum(0).view_as(has_target)
        too_many = numbers > max(1, run.predicted_tokens - i % 3)
        parts.append(from_the_end.masked_fill(too_many, IGNORED).t().flip(1))
    return torch.cat(parts)


def _labelled(labels: Read, shape: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
    """Make random labels of a task, and a mask, for sequences of the shape [B, S]. The first example has no label, so
    the data ranks have different numbers of labels. Numbers are normally distributed.

    The sequences end with padding. Each sequence is shorter than the sequence before. If the ranks split the sequence
    dimension, the last tokens of the sequences are therefore on different ranks.
    """
    num_sequences, length = shape
    ends = length - torch.arange(num_sequences) * length // num_sequences
    size = labels.shape(*shape, sharing=_NUM_OPTIONS)
    if labels.kind is Element.REAL:
        made = torch.randn(size, generator=generator)
    else:
        num_values = length if labels.kind is Element.PLACE else labels.num_values or _NUM_OPTIONS
        made = torch.randint(0, num_values, size, generator=generator)
    if labels.width > 1:
        made = made.sort(1).values  # an answer's first token comes before its last
    made[0] = torch.nan if made.is_floating_point() else IGNORED
    return {"labels": made, "mask": torch.arange(length) < ends.unsqueeze(1)}
