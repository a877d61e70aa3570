"""`prove_module` and the parts of it that need no ranks."""

import sys

import pytest
import torch
from torch import nn

from crosscut.config import ConfigError, Layout, LayoutError
from crosscut.verification import prove_module
from crosscut.verification.foreign.limits import Limits
from crosscut.verification.foreign.wide import disturb_constants, in_float64, to_float64
from tests.ranks import RankPool
from tests.verification.foreign import net


def test_functions_that_ranks_cannot_import_are_refused() -> None:
    with pytest.raises(ConfigError, match="`cut` must be a function at the top of a module, because the ranks"):
        prove_module(net.build, lambda module, mesh: None, Layout(tensor=2))


def test_layout_with_other_ranks_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"at least 2 tensor ranks.*but is tensor 2 x data 2"):
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


def _reserve(num_bytes: int) -> bool:
    """On a rank: whether this much memory can be reserved within a limit of 64 MiB."""
    with Limits(seconds=60.0, memory=64 << 20).kept():
        try:
            return bool(bytearray(num_bytes))
        except MemoryError:
            return False


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce the limit")
def test_a_rank_may_add_only_its_memory(ranks: RankPool) -> None:
    assert ranks.run(1, _reserve, 1 << 20) == [True]
    assert ranks.run(1, _reserve, 1 << 28) == [False]
