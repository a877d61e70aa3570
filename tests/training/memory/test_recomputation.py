"""Recomputed activations are equal to the first ones, to the last bit, and the freed memory is free."""

import ctypes
import gc
import os
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.launch.heap import HEAP_SETTINGS, give_freed_tensors_back
from crosscut.training.memory.host_activations import HostActivations
from tests.training.jobs import CPU, are_equal, parts

MODES = [
    ('training.recompute="full"',),
    ('training.recompute="selective"',),
    ('training.recompute="operators"',),
    ('training.recompute="full"', "training.recompute_every=2"),
    ('training.recompute="full"', 'training.offload=["activations"]'),
]
LAYOUTS = [
    ("layout.data=2", 'layout.sharding="zero3"'),
    ("layout.tensor=2", "layout.sequence_parallel=true"),
    ("layout.tensor=2",),
    (),
]


def gradients_of(runs) -> list[tuple[float, list[Tensor], Tensor]]:
    """Loss and gradients of each run's first step, in two micro-batches, and random numbers drawn after this step."""
    found = []
    for run in runs:
        trainer, batches = parts(run)
        loss = trainer.accumulate(0, batches.micro_batches(0))
        with trainer.streams.per_rank():
            own = torch.rand(3)
        drawn = torch.cat([own, torch.rand(3)])
        found.append((loss.item(), [p.grad.to_local().clone() for p in trainer.parameters], drawn))
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=[" ".join(o) or "one rank" for o in LAYOUTS])
def test_recomputed_gradients_with_dropout_are_the_same_to_the_last_bit(ranks, run_with, layout):
    options = (*layout, "model.dropout=0.1", "model.num_layers=3", "training.micro_batch_size=2")
    runs = [run_with(*options), *(run_with(*options, *mode) for mode in MODES)]
    for plain, *others in ranks.run(runs[0].layout.world_size, gradients_of, runs):
        for mode, (loss, gradients, drawn) in zip(MODES, others, strict=True):
            assert loss == plain[0], mode
            assert are_equal(gradients, plain[1]), mode
            assert torch.equal(drawn, plain[2]), f"{mode}: the random streams were not left as they were"


def recomputed_layers(run) -> list[bool]:
    return [block.runner.skips_last_product for block in parts(run)[0].model.blocks]


def test_every_kth_layer_recomputes_from_the_first(ranks, run_with):
    options = ("model.num_layers=3", 'training.recompute="full"')
    chosen = {every: ranks.run(1, recomputed_layers, run_with(*options, f"training.recompute_every={every}"))[0]
              for every in (1, 2, 3, 99)}  # fmt: skip
    first_alone = [True, False, False]
    assert chosen == {1: [True] * 3, 2: [True, False, True], 3: first_alone, 99: first_alone}


class MallInfo2(ctypes.Structure):
    """Result of glibc's `mallinfo2`. `hblks` is the number of blocks with pages of their own, which are returned to the
    system as soon as a block is freed.
    """

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def own_pages(run) -> dict[int, bool]:
    """Whether glibc gives tensors of 1, 3 and 12 MiB pages of their own after a trainer is built.

    glibc first looks for free memory in the heap, and earlier jobs of this process left some. The function therefore
    holds many tensors.
    """
    numbers = ctypes.CDLL(None).mallinfo2
    numbers.restype = MallInfo2
    found = {}
    with patch.dict(os.environ):
        for name in HEAP_SETTINGS:
            os.environ.pop(name, None)
        give_freed_tensors_back()
        kept = parts(run)
        for mib in (1, 3, 12):
            before = numbers().hblks
            held = [torch.empty(mib << 18) for _ in range(100)]  # no page of which is ever touched
            found[mib] = numbers().hblks > before
            del held
        del kept
        give_freed_tensors_back()
    return found


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="is about glibc, from 2.33 on")
def test_a_process_that_recomputes_whole_layers_keeps_less_of_what_it_freed(ranks, run_with):
    asked = {mode: run_with(f"training.recompute={mode}") for mode in ("none", "operators", "full")}
    found = {mode: ranks.run(1, own_pages, run)[0] for mode, run in asked.items()}
    only_large = {1: False, 3: False, 12: True}
    assert found == {"none": only_large, "operators": only_large, "full": {1: False, 3: True, 12: True}}


def test_recomputed_bfloat16_gradients_are_the_same_to_the_last_bit(ranks, run_with):
    options = ("layout.tensor=2", 'training.precision="bfloat16"', "model.dropout=0.0")
    runs = [run_with(*options), *(run_with(*options, *mode) for mode in MODES)]
    for plain, *others in ranks.run(2, gradients_of, runs):
        for mode, (_, gradients, _) in zip(MODES, others, strict=True):
            assert are_equal(gradients, plain[1]), mode


def names_of(runs) -> list[tuple[list[str], list[str]]]:
    return [
        (list(trainer.model.state_dict()), [name for name, _ in trainer.model.named_modules()])
        for trainer, _ in map(parts, runs)
    ]


