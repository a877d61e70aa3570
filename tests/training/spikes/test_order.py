"""Skips move the batches along the order of the samples."""

import pytest

from crosscut.config import TrainingConfig
from crosscut.logbook.skips import SampleSkip
from crosscut.training.spikes.order import SampleOrder, agree

PLAIN = TrainingConfig(steps=100, batch_size=4)
GROWING = TrainingConfig(steps=100, batch_size=8, initial_batch_size=4, ramp_steps=10)


@pytest.mark.parametrize("training", [PLAIN, GROWING])
def test_every_batch_after_a_skip_moves_by_its_sequences(training):
    order = SampleOrder(training, (SampleSkip(5, 12), SampleSkip(20, 8)))
    for step in range(30):
        moved = 12 * (step >= 5) + 8 * (step >= 20)
        assert order.first_sample(step) == training.samples_before(step) + moved
        assert order.samples_after(step + 1) == order.first_sample(step) + training.batch_size_at(step)


@pytest.mark.parametrize("training", [PLAIN, GROWING])
def test_the_next_batch_starts_where_the_spike_ended(training):
    order = SampleOrder(training).leaving_out(10, training.samples_before(17))
    assert order.first_sample(9) == training.samples_before(9)
    assert order.first_sample(10) == training.samples_before(17)
    assert order.skipped_at(10) == training.samples_before(17) - training.samples_before(10)


def test_a_return_before_an_earlier_skip_replaces_it():
    order = SampleOrder(PLAIN, (SampleSkip(10, 12), SampleSkip(20, 8)))
    end = order.first_sample(25)
    later = order.leaving_out(15, end)
    assert later.skips == (SampleSkip(10, 12), SampleSkip(15, end - PLAIN.samples_before(15) - 12))
    assert later.first_sample(15) == end
    assert later.leaving_out(10, later.first_sample(18)).first_sample(10) == end + 12


def test_runs_agree_if_their_skips_before_a_step_are_equal():
    ours, theirs = (SampleSkip(5, 4), SampleSkip(9, 4)), (SampleSkip(5, 4),)
    assert agree(ours, theirs, done=9)  # a skip at step 9 has no effect on the first 9 steps
    assert not agree(ours, theirs, done=10)
    assert not agree((SampleSkip(5, 4),), (SampleSkip(5, 8),), done=10)
