"""Faults of low-rank adapters, planted one at a time: `verify` names the module of each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config import Layout
from crosscut.parallel import ColumnParallelLinear, RowParallelLinear, fused, linear
from crosscut.parallel.state.parameters import local
from crosscut.verification import for_verification
from tests.ranks import RankPool
from tests.verification.mutations import Patch, instead_of, verify_planted
from tests.verification.runs import LLAMA, tiny_run

SHARED_HEADS: dict[str, Any] = {**LLAMA, "num_kv_heads": 2}


@instead_of(linear, "local_inside")
def partial_gradients_not_summed(_plain: Any, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return local(parameter, dtype)


@instead_of(RowParallelLinear, "_low_rank")
def adapter_of_the_first_rank_only(plain: Any, self: RowParallelLinear, x: Tensor) -> fused.LowRank:
    low, up = plain(self, x)
    return fused.LowRank(low if self.mesh.tensor.rank == 0 else low * 0.0, up)


@instead_of(ColumnParallelLinear, "add_adapted")
def keys_and_values_exchanged(plain: Any, self: ColumnParallelLinear, y: Tensor, low: Tensor) -> Tensor:
    if self.adapter.num_matrices == 2 and self.mesh.tensor.size > 1:
        low = low.roll(low.shape[-1] // 2, -1)
    return plain(self, y, low)


@instead_of(RowParallelLinear, "_low_rank")
def scaled_by_the_ranks(plain: Any, self: RowParallelLinear, x: Tensor) -> fused.LowRank:
    low, up = plain(self, x)
    return fused.LowRank(low / self.mesh.tensor.size, up)


@instead_of(linear, "_multiply_all")
def adapter_outside_of_f(plain: Any, x: Tensor, layers: Any) -> tuple[Tensor, ...]:
    """The adapter reads the input without f, so its part of the input's gradient is not summed."""
    adapters = [layer.adapter for layer in layers]
    for layer in layers:
        layer.adapter = None
    outputs = plain(x, layers)
    for layer, adapter in zip(layers, adapters, strict=True):
        layer.adapter = adapter
    return tuple(
        layer.add_adapted(y, F.linear(x, linear.local_inside(layer.adapter.down, x.dtype)))
        for layer, y in zip(layers, outputs, strict=True)
    )


FAULTS: dict[str, tuple[Callable[[Patch], None], str, dict[str, Any]]] = {
    "partial gradients of adapters are not summed": (partial_gradients_not_summed, "blocks.1.mlp.expand.adapter", {}),
    "only the first rank adds its adapter before g": (
        adapter_of_the_first_rank_only, "blocks.0.attention.output", {}
    ),
    "the adapters of keys and values are exchanged": (
        keys_and_values_exchanged, "blocks.0.attention.qkv", SHARED_HEADS
    ),
    "the scale of row-parallel adapters is divided by T": (scaled_by_the_ranks, "blocks.0.attention.output", {}),
    "an adapter reads its input without f": (adapter_outside_of_f, "blocks.1.mlp.expand", {})
}  # fmt: skip


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_an_adapter_is_found_and_its_module_named(ranks: RankPool, name: str) -> None:
    plant, module, options = FAULTS[name]
    run = for_verification(tiny_run(lora_rank=4, **options), Layout(tensor=2), "float64")
    report = ranks.run(2, verify_planted, plant, run)[0]
    assert not report.same
    assert report.first.module == module, report.first