def test_modules_and_parameters_keep_their_names(ranks, run_with):
    names = ranks.run(1, names_of, [run_with(), *(run_with(*mode) for mode in MODES)])[0]
    assert all(other == names[0] for other in names)


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def operators_of(runs) -> list[dict[str, int]]:
    found = []
    for run in runs:
        trainer, batches = parts(run)
        micro_batches = batches.micro_batches(0)
        with Operators() as operators:
            trainer.accumulate(0, micro_batches)
        found.append(operators.counts)
    return found


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def test_each_setting_repeats_what_it_says_and_no_more(ranks, run_with):
    options = ("model.dropout=0.0", "model.num_layers=3")
    runs = [run_with(*options), *(run_with(*options, *mode) for mode in MODES[:4])]
    plain, *others = ranks.run(1, operators_of, runs)[0]
    full, selective, operators, alternate = (
        {
            name: count - plain.get(name, 0)
            for name, count in counts.items()
            if name in ("mm", "addmm", "native_layer_norm", "sigmoid_", ATTENTION)
        }
        for counts in others
    )
    # Of a layer's five products the last, whose result nobody needs, is left out.
    assert full == {"addmm": 3 * 3, "mm": 3, "native_layer_norm": 2 * 3, "sigmoid_": 3, ATTENTION: 3}
    assert alternate == {"addmm": 3 * 2, "mm": 2, "native_layer_norm": 2 * 2, "sigmoid_": 2, ATTENTION: 2}
    assert selective == {"addmm": 0, "mm": 0, "native_layer_norm": 0, "sigmoid_": 0, ATTENTION: 3}
    assert operators == {"addmm": 0, "mm": 0, "native_layer_norm": 2 * 3, "sigmoid_": 3, ATTENTION: 0}


def gradients_with_hook(runs) -> list[list[Tensor]]:
    """With a user's hook that replaces what a layer norm gave, and one that changes another in place."""
    found = []
    for run in runs:
        trainer, batches = parts(run)
        block = trainer.model.blocks[0]
        block.attention_norm.register_forward_hook(lambda _, __, y: 2 * y)
        block.mlp_norm.register_forward_hook(lambda _, __, y: y.mul_(3))
        trainer.accumulate(0, batches.micro_batches(0))
        found.append([p.grad.to_local().clone() for p in trainer.parameters])
    return found


def test_user_hooks_on_what_is_recomputed_have_their_effect(ranks, run_with):
    plain, *others = ranks.run(1, gradients_with_hook, [run_with(), *(run_with(*mode) for mode in MODES)])[0]
    for mode, gradients in zip(MODES, others, strict=True):
        assert are_equal(gradients, plain), mode


def changed_between(run) -> str:
    trainer, batches = parts(run)
    inputs: list[Tensor] = []
    trainer.model.blocks[0].mlp_norm.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    batch = batches.micro_batches(0)[0]
    trainer.streams.restart(step=0)
    loss = trainer.model.loss(batch)
    with torch.no_grad():
        inputs[0].add_(1.0)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_input_that_was_changed_before_it_is_needed_again_is_an_error(ranks, run_with):
    told = ranks.run(1, changed_between, run_with('training.recompute="operators"', "model.dropout=0.0"))[0]
    assert told == (
        'A layer\'s activations must not be changed in place under training.recompute="operators", but an activation '
        "was changed between the forward and the backward pass. Change a copy instead."
    )


def freed_inputs(run) -> list[bool]:
    """Which layers' inputs are gone from the device once the forward pass is through."""
    gc.freeze()  # the collection below is only of what this function makes
    trainer, batches = parts(run)
    inputs: list[StorageWeakRef] = []
    for block in trainer.model.blocks:
        block.register_forward_pre_hook(lambda _, x: inputs.append(StorageWeakRef(x[0].untyped_storage())))
    trainer.streams.restart(step=0)
    loss = trainer.model.loss(batches.micro_batches(0)[0])
    gc.collect()
    freed = [storage.expired() for storage in inputs]
    gc.unfreeze()
    loss.backward()
    return freed


def test_offloaded_inputs_are_freed(ranks, run_with):
    options = ("model.num_layers=3", 'training.recompute="full"')
    kept = ranks.run(1, freed_inputs, run_with(*options))[0]
    freed = ranks.run(1, freed_inputs, run_with(*options, 'training.offload=["activations"]'))[0]
    assert kept == [False, False, False]
    assert freed == [True, True, True]


def test_host_memory_gives_back_what_it_was_given_in_any_order_and_often():
    memory = HostActivations(CPU)
    tensors = [torch.randn(3, 4).t() for _ in range(4)]
    put = [memory._put(tensor) for tensor in tensors]
    for i in (3, 2, 2, 0, 1, 3):
        back = memory._get(put[i])
        assert torch.equal(back, tensors[i])
        assert back.data_ptr() != tensors[i].data_ptr()


def test_host_memory_fetches_one_tensor_ahead():
    memory = HostActivations(CPU)
    put = [memory._put(torch.randn(3)) for _ in range(3)]
    memory._get(put[2])
    assert [waiting.device is None for waiting in put] == [True, False, True]
    memory._get(put[1])
    memory._get(put[0])
    later = memory._put(torch.randn(3))
    memory._get(later)
    assert [waiting.device is None for waiting in (*put, later)] == [True] * 4, "an earlier pass has had its own"


@pytest.mark.gpu
def test_device_memory_stays_small_however_far_the_host_runs_ahead():
    device, num, size = torch.device("cuda"), 16, 1 << 22
    memory = HostActivations(device)
    for _ in range(2):  # pinned memory is made in the first round, for which everybody waits
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        torch.cuda._sleep(500_000_000)
        put = [memory._put(torch.full((size,), float(i), device=device)) for i in range(num)]
        same = []
        for i in reversed(range(num)):
            back = memory._get(put.pop())
            same.append((back == i).all())
            del back
        assert torch.stack(same).all()
    assert torch.cuda.max_memory_reserved() - before < num // 2 * size * 4
