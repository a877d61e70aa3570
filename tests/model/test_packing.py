"""Packed weights: the products of plain ones, only where they can be used, and none that a gradient could pass."""

from itertools import chain
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from crosscut.config import Layout
from crosscut.kernels import FLOAT8, ORDINARY, Products, onednn
from crosscut.model import GenerationCache
from crosscut.model.packing import pack_weights
from crosscut.parallel import (
    Blocks,
    ColumnParallelLinear,
    ColumnParallelLinears,
    Multiplication,
    ParallelMesh,
    RowParallelLinear,
    VocabParallelOutput,
    local,
    make_mesh,
    normal_,
    shard_model,
)
from tests.generation.models import make
from tests.parallel.twins import CPU, each
from tests.ranks import RankPool
from tests.refusals import refusal

IN, WIDTH, TEXTS = 23, 44, 8

pytestmark = pytest.mark.skipif(not onednn.IS_THERE, reason="this PyTorch has no oneDNN")


class Layers(nn.Module):
    """A layer of each kind, one with blocks that are fewer than two ranks."""

    def __init__(self, mesh: ParallelMesh, dtype: torch.dtype = torch.float32, products: Products = ORDINARY) -> None:
        super().__init__()
        place: Any = {"mesh": mesh, "dtype": dtype, "how": Multiplication(products)}
        self.columns = ColumnParallelLinears(
            a=ColumnParallelLinear(IN, WIDTH, **place), b=ColumnParallelLinear(IN, Blocks(1, 7), bias=False, **place)
        )
        self.row = RowParallelLinear(WIDTH, IN, **place)
        self.output = VocabParallelOutput(50, IN, mesh=mesh, dtype=dtype)
        shard_model(self, mesh, units=[self.columns], always_used=True)
        for name, parameter in self.named_parameters():
            normal_(parameter, std=1.0, seed=1, name=name)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a, b = self.columns(x)
        y = self.row(a)
        return a, b, y, self.output.products.output(y.flatten(0, 1), local(self.output.weight, y.dtype))


@torch.no_grad()
def _is_packed(weight: Tensor) -> bool:
    return local(weight, weight.dtype).is_mkldnn


@torch.no_grad()
def _run_both(layout: Layout, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of outputs of plain and packed layers for the same tokens. The input is not contiguous, like the input from
    other ranks.
    """
    mesh = make_mesh(layout, CPU)
    layers = Layers(mesh)
    x = torch.randn(IN, 2, num_tokens, generator=torch.Generator().manual_seed(0)).permute(1, 2, 0)
    x = x.chunk(mesh.tensor.size, 1)[mesh.tensor.rank] if mesh.sequence_parallel else x
    plain = layers(x)
    pack_weights(layers, mesh, num_texts=TEXTS)
    assert _is_packed(layers.columns.a.weight)
    assert _is_packed(layers.columns.b.weight) == (mesh.tensor.size == 1), "whole on two ranks, each uses some rows"
    assert _is_packed(layers.row.weight)
    assert _is_packed(layers.output.weight)
    return list(zip(plain, layers(x), strict=True))


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tensor=2), Layout(tensor=2, sequence_parallel=True)], ids=["one", "cut", "sequence"]
)
def test_packed_weights_give_the_products_of_plain_ones(ranks: RankPool, layout: Layout) -> None:
    cases = [(layout, max(num_tokens, layout.tensor)) for num_tokens in (1, 4, 16, 40)]
    for of_cases in ranks.run(layout.world_size, each, _run_both, cases):
        for plain, packed in chain(*of_cases):
            torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-3)
            assert packed.is_contiguous()


def _pack(mesh: ParallelMesh, num_texts: int = TEXTS, **options: Any) -> Layers:
    layers = Layers(mesh, **options)
    pack_weights(layers, mesh, num_texts=num_texts)
    return layers


def _what_is_packed(layout: Layout, has_onednn: bool = True, options: Any = MappingProxyType({})) -> list[bool]:
    with mock.patch.object(onednn, "IS_THERE", has_onednn and onednn.IS_THERE):
        layers = _pack(make_mesh(layout, CPU), **options)
    assert (layers.output.products is ORDINARY) == (not _is_packed(layers.output.weight))
    return [_is_packed(parameter) for name, parameter in layers.named_parameters() if name.endswith("weight")]


@pytest.mark.parametrize(
    ("has_onednn", "options"),
    [(True, {"dtype": torch.float64}), (True, {"num_texts": 2}), (True, {"products": FLOAT8}), (False, {})],
    ids=["wide", "for two", "float8", "without oneDNN"],
)
def test_a_model_is_left_alone_where_packed_weights_cannot_be_used_or_are_slower(
    ranks: RankPool, has_onednn: bool, options: dict[str, Any]
) -> None:
    assert ranks.run(1, _what_is_packed, Layout(), has_onednn, options) == [[False] * 4]


def test_weights_that_data_ranks_share_are_left_alone(ranks: RankPool) -> None:
    assert ranks.run(2, _what_is_packed, Layout(data=2, sharding="zero3")) == [[False] * 4] * 2


def _ask_for_a_gradient() -> str:
    mesh = make_mesh(Layout(), CPU)
    layers = _pack(mesh)
    a, *_ = layers(torch.randn(1, 8, IN, requires_grad=True))
    return refusal(RuntimeError, a.sum().backward)


def test_a_gradient_through_packed_weights_is_refused(ranks: RankPool) -> None:
    assert ranks.run(1, _ask_for_a_gradient)[0] == (
        "A model needs plain weights to compute gradients, but this model's weights were packed by `pack_weights` to "
        "generate text. Load the model again."
    )


def _latents_packed() -> tuple[Tensor, Tensor]:
    """Hidden states of a new token by a plain and by a packed model with latent attention."""
    found = []
    for packs in (False, True):
        gpt = make(Layout(), "latent", dtype=torch.float32).eval()
        if packs:
            pack_weights(gpt, gpt.mesh, num_texts=TEXTS)
            attention = gpt.blocks[0].attention
            assert _is_packed(attention.query.weight) and not _is_packed(attention.key_value.weight)
        cache = GenerationCache(gpt.config, mesh=gpt.mesh, dtype=torch.float32, num_rows=1, capacity=8)
        gpt.read(torch.tensor([[5, 6, 7]]), cache, counts=[3])
        found.append(gpt.read(torch.tensor([[8]]), cache, counts=[1]))
    return found[0], found[1]


def test_a_weight_that_other_code_reads_stays_plain(ranks: RankPool) -> None:
    plain, packed = ranks.run(1, _latents_packed)[0]
    torch.testing.assert_close(packed, plain)
