"""What each data rank trains on: the parts of the batch, and the documents they are made of."""

from pathlib import Path

import numpy as np
import pytest
import torch

from crosscut.config import IGNORED
from crosscut.data import Sampler, TokenFolder, ValidationSampler
from tests.training.jobs import parts


def micro_batches_of(run, step: int) -> tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]:
    _, batches = parts(run)
    return batches.mesh.data.rank, batches.micro_batches(step)


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("training.micro_batch_size=1",),
        ("layout.tensor=2",),
        ("layout.data=2",),
        ("layout.data=4",),
        ("layout.data=2", "training.micro_batch_size=1"),
        ("layout.tensor=2", "layout.data=2"),
    ],
    ids=lambda options: " ".join(options) or "one rank",
)
def test_micro_batches_partition_the_batch_whatever_the_layout(ranks, run_with, options, step):
    run = run_with(*options)
    told = ranks.run(run.layout.world_size, micro_batches_of, run, step)
    by_data_rank = {}
    for data_rank, micro_batches in told:  # ranks of one tensor group hold the same
        assert all(tokens.shape == (run.micro_batch_size, 32) for tokens, _ in micro_batches)
        assert len(micro_batches) == run.num_micro_batches
        joined = [torch.cat(column) for column in zip(*micro_batches, strict=True)]
        for seen, mine in zip(by_data_rank.setdefault(data_rank, joined), joined, strict=True):
            assert torch.equal(seen, mine)
    sampler = Sampler(TokenFolder.open(Path(run.tokens_folder)).train, sequence_length=32, seed=run.training.seed)
    for i, whole in enumerate(sampler.batch(step, batch_size=4)):
        assert np.array_equal(torch.cat([by_data_rank[rank][i] for rank in sorted(by_data_rank)]).numpy(), whole)


def documents_of(run, step: int) -> list[list[tuple[str, int]]]:
    _, batches = parts(run)
    return [batches.documents(step, index) for index in range(run.num_micro_batches)]


@pytest.mark.parametrize("options", [(), ("layout.data=2",)], ids=["one rank", "data=2"])
def test_documents_are_those_of_the_micro_batchs_samples(ranks, run_with, options):
    run = run_with("training.micro_batch_size=1", *options)
    told = ranks.run(run.layout.world_size, documents_of, run, 5)
    sampler = Sampler(TokenFolder.open(Path(run.tokens_folder)).train, sequence_length=32, seed=run.training.seed)
    expected = [list(dict.fromkeys(sampler.documents(index))) for index in range(5 * 4, 6 * 4)]
    assert [documents for rank in told for documents in rank] == expected


def validation_of(run) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(parts(run)[1].validation_batches())


def test_every_data_rank_gets_as_many_validation_batches_and_each_sequence_once(ranks, run_with):
    run = run_with("layout.data=2", "training.validation_sequences=7", "training.micro_batch_size=1")
    told = ranks.run(2, validation_of, run)
    assert len(told[0]) == len(told[1]) == 4
    rows = [
        tuple(tokens[0].tolist())
        for rank in told
        for tokens, targets in rank
        if not (targets == IGNORED).all()  # what fills the last batch up
    ]
    sampler = ValidationSampler(TokenFolder.open(Path(run.tokens_folder)).validation, sequence_length=32)
    whole = [tokens[0].tolist() for tokens, _ in sampler.batches(batch_size=1, limit=7)]
    assert sorted(rows) == sorted(map(tuple, whole))
    assert len(rows) == 7
