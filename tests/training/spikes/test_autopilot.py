"""After a spike, a run returns to an earlier state and leaves the batches out; from its record, it is repeatable."""

import math
from functools import partial
from pathlib import Path

import pytest

from crosscut.checkpoint import list_checkpoints, read_manifest
from crosscut.logbook.skips import SampleSkip, own_record
from crosscut.training.spikes.copies import StateCopies, steps_between_copies
from tests.training.conftest import tiny_run
from tests.training.jobs import rows_of
from tests.training.spikes.jobs import same_bits, spoiled_run

PLAIN = ("training.steps=24", "training.validate_every=0", "checkpoint.every=0")
SKIP = (*PLAIN, "training.on_spike=skip")
SAVED = ("checkpoint.every=4", "checkpoint.keep=100")
BAD = 17 * 4
"""Position of the batch of step 17, counted from 0. Its gradients are not finite in these tests."""
SKIPS = (SampleSkip(10, 32),)
"""The run returns from step 17 to its copy of step 10, and leaves out the eight batches of steps 10 to 17."""
JUMP = ("training.steps=40", "training.validate_every=0", "checkpoint.every=0")
"""The shortest run in which the rule, which needs 32 steps, finds a jump of the norm."""
SMALL = ("model.num_layers=1", "training.sequence_length=16")
MUON = ("optimizer.matrices=muon", "optimizer.matrix_learning_rate=0.02", "optimizer.ema_decay=0.9")


@pytest.fixture
def run_with(run_with):
    """Function that makes a tiny run of one layer, with overrides."""
    return lambda *overrides: run_with(*SMALL, *overrides)


@pytest.fixture(scope="module")
def with_record(ranks, tokens_folder, tmp_path_factory):
    """Run with Muon on one rank that leaves the batches out from the start, because its record says so."""
    folder = tmp_path_factory.mktemp("with_record") / "run"
    run = tiny_run(tokens_folder, folder, *SMALL, *PLAIN, *MUON)
    return train(ranks, run, {BAD: math.nan}, SKIPS)[0]


def train(ranks, run, spoiled, skips=(), resume_from=None, *, fault=None, share=1.0):
    """Results of all ranks."""
    given = (spoiled, skips, resume_from, fault, share)
    return ranks.run(run.layout.world_size, spoiled_run, run, *given, time_limit=240)


def test_a_run_returns_leaves_the_batches_out_and_repeats_from_its_record(ranks, run_with, with_record):
    run = run_with(*SKIP, *SAVED, "training.validate_every=3", *MUON)
    (result,) = train(ranks, run, {BAD: math.nan})
    folder = Path(run.output.folder)
    assert result["skips"] == own_record(folder).skips == SKIPS
    assert [result["positions"][step] for step in range(24)] == [4 * step + 32 * (step >= 10) for step in range(24)]
    rows = [row for row in rows_of(run) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 25))
    assert [row["samples"] for row in rows][8:11] == [36, 40, 76]
    saved = [read_manifest(checkpoint).progress for checkpoint in list_checkpoints(run.checkpoints_folder)]
    assert {each.step: each.skips for each in saved} == {
        4: (), 8: (), **dict.fromkeys((12, 16, 20, 24), ((10, 32),))
    }  # fmt: skip
    assert same_bits(result, with_record)
    told = (folder / "spikes" / "01-step-000018.txt").read_text()
    assert told.startswith("Spike at step 18: loss ")
    assert "gradient norm nan. The run rolls back to step 10 and leaves out 32 sequences" in told
    listed = [line for line in told.splitlines() if "addresses.txt:" in line]
    assert len(listed) == 32 and listed[0].split()[0] == "40" and listed[-1].split()[0] == "71"


def test_a_jump_of_the_norm_is_found_by_the_rule(ranks, run_with):
    run = run_with("training.on_spike=skip", *JUMP)
    (result,) = train(ranks, run, {35 * 4: 1e4})
    assert result["skips"] == (SampleSkip(30, 24),)
    (event,) = own_record(Path(run.output.folder)).events
    assert "gradient norm" in event.reason and (event.spike_step, event.back_to) == (36, 30)


def test_a_spike_right_after_a_return_leaves_out_twice_as_many_at_the_same_step(ranks, run_with):
    run = run_with(*SKIP)
    (result,) = train(ranks, run, {BAD: math.nan, BAD + 8: math.nan})
    assert result["skips"] == (SampleSkip(10, 64),)
    assert [event.sequences for event in own_record(Path(run.output.folder)).events] == [32, 32]


LAYOUTS = {
    "tensor 2": ("layout.tensor=2",),
    "data 2, ZeRO-2": ("layout.data=2", "layout.sharding=zero2"),
    "pipeline 2": ("layout.pipeline=2", "training.micro_batch_size=2"),
    "tensor 2, data 2, ZeRO-3": ("layout.tensor=2", "layout.data=2", "layout.sharding=zero3"),
}


