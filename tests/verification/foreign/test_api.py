"""`prove_module` and the parts of it that need no ranks."""

import pytest
import torch
from torch import nn

from crosscut.config import ConfigError, Layout, LayoutError
from crosscut.verification import prove_module
from crosscut.verification.foreign.wide import disturb_constants, in_float64, to_float64
from tests.verification.foreign import net


def test_functions_that_ranks_cannot_import_are_refused() -> None:
    with pytest.raises(ConfigError, match="`cut` must be a function at the top of a module, because the ranks"):
        prove_module(net.build, lambda module, mesh: None, Layout(tensor=2))


def test_layout_with_other_ranks_is_refused() -> None:
    with pytest.raises(LayoutError, match="at least 2 tensor ranks and no other ranks, but is tensor 2 x data 2"):
        prove_module(net.build, net.by_hand, Layout(tensor=2, data=2))


def test_casts_to_narrower_types_give_float64() -> None:
    x = torch.ones(2, dtype=torch.float64) / 3
    with in_float64():
        found = [x.float(), x.to(torch.bfloat16), x.type(torch.float16), x.softmax(0, dtype=torch.float32)]
        found += [torch.zeros(2), torch.arange(2, dtype=torch.float32)]
    assert {each.dtype for each in found} == {torch.float64}
    assert torch.equal(found[0], x)
    assert torch.zeros(2).dtype is torch.float32


def test_only_floating_point_inputs_are_widened() -> None:
    wide = to_float64({"x": [torch.ones(1)], "tokens": torch.ones(1, dtype=torch.long), "flag": True})
    assert (wide["x"][0].dtype, wide["tokens"].dtype, wide["flag"]) == (torch.float64, torch.long, True)


def test_only_constant_parameters_are_disturbed() -> None:
    layer = nn.LayerNorm(4)
    matrix = nn.Linear(4, 4)
    before = matrix.weight.clone()
    disturb_constants(nn.Sequential(layer, matrix))
    assert len(set(layer.weight.tolist())) == 4
    assert len(set(layer.bias.tolist())) == 4
    assert torch.equal(matrix.weight, before)
