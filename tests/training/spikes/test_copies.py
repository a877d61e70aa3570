"""A copy holds the whole state of a run, and a restored state is the state that was copied, to the last bit."""

import torch

from crosscut.training.precision import resolve_on
from crosscut.training.spikes.copies import StateCopies
from crosscut.training.step import Trainer
from tests.training.jobs import CPU, parts

OPTIONS = (
    "optimizer.matrices=muon", "optimizer.matrix_learning_rate=0.02", "optimizer.ema_decay=0.9",
    'training.offload=["optimizer"]',
)  # fmt: skip


def restored(run) -> dict[str, object]:
    """Copies after 0, 2 and 4 steps; the state after each return."""
    _, batches = parts(run)
    trainer = Trainer(resolve_on(run, CPU), batches.mesh, scales_loss=True)
    copies = StateCopies(trainer)

    def state() -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in copies._live().items()}

    def advance(first: int) -> dict[str, torch.Tensor]:
        for step in (first, first + 1):
            trainer.step(step, batches.micro_batches(step))
        return state()

    copies.keep(0)
    after = {0: state()}
    after[2] = advance(0)
    copies.restore(0)
    begun = [trainer.average.has_begun]
    again = state()
    after_again = advance(0)
    copies.keep(2)
    advance(2)
    copies.keep(4)
    steps = [copies.steps]
    trainer.loss_scale.update(torch.ones(()))  # an overflow halves the scale
    copies.restore(2)
    return {
        "same": [_equal(after[0], again), _equal(after[2], after_again), _equal(after[2], state())],
        "begun": [*begun, trainer.average.has_begun],
        "steps": [*steps, copies.steps],
        "names": sorted({name.split(".")[0] for name in after[0]}),
        "bytes": copies.num_bytes,
    }


def _equal(ours, theirs) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_a_restored_state_is_the_state_that_was_copied(ranks, run_with):
    (told,) = ranks.run(1, restored, run_with("training.micro_batch_size=2", *OPTIONS))
    assert told["same"] == [True, True, True]
    assert told["begun"] == [False, True]
    assert told["steps"] == [[2, 4], [2]]
    assert {"average", "blocks", "loss_scale", "optimizer", "tokens"} <= set(told["names"])
    assert told["bytes"] > 2 * 3 * 4 * 100_000  # two copies of weights, average and at least one moment
