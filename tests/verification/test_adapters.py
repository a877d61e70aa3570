"""Faults of low-rank adapters, planted one at a time: `verify` names the module of each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from crosscut.config import Layout
from crosscut.parallel import ColumnParallelLinear, RowParallelLinear, fused, linear
from crosscut.parallel.state.parameters import local
from crosscut.verification import LayoutReport, for_verification
from tests.ranks import RankPool
from tests.verification.runs import LLAMA, tiny_run, verify_run

Patch = pytest.MonkeyPatch
SHARED_HEADS: dict[str, Any] = {**LLAMA, "num_kv_heads": 2}


def partial_gradients_not_summed(patch: Patch) -> None:
    patch.setattr(linear, "local_inside", local)


def adapter_of_the_first_rank_only(patch: Patch) -> None:
    plain = RowParallelLinear._low_rank

    def faulty(self: RowParallelLinear, x: Tensor) -> fused.LowRank:
        low, up = plain(self, x)
        return fused.LowRank(low if self.mesh.tensor.rank == 0 else low * 0.0, up)

    patch.setattr(RowParallelLinear, "_low_rank", faulty)


def keys_and_values_exchanged(patch: Patch) -> None:
    plain = ColumnParallelLinear.add_adapted

    def faulty(self: ColumnParallelLinear, y: Tensor, low: Tensor) -> Tensor:
        if self.adapter.num_matrices == 2 and self.mesh.tensor.size > 1:
            low = low.roll(low.shape[-1] // 2, -1)
        return plain(self, y, low)

    patch.setattr(ColumnParallelLinear, "add_adapted", faulty)


def scaled_by_the_ranks(patch: Patch) -> None:
    plain = RowParallelLinear._low_rank

    def faulty(self: RowParallelLinear, x: Tensor) -> fused.LowRank:
        low, up = plain(self, x)
        return fused.LowRank(low / self.mesh.tensor.size, up)

    patch.setattr(RowParallelLinear, "_low_rank", faulty)


def adapter_outside_of_f(patch: Patch) -> None:
    """The adapter reads the input without f, so its part of the input's gradient is not summed."""
    plain = linear._multiply_all

    def faulty(x: Tensor, layers: Any) -> tuple[Tensor, ...]:
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

    patch.setattr(linear, "_multiply_all", faulty)


FAULTS: dict[str, tuple[Callable[[Patch], None], str, Layout, dict[str, Any]]] = {
    "partial gradients of adapters are not summed": (
        partial_gradients_not_summed, "blocks.1.mlp.expand.adapter", Layout(tensor=2), {}
    ),
    "only the first rank adds its adapter before g": (
        adapter_of_the_first_rank_only, "blocks.0.attention.output", Layout(tensor=2), {}
    ),
    "the adapters of keys and values are exchanged": (
        keys_and_values_exchanged, "blocks.0.attention.qkv", Layout(tensor=2), SHARED_HEADS
    ),
    "the scale of row-parallel adapters is divided by T": (
        scaled_by_the_ranks, "blocks.0.attention.output", Layout(tensor=2), {}
    ),
    "an adapter reads its input without f": (
        adapter_outside_of_f, "blocks.1.mlp.expand", Layout(tensor=2), {}
    ),
}  # fmt: skip


def _verify(name: str, layout: Layout, options: dict[str, Any]) -> LayoutReport:
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[name][0](patch)
        return verify_run(for_verification(tiny_run(lora_rank=4, **options), layout, "float64"))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_an_adapter_is_found_and_its_module_named(ranks: RankPool, name: str) -> None:
    _, module, layout, options = FAULTS[name]
    report = ranks.run(layout.world_size, _verify, name, layout, options)[0]
    assert not report.same
    assert report.first.module == module, report.first
