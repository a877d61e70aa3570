"""Made-up batch of the verified step. It is the same on every layout."""

import torch
from torch import Tensor

from crosscut.config import IGNORED, ModelConfig, RunConfig, padded_vocab_size
from crosscut.config.model import HeadKind
from crosscut.model import Batch
from crosscut.parallel import seed_of
from crosscut.verification.batches.packing import pack

END_OF_TEXT = 1
"""Id of the end-of-text token in the batch."""

_NUM_OPTIONS = 2
"""Number of options of a made-up multiple-choice question."""


def num_options_of(model: ModelConfig) -> int:
    """Number of sequences that share a label: the number of options of a question if the model's head is "choice",
    otherwise 1.
    """
    return _NUM_OPTIONS if model.head is HeadKind.CHOICE else 1


def made_up_batch(run: RunConfig) -> Batch:
    """Generate tokens and targets for all data ranks, each [B, S] with B sequences of S tokens.

    The first and last id of every tensor rank's shard of the vocabulary occur as tokens and as targets. The sequences
    have different numbers of targets, so the data ranks have different numbers of targets, too. With
    `training.document_mask`, every sequence holds several documents. With bidirectional attention, tokens without a
    target are padding. If the model has token types, every token has a random type. A model that solves a task gets
    labels (`_labelled`).
    """
    batch, length, vocabulary = run.training.batch_size, run.training.sequence_length, run.model.vocab_size
    generator = torch.Generator().manual_seed(seed_of("verify", run.training.seed))
    tokens = torch.randint(0, vocabulary, (batch, length + 1), generator=generator)
    part = padded_vocab_size(vocabulary, run.layout.tensor) // run.layout.tensor
    edges = {0, vocabulary - 1} | {edge + side for edge in range(part, vocabulary, part) for side in (-1, 0)}
    if run.training.document_mask:
        num_free = length - 1 - -(-len(edges) // batch)
        pack(tokens, end_of_text=END_OF_TEXT, num_free=num_free, generator=generator)
    for i, edge in enumerate(sorted(edges)):
        tokens[i % batch, -2 - (i // batch) % length] = edge  # near the end, where every sequence has targets
    targets = tokens[:, 1:].clone()
    for i in range(batch):
        targets[i, : i * length // (2 * batch)] = IGNORED
    types = torch.randint(0, max(run.model.token_types, 1), targets.shape, generator=generator)
    segments = types if run.model.token_types else None
    if run.model.solves_task:
        return _labelled(run.model, tokens[:, :-1], segments, generator)
    orders = torch.randint(0, 2, (batch,), generator=generator)
    orders[0] = IGNORED  # so that the data ranks have different numbers of pairs
    return Batch(
        tokens=tokens[:, :-1],
        targets=_few(run, targets) if run.model.predicts_masked else targets,
        segments=segments,
        mask=None if run.model.is_causal else targets != IGNORED,
        order=orders if run.model.sentence_order else None,
    )


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


def _labelled(model: ModelConfig, tokens: Tensor, segments: Tensor | None, generator: torch.Generator) -> Batch:
    """Make a batch with random labels for a task from `tokens` [B, S]. The first example has no label, so the data
    ranks have different numbers of labels. Numbers are normally distributed.

    The sequences end with padding. Each sequence is shorter than the sequence before. If the ranks split the sequence
    dimension, the last tokens of the sequences are therefore on different ranks.
    """
    num_sequences, length = tokens.shape
    ends = length - torch.arange(num_sequences) * length // num_sequences
    number = num_sequences // num_options_of(model)
    if model.head is HeadKind.SPANS:
        labels = torch.randint(0, length, (number, 2), generator=generator).sort(1).values
    elif model.head is HeadKind.NUMBER:
        labels = torch.randn(number, generator=generator)
    else:
        labels = torch.randint(0, model.num_classes or _NUM_OPTIONS, (number,), generator=generator)
    labels[0] = torch.nan if labels.is_floating_point() else IGNORED
    return Batch.labelled(tokens, labels, mask=torch.arange(length) < ends.unsqueeze(1), segments=segments)
