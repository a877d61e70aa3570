"""No host waits inside a step: a GPU is given all of it and goes on alone.

Two looks at it that need no GPU. On the meta device tensors have no values, so whatever would fetch one raises, and a
copy between it and the CPU is what a copy between a GPU and its host would be. On real ranks the profiler counts the
operators that read a value, also those that others call inside.
"""

import dataclasses
import importlib.util
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.model import Batch
from crosscut.parallel import make_mesh
from crosscut.training.precision import FLOAT8_CAPABILITY, resolve_on
from crosscut.training.speed import compilation
from crosscut.training.step import Trainer
from tests.training.jobs import CPU, parts

META = torch.device("meta")
READING = {
    "aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero",
    "aten::masked_select", "aten::unique", "aten::_unique2",
}  # fmt: skip
"""Operators that a host waits for: they give it a value, or a tensor whose size is one."""

READ_ON_THE_CPU_ONLY = {"aten::_fused_adamw_", "aten::_assert_async"}
"""Their kernels for the CPU read scalars, those for a GPU are given their addresses."""

LAYOUTS = {
    "tensor 2": ("layout.tensor=2",),
    "data 2": ("layout.data=2",),
    "split": ("layout.tensor=2", "layout.sequence_parallel=true"),
    "micro-batches": ("layout.data=2", "training.micro_batch_size=1"),
}
SHARDED = {
    "zero2": ("layout.data=2", 'layout.sharding="zero2"', "training.micro_batch_size=1"),
    "zero3": ("layout.data=2", 'layout.sharding="zero3"'),
}
RECOMPUTED = {mode: (f"training.recompute={mode}",) for mode in ("full", "selective", "operators")}
ALSO = {
    "bfloat16": ("training.precision=bfloat16",),
    "float16": ("training.precision=float16",),
    "offload": ('training.offload=["optimizer"]',),
    **RECOMPUTED,
    "full, every second": ("training.recompute=full", "training.recompute_every=2", "model.dropout=0.0"),
}
FLOAT8 = {"float8": ("training.precision=float8",)}
"""On the meta device only: there are processors without such products."""
TOGETHER = {
    "split, bfloat16, operators": (*LAYOUTS["split"], *ALSO["bfloat16"], *ALSO["operators"]),
    "micro-batches, float16, offload": (*LAYOUTS["micro-batches"], *ALSO["float16"], *ALSO["offload"]),
    "tensor 2, every second": (*LAYOUTS["tensor 2"], *ALSO["full, every second"]),
}
"""The quick cases; the slow ones tell the options of a failure apart."""
OFFLOADED = {"activations": ("training.recompute=full", 'training.offload=["activations"]')}
"""By the profiler only: to keep a tensor without values on the host is a crossing that raises."""