EXACT = ("training.steps=20", "model.dropout=0.0", "training.precision=float64", *MUON)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_on_a_layout_is_the_run_with_the_record_on_one_rank(ranks, run_with, layout):
    exact = (*EXACT, f"model.num_layers={2 if layout == 'pipeline 2' else 1}")
    results = train(ranks, run_with(*SKIP, *exact, *LAYOUTS[layout]), {BAD: math.nan})
    assert {result["skips"] for result in results} == {SKIPS}
    (alone,) = train(ranks, run_with(*PLAIN, *exact), {BAD: math.nan}, SKIPS)
    for result in results:
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-10)
        assert result["bits"] == results[0]["bits"]


def _without(patch, part):
    live = StateCopies._live
    patch.setattr(StateCopies, "_live", lambda self: {n: t for n, t in live(self).items() if part not in n})


def _batch_kept(patch):
    patch.setattr(
        "crosscut.training.spikes.order.SampleOrder.first_sample", lambda self, s: self.training.samples_before(s)
    )


def _newest_copy_damaged(patch):
    keep = StateCopies.keep
    patch.setattr(StateCopies, "keep", lambda self, step: keep(self, max(step - 1, 0)))  # as of an earlier step


FAULTS = {
    "a first moment that does not return": partial(_without, part="exp_avg"),
    "a momentum that does not return": partial(_without, part="momentum_buffer"),
    "an average that does not return": partial(_without, part="average."),
    "a count of steps that does not return": partial(_without, part=".step"),
    "weights that do not return": partial(_without, part="blocks.0"),
    "batches that are trained again": _batch_kept,
    "a copy with the number of another step": _newest_copy_damaged,
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_return_is_found(ranks, run_with, with_record, fault):
    (bad,) = train(ranks, run_with(*SKIP, *MUON), {BAD: math.nan}, fault=FAULTS[fault])
    assert not same_bits(with_record, bad)


def test_stop_ends_the_run_and_names_the_checkpoint_before_the_spike(ranks, run_with):
    run = run_with("training.on_spike=stop", *JUMP, "checkpoint.every=15")
    (result,) = train(ranks, run, {35 * 4: 1e4})
    assert result["error"].startswith("The loss or the gradient norm has jumped at step 36 (gradient norm ")
    assert "The last checkpoint before the spike is step 30." in result["error"]


def test_off_takes_no_copies_and_finds_nothing(ranks, run_with):
    run = run_with(*JUMP)
    (result,) = train(ranks, run, {35 * 4: 1e4})
    assert (result["skips"], result["error"]) == ((), "")
    assert not (Path(run.output.folder) / "spikes").exists()


def test_beyond_the_bound_the_run_stops_with_a_checkpoint_of_the_good_state(ranks, run_with):
    run = run_with(*SKIP, *SAVED, "training.steps=20")  # a tenth of the run is two batches
    (result,) = train(ranks, run, {BAD: math.nan}, share=0.1)
    assert (
        "leave out at most 8 sequences (10% of the run), but this would be rollback 1, with 32 sequences left"
        in result["error"]
    )
    assert [read_manifest(f).progress.step for f in list_checkpoints(run.checkpoints_folder)] == [4, 8, 10]
    assert result["finite"]


@pytest.mark.slow  # the return of the first test, to a checkpoint
def test_without_room_for_copies_a_run_returns_to_a_checkpoint(ranks, run_with):
    run = run_with(*SKIP, *SAVED)
    (result,) = train(ranks, run, {BAD: math.nan}, fault=_no_room)
    assert result["skips"] == (SampleSkip(12, 24),)
    (again,) = train(ranks, run_with(*PLAIN), {BAD: math.nan}, (SampleSkip(12, 24),))
    assert same_bits(result, again)


def test_without_an_earlier_state_the_run_stops(ranks, run_with):
    (result,) = train(ranks, run_with(*SKIP), {BAD: math.nan}, fault=_no_room)
    assert result["error"].startswith(
        "A rollback after a spike needs an earlier state, but there is no checkpoint from before the spike at step 18 "
    )


def test_a_skip_that_cannot_be_recorded_stops_the_run(ranks, run_with):
    run = run_with(*SKIP, "training.validate_every=3")
    Path(run.output.folder).mkdir(parents=True)
    (Path(run.output.folder) / "spikes").write_text("taken")
    (result,) = train(ranks, run, {BAD: math.nan})
    assert "The run must record there which sequences it leaves out after the spike at step 18." in result["error"]
    assert max(result["positions"]) == 17


def _no_room(patch):
    patch.setattr("crosscut.training.spikes.copies.available_memory", lambda: 1000)


def test_copies_are_frequent_in_short_runs_and_rare_in_long_runs():
    assert [steps_between_copies(steps) for steps in (1, 620, 4000, 10**6)] == [10, 10, 20, 100]
