"""Batches of each data rank: the rank's parts of the batch, and the documents in these parts."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from crosscut.data import Sampler, TokenFolder, ValidationSampler
from crosscut.model import Batch
from crosscut.training.batches import BatchesAhead
from tests.training.jobs import parts


def micro_batches_of(run, steps: tuple[int, ...]) -> tuple[int, list[list[Batch]]]:
    """On a rank: its place among the data ranks, and its micro-batches of each step."""
    _, batches = parts(run)
    return batches.mesh.data.rank, [batches.micro_batches(step) for step in steps]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "options",
    [
        ("layout.data=2", "training.micro_batch_size=1"),
        ("training.micro_batch_size=1",),
        ("layout.data=2",),
        ("layout.data=4",),
        ("layout.tensor=2", "layout.data=2"),
        ("layout.tensor=2",),
    ],
    ids=" ".join,
)
def test_micro_batches_partition_the_batch_whatever_the_layout(ranks, run_with, options):
    run = run_with(*options)
    told = ranks.run(run.layout.world_size, micro_batches_of, run, (0, 3))
    for index, step in enumerate((0, 3)):
        require_partition(run, step, [(data_rank, steps[index]) for data_rank, steps in told])


def require_partition(run, step: int, told: list[tuple[int, list[Batch]]]) -> None:
    by_data_rank = {}
    for data_rank, micro_batches in told:  # ranks of one tensor group hold the same
        assert all(batch.tokens.shape == (run.micro_batch_size, 32) for batch in micro_batches)
        assert len(micro_batches) == run.num_micro_batches
        joined = [torch.cat([getattr(batch, name) for batch in micro_batches]) for name in ("tokens", "targets")]
        for seen, mine in zip(by_data_rank.setdefault(data_rank, joined), joined, strict=True):
            assert torch.equal(seen, mine)
    sampler = Sampler(TokenFolder.open(Path(run.tokens_folder)).train, sequence_length=32, seed=run.training.seed)
    for i, whole in enumerate(sampler.batch(step, batch_size=4).given().values()):
        assert np.array_equal(torch.cat([by_data_rank[rank][i] for rank in sorted(by_data_rank)]).numpy(), whole)


GROWING = ("training.batch_size=8", "training.initial_batch_size=4", "training.ramp_steps=3")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [("layout.data=2", "training.micro_batch_size=1"), ()], ids=str)
def test_a_growing_batch_takes_every_sample_once_whatever_the_layout(ranks, run_with, options):
    run = run_with(*GROWING, *options)
    sampler = Sampler(TokenFolder.open(Path(run.tokens_folder)).train, sequence_length=32, seed=run.training.seed)
    expected = iter(sampler.batch_at(0, 4 + 4 + 4 + 8 + 8)[:, :-1])
    told = [steps for _, steps in ranks.run(run.layout.world_size, micro_batches_of, run, tuple(range(5)))]
    for step, size in enumerate((4, 4, 4, 8, 8)):
        batches = [batch for steps in told for batch in steps[step]]
        rows = [row for batch in batches for row in batch.tokens.numpy()]
        assert len(rows) == size
        assert all(np.array_equal(row, next(expected)) for row in rows)
        assert {batch.tokens.shape[0] for batch in batches} == {run.micro_batch_size}


def documents_of(run, step: int) -> list[list[tuple[str, int]]]:
    _, batches = parts(run)
    return [batches.documents(step, index) for index in range(batches.num_micro_batches(step))]


@pytest.mark.parametrize(
    ("options", "samples"),
    [((), {5: range(5 * 4, 6 * 4)}), (GROWING, {2: range(8, 12), 3: range(12, 20)})],
    ids=["constant", "growing"],
)
def test_documents_are_those_of_the_micro_batchs_samples(ranks, run_with, options, samples):
    run = run_with(*options, "layout.data=2", "training.micro_batch_size=1")
    sampler = Sampler(TokenFolder.open(Path(run.tokens_folder)).train, sequence_length=32, seed=run.training.seed)
    for step, indices in samples.items():
        told = ranks.run(2, documents_of, run, step)
        expected = [list(dict.fromkeys(sampler.documents(index))) for index in indices]
        assert [documents for rank in told for documents in rank] == expected


def validation_of(run) -> list[Batch]:
    return list(parts(run)[1].validation_batches())


def test_every_data_rank_gets_as_many_validation_batches_and_each_sequence_once(ranks, run_with):
    run = run_with("layout.data=2", "training.validation_sequences=7", "training.micro_batch_size=1")
    told = ranks.run(2, validation_of, run)
    assert len(told[0]) == len(told[1]) == 4
    rows = [
        tuple(batch.tokens[0].tolist())
        for rank in told
        for batch in rank
        if batch.num_targets  # what fills the last batch up has none
    ]
    sampler = ValidationSampler(TokenFolder.open(Path(run.tokens_folder)).validation, sequence_length=32)
    whole = [batch.tokens[0].tolist() for batch in sampler.batches(batch_size=1, limit=7)]
    assert sorted(rows) == sorted(map(tuple, whole))
    assert len(rows) == 7


def packed_of(run) -> tuple[list[Batch], list[Batch], int]:
    _, batches = parts(run)
    end = TokenFolder.open(Path(run.tokens_folder)).end_of_text
    training = [batch for step in range(40) for batch in batches.micro_batches(step)]
    return training, list(batches.validation_batches()), end


def test_documents_are_told_in_training_and_validation_if_they_do_not_see_each_other(ranks, run_with):
    run = run_with("layout.data=2", "training.document_mask=true")
    told = ranks.run(2, packed_of, run)
    assert any((batch.documents[:, -1] > 0).any() for training, _, _ in told for batch in training)
    for training, validation, end in told:
        for batch in (*training, *validation):
            expected = batch.with_documents(end)
            assert torch.equal(batch.documents, expected.documents)
            assert torch.equal(batch.positions, expected.positions)
    (training, validation, _) = ranks.run(1, packed_of, run_with())[0]
    assert all(batch.documents is None for batch in (*training, *validation))


def ahead_of(run, steps: list[int]) -> dict:
    """Whether the taken batches are right, the fetched steps with their threads, and the threads during and after the
    context.
    """
    _, batches = parts(run)
    plain = {step: batches.micro_batches(step) for step in steps}
    fetched, fetch = [], batches.micro_batches
    batches.micro_batches = lambda step: (fetched.append((step, threading.current_thread().name)), fetch(step))[1]
    with BatchesAhead(batches, num_steps=6) as ahead:
        taken = {step: ahead.take(step) for step in steps}
        meanwhile = [thread.name for thread in threading.enumerate()]
    return {
        "same": all(
            torch.equal(a, b)
            for step in steps
            for one, other in zip(plain[step], taken[step], strict=True)
            for a, b in zip(one.tensors(), other.tensors(), strict=True)
        ),
        "fetched": fetched,
        "meanwhile": meanwhile,
        "after": [thread.name for thread in threading.enumerate()],
    }


def test_batches_ahead_are_the_batches(ranks, run_with):
    run = run_with("layout.data=2", "training.micro_batch_size=1")
    for told in ranks.run(2, ahead_of, run, [2, 3, 4, 5]):
        assert told["same"]
        assert told["fetched"] == [(step, "batches_0") for step in (2, 3, 4, 5)], "each once, none after the last"
        assert "batches_0" in told["meanwhile"]
        assert "batches_0" not in told["after"], "the thread ends with the loop"


def test_batches_may_be_taken_in_any_order(ranks, run_with):
    told = ranks.run(1, ahead_of, run_with(), [4, 0, 5, 5])[0]
    assert told["same"]


class BrokenError(Exception):
    pass


def taken_until_broken(run) -> tuple[list[int], str]:
    _, batches = parts(run)
    fetch = batches.micro_batches

    def broken(step: int) -> list:
        if step == 2:
            raise BrokenError("the disk is gone")
        return fetch(step)

    batches.micro_batches = broken
    taken: list[int] = []
    try:
        with BatchesAhead(batches, num_steps=6) as ahead:
            for step in range(6):
                ahead.take(step)
                taken.append(step)
    except BrokenError as error:
        return taken, str(error)
    return taken, ""


def test_error_of_the_thread_is_raised_where_its_batch_is_taken(ranks, run_with):
    assert ranks.run(1, taken_until_broken, run_with())[0] == ([0, 1], "the disk is gone")