class Crossings(TorchDispatchMode):
    """Counts copies from the host to the device or back: a GPU's host would wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() in ("aten::_to_copy", "aten::copy_"):
            places = {t.device.type for t in (*args, result) if isinstance(t, torch.Tensor)}
            self.seen.update([func.name()] if len(places) > 1 else [])
        return result


def plant(trainer: Trainer, kind: str) -> None:
    """Let every loss be looked at by the host."""
    loss = trainer.model.loss

    def looked_at(batch: Batch, *more: Any, **how: Any) -> Any:
        found = loss(batch, *more, **how)
        if kind == "item":
            found.item()
        if kind == "from the host":
            found = found + torch.zeros(1).to(found.device).sum()
        if kind == "mask":
            found = found + batch.tokens[batch.tokens < 0].sum()
        return found

    trainer.model.loss = looked_at


@mock.patch.object(torch, "is_autocast_enabled", lambda *_: False)  # PyTorch raises an error for the meta device
def crossings_on_meta(run: Any, planted: str = "") -> dict[str, int]:
    trainer = Trainer(resolve_on(run, CPU), dataclasses.replace(make_mesh(run.layout, CPU), device=META))
    plant(trainer, planted)
    ids = torch.zeros(run.micro_batch_size, run.training.sequence_length, dtype=torch.int64, device=META)
    with Crossings() as crossings:
        trainer.step(0, [Batch(tokens=ids, targets=ids)] * run.num_micro_batches)
    return dict(crossings.seen)


def cases(quick: dict[str, tuple[str, ...]], *slow: dict[str, tuple[str, ...]]) -> list[Any]:
    """Parameters of a test, by name."""
    marked = [pytest.param(options, id=name, marks=pytest.mark.slow) for of in slow for name, options in of.items()]
    return [*(pytest.param(options, id=name) for name, options in quick.items()), *marked]


@pytest.mark.parametrize("options", cases(TOGETHER | FLOAT8, LAYOUTS, ALSO))
def test_step_needs_no_value_of_the_device(ranks, run_with, options):
    run = run_with(*options)
    assert ranks.run(run.layout.world_size, crossings_on_meta, run) == [{}] * run.layout.world_size


def test_reading_a_value_of_the_device_is_seen(ranks, run_with):
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta tensors"):
        ranks.run(1, crossings_on_meta, run_with(), "item")
    with pytest.raises(NotImplementedError, match="nonzero"):
        ranks.run(1, crossings_on_meta, run_with(), "mask")
    assert ranks.run(1, crossings_on_meta, run_with(), "from the host") == [{"aten::_to_copy": 1}]


def readings(run: Any, planted: str = "") -> dict[str, int]:
    """Operators of a step that give the host a value, with how often they ran; the first step may make state."""
    trainer, batches = parts(run)
    plant(trainer, planted)
    trainer.step(0, batches.micro_batches(0))
    micro_batches = batches.micro_batches(1)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        trainer.step(1, micro_batches)
    events = seen.events()
    assert {event.name for event in events} >= READ_ON_THE_CPU_ONLY, "the profiler must have seen the step"
    return dict(Counter(e.name for e in events if e.name in READING and not callers(e) & READ_ON_THE_CPU_ONLY))


def callers(event: Any) -> set[str]:
    return {event.cpu_parent.name, *callers(event.cpu_parent)} if event.cpu_parent else set()


ON_RANKS = {
    "zero3, float16, offload": (*SHARDED["zero3"], *ALSO["float16"], *ALSO["offload"]),
    "split, activations": (*LAYOUTS["split"], *OFFLOADED["activations"]),
}


@pytest.mark.parametrize("options", cases(ON_RANKS, LAYOUTS, SHARDED, ALSO, OFFLOADED))
def test_step_reads_nothing(ranks, run_with, options):
    run = run_with(*options)
    assert ranks.run(run.layout.world_size, readings, run) == [{}] * run.layout.world_size


def compiled_readings(run: Any) -> dict[str, int]:
    with mock.patch.object(compilation, "BACKEND", "aot_eager"):
        return readings(run)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("options", [LAYOUTS["split"], RECOMPUTED["operators"]], ids=["split", "operators"])
def test_compiled_step_reads_nothing(ranks, run_with, options):
    run = run_with("training.compile=on", "model.dropout=0.0", *options)
    assert ranks.run(run.layout.world_size, compiled_readings, run) == [{}] * run.layout.world_size


def test_reading_is_counted(ranks, run_with):
    assert ranks.run(1, readings, run_with(), "item") == [{"aten::item": 1, "aten::_local_scalar_dense": 1}]
    assert ranks.run(1, readings, run_with(), "mask") == [{"aten::nonzero": 1}]


def step_in_error_mode(run: Any, planted: str = "") -> None:
    device = torch.device("cuda", 0)
    trainer = Trainer(resolve_on(run, device), make_mesh(run.layout, device))
    plant(trainer, planted)
    ids = torch.zeros(run.micro_batch_size, run.training.sequence_length, dtype=torch.int64, device=device)
    trainer.step(0, [Batch(tokens=ids, targets=ids)] * run.num_micro_batches).wait()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.step(1, [Batch(tokens=ids, targets=ids)] * run.num_micro_batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")


ON_A_GPU = {
    "float32": (), **ALSO, **OFFLOADED, **FLOAT8, "compiled": ("training.compile=on", "model.dropout=0.0"),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("options", ON_A_GPU.values(), ids=ON_A_GPU)
def test_host_does_not_wait_for_a_gpu(ranks, run_with, options):
    if options in FLOAT8.values() and torch.cuda.get_device_capability() < FLOAT8_CAPABILITY:
        pytest.skip("the GPU has no products in 8 bits")
    if "training.compile=on" in options and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton, which writes the GPU's kernels, is not installed")
    ranks.run(1, step_in_error_mode, run_with(*options))
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        ranks.run(1, step_in_error_mode, run_with(*options), "item")
