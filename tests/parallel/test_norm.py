"""Layer normalisation against `nn.LayerNorm`."""

from functools import partial

import pytest
import torch
from torch import nn

from crosscut.config import Layout
from crosscut.parallel import LayerNorm, make_mesh
from tests.parallel.twins import SOME, assert_twins, split_sequence
from tests.ranks import RankPool

make_norm = partial(LayerNorm, 12, epsilon=1e-3, dtype=torch.float64)


@pytest.mark.parametrize("layout", SOME, ids=str)
def test_layer_norm_is_layer_norm(ranks: RankPool, layout: Layout) -> None:
    serial = nn.LayerNorm(12, eps=1e-3).double()
    nn.init.normal_(serial.weight)
    nn.init.normal_(serial.bias)
    between = split_sequence(layout)
    assert_twins(ranks, layout, make_norm, serial, torch.randn(2, 8, 12).double(), (between, between))


def _initial(layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    norm = make_norm(mesh=make_mesh(layout, torch.device("cpu")))
    return norm.weight.full_tensor().detach(), norm.bias.full_tensor().detach()


def test_layer_norm_begins_as_the_identity_s_scale(ranks: RankPool) -> None:
    for weight, bias in ranks.run(2, _initial, Layout(tensor=2)):
        assert torch.equal(weight, torch.ones(12).double())
        assert torch.equal(bias, torch.zeros(12).double())
