"""Who may draw what: the paper's rule on its own."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import Layout
from crosscut.parallel import make_mesh
from crosscut.verification.draws import Draw, compare_draws, first_disagreement
from tests.ranks import RankPool
from tests.verification.runs import CPU

SAME = Draw("dropout", "state", "tensor")


def test_copies_that_drop_alike_agree():
    assert first_disagreement([[SAME], [SAME]]) is None


def test_parts_that_drop_each_for_itself_agree():
    assert first_disagreement([[SAME], [Draw("dropout", "other state", "other tensor")]]) is None


def test_copies_that_drop_each_for_itself_are_told():
    found = first_disagreement([[SAME, SAME], [SAME, Draw("dropout", "other state", "tensor")]])
    assert found is not None
    assert (found.module, found.ranks) == ("dropout", (0, 1))
    assert "drop from the same tensor" in found.told


def test_parts_that_drop_alike_are_told():
    found = first_disagreement([[SAME], [Draw("dropout", "third", "third")], [Draw("dropout", "state", "another")]])
    assert found is not None
    assert found.ranks == (0, 2)
    assert "drop from different tensors" in found.told


def test_rank_that_draws_less_often_is_told():
    found = first_disagreement([[SAME, Draw("late", "s", "t")], [SAME]])
    assert found is not None
    assert (found.module, found.told) == ("late", "do not draw equally often")


class Drops(nn.Module):
    """The four ways in which a model draws on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.inplace = nn.Dropout(0.5), nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inplace(self.plain(x).clone())
        heads = x.view(2, 2, 4, 4)
        x = x + F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5).view_as(x)
        return x * torch.bernoulli(x.sigmoid())


def _draws_of(own_data: bool, own_seed: bool) -> tuple[int, Any]:
    mesh = make_mesh(Layout(tensor=2), CPU)
    torch.manual_seed(mesh.tensor.rank if own_seed else 7)
    generator = torch.Generator().manual_seed(mesh.tensor.rank if own_data else 0)
    x = torch.randn(4, 16, generator=generator)
    model = Drops()
    return compare_draws(model, mesh, lambda: model(x.requires_grad_()).sum().backward())


def test_every_kind_of_dropout_is_seen_and_judged(ranks: RankPool) -> None:
    for own_data, own_seed in [(False, False), (True, True)]:
        count, found = ranks.run(2, _draws_of, own_data, own_seed)[0]
        assert count == 4
        assert found is None
    for own_data, own_seed in [(True, False), (False, True)]:
        _, found = ranks.run(2, _draws_of, own_data, own_seed)[0]
        assert found.module == "plain"
