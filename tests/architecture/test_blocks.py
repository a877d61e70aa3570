"""Work of attention with a block mask, as the planner counts it."""

from dataclasses import replace
from typing import Any

import pytest

from crosscut.architecture import Target, describe
from crosscut.architecture.blocks import BlockMask
from crosscut.architecture.readings import inner_products, kept
from crosscut.config import Layout, ModelConfig
from crosscut.planner.flops import layer_flops_per_token

SECTION = {"block_size": 16, "window": 2, "global_blocks": 1, "stride": 4}
SIZES: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 32, "num_heads": 4, "vocab_size": 50, "max_sequence_length": 128, "dropout": 0.0,
}  # fmt: skip
SPARSE = ModelConfig(**SIZES, layers=("sparse_attention",), sparse_attention=SECTION)
DENSE = ModelConfig(**SIZES, layers=("attention",))
SEEN = [(0,), (0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 4), (0, 3, 4, 5), (0, 3, 5, 6), (0, 3, 6, 7)]
"""Blocks that each of eight blocks sees: itself, the one before it, the first one, and the fourth one."""
PAIRS = 24


def flops(model: ModelConfig, layout: Layout, length: int = 128) -> int:
    target = replace(Target.of(layout), sequences=3, length=length)
    return sum(product.flops for product in inner_products(describe(model).layers[0], target))


def test_flops_are_those_of_the_blocks() -> None:
    mask = BlockMask(**SECTION, is_causal=True)
    assert [mask.keys_of(block, 8) for block in range(8)] == SEEN
    of_pair = 3 * 4 * 4 * 16 * 16 * 8
    assert (flops(SPARSE, Layout()), flops(DENSE, Layout())) == (PAIRS * of_pair, 64 * of_pair)


@pytest.mark.parametrize("layout", [Layout(tensor=4), Layout(context=2), Layout(tensor=2, context=2)], ids=str)
def test_ranks_divide_the_blocks_of_all_heads(layout: Layout) -> None:
    exchanging = replace(layout, context_attention="all_to_all")
    assert flops(SPARSE, exchanging) * layout.world_size == flops(SPARSE, Layout())


def test_a_token_computes_its_share_of_the_blocks_of_a_sequence() -> None:
    others = layer_flops_per_token(describe(DENSE).layers[0], 128) - flops(DENSE, Layout()) // (3 * 128)
    found = layer_flops_per_token(describe(SPARSE).layers[0], 128)
    assert found == others + flops(SPARSE, Layout()) // (3 * 128)


def test_a_layer_keeps_as_much_as_with_the_dense_kernel() -> None:
    target = replace(Target.of(Layout(tensor=2)), sequences=3, length=128)
    sparse, dense = (kept(describe(model).layers[0], target, "none") for model in (SPARSE, DENSE))
    assert sparse == dense


def test_groups_of_long_sequences_are_few() -> None:
    mask = BlockMask(64, window=4, global_blocks=1, stride=8, is_causal=True)
    assert mask.num_pairs(4096) / (64 * 65 // 2) == pytest.approx(0.25, abs=0.01)
    assert len(mask.groups(4096)) < 20
