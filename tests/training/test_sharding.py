"""Parts of a sharded model that a rank holds during a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.planner import parameters_per_rank
from tests.training.jobs import losses_of, parts, poisoned_step

ZERO_2, ZERO_3 = "layout.sharding=zero2", "layout.sharding=zero3"
SPLIT = ("layout.tensor=2", "layout.sequence_parallel=true")


def held(run) -> dict[str, int]:
    """Elements after a step, and of gradients before the optimizer has used them."""
    trainer, batches = parts(run)
    trainer.accumulate(0, batches.micro_batches(0))
    gradients = sum(p.grad.to_local().numel() for p in trainer.parameters)
    trainer.step(0, batches.micro_batches(0))
    states = trainer.optimizer.state.values()
    return {
        "weights": sum(p.to_local().numel() for p in trainer.model.parameters()),
        "gradients": gradients,
        "moments": sum(s[name].to_local().numel() for s in states for name in ("exp_avg", "exp_avg_sq")),
        "stored": sum(p.to_local().untyped_storage().nbytes() // p.element_size() for p in trainer.parameters),
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "options",
    [("layout.data=2", ZERO_3, *SPLIT), ("layout.data=2", ZERO_2), ("layout.data=4", ZERO_3, "layout.shard_group=2")],
    ids=" ".join,
)
def test_a_rank_keeps_its_share_of_weights_gradients_and_moments(ranks, run_with, options):
    run = run_with(*options)
    whole = parameters_per_rank(run.model, run.layout)
    results = ranks.run(run.layout.world_size, held, run)
    for kind, copies in (("weights", 1), ("gradients", 1), ("moments", 2), ("stored", 1)):
        shares = [result[kind] for result in results]
        assert max(shares) < 1.01 * copies * whole / 2, kind
        assert sum(shares) >= copies * whole * run.layout.tensor * run.layout.num_replicas, kind


class LargestMade(TorchDispatchMode):
    """The bytes of the largest tensor with memory that is made inside."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if type(tensor) is torch.Tensor and not tensor.is_meta:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def largest_made(run) -> int:
    with LargestMade() as mode:
        parts(run)
    return mode.largest


def test_no_rank_ever_holds_a_whole_parameter_at_the_start(ranks, run_with):
    sizes = ("model.vocab_size=2000", "model.max_sequence_length=32")
    tokens = 2048 * run_with(*sizes).model.hidden_size * 4
    alone = ranks.run(1, largest_made, run_with(*sizes))[0]
    assert alone >= tokens
    shared = ranks.run(4, largest_made, run_with(*sizes, "layout.data=4", ZERO_3))
    assert max(shared) <= tokens // 4


@contextmanager
def saved_for_backward() -> Iterator[dict[int, torch.UntypedStorage]]:
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield storages


def bytes_between_passes(run) -> tuple[int, int, int]:
    """Bytes that autograd keeps after the forward pass, bytes of the gathered layers at this time, and bytes of the
    gathered layers after the backward pass.
    """
    trainer, batches = parts(run)
    batch, *_ = batches.micro_batches(0)
    gathered: list[torch.UntypedStorage] = []

    def note(block: torch.nn.Module, *_: Any) -> None:
        gathered.extend(p.to_local().untyped_storage() for p in block.parameters())

    handles = [block.register_forward_pre_hook(note) for block in trainer.model.blocks]
    trainer.streams.restart(step=0)
    trainer.reducer.arm()
    with saved_for_backward() as saved:
        loss = trainer.model.loss(batch)
    between = sum(storage.nbytes() for storage in saved.values())
    layers = sum(storage.nbytes() for storage in gathered)
    loss.backward()
    for handle in handles:
        handle.remove()
    return between, layers, sum(storage.nbytes() for storage in gathered)


def test_a_layer_s_gathered_weights_go_with_its_use(ranks, run_with):
    """Also where the graph refers to them: the difference between ZeRO-2 and ZeRO-3 is all of the matrices."""
    options = ("layout.data=2", "model.dropout=0.0")
    kept, layers_kept, after_both = ranks.run(2, bytes_between_passes, run_with(*options, ZERO_2))[0]
    freed, layers_freed, after = ranks.run(2, bytes_between_passes, run_with(*options, ZERO_3))[0]
    model = run_with().model
    assert layers_kept >= model.num_layers * 12 * model.hidden_size**2 * 4
    assert layers_freed == after == after_both == 0
    assert kept - freed >= model.num_layers * 12 * model.hidden_size**2 * 4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sharding", [ZERO_2, ZERO_3])
def test_accumulated_gradients_of_several_copies_are_those_of_one_rank(ranks, run_with, sharding):
    base = ("model.dropout=0.0", "training.precision=float64", "training.batch_size=8")
    expected = ranks.run(1, losses_of, run_with(*base), 3)[0]
    options = ("layout.data=4", "layout.shard_group=2", "training.micro_batch_size=1", sharding)
    for losses in ranks.run(4, losses_of, run_with(*base, *options), 3):
        assert losses == pytest.approx(expected, rel=1e-10)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_gathered_in_a_narrow_type_the_losses_are_those_of_whole_copies(ranks, run_with, precision):
    """Weights are rounded before they are sent instead of after, their gradients in the same place."""
    base = ("model.dropout=0.0", f"training.precision={precision}", "layout.data=2")
    expected = ranks.run(2, losses_of, run_with(*base), 3)[0]
    for losses in ranks.run(2, losses_of, run_with(*base, ZERO_3), 3):
        assert losses == pytest.approx(expected, rel=2e-3)


def test_a_step_whose_loss_is_no_number_is_told_by_all_ranks(ranks, run_with):
    run = run_with("model.dropout=0.0", "layout.data=2", ZERO_3)
    told = ranks.run(2, poisoned_step, run, "blocks.1.mlp.expand.weight", float("nan"))
    assert told[0] == told[1]
    assert "value appeared in the output of `blocks.1.mlp.expand`" in told[0]["message"]
    assert told[0]["unchanged"]
