"""Who may draw what: the paper's rule on its own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import Layout
from crosscut.parallel import make_mesh
from crosscut.verification.draws import Draw, compare_draws, draws_of, first_disagreement
from tests.ranks import RankPool
from tests.verification.runs import CPU

SAME = Draw("dropout", "state", "tensor")


def test_copies_that_drop_alike_agree():
    assert first_disagreement([[SAME], [SAME]], Layout(tensor=2)) is None


def test_parts_that_drop_each_for_itself_agree():
    assert first_disagreement([[SAME], [Draw("dropout", "other state", "other tensor")]], Layout(tensor=2)) is None


def test_copies_that_drop_each_for_itself_are_told():
    found = first_disagreement([[SAME, SAME], [SAME, Draw("dropout", "other state", "tensor")]], Layout(tensor=2))
    assert found is not None
    assert (found.module, found.ranks) == ("dropout", (0, 1))
    assert "drop from the same tensor" in found.told


def test_parts_that_drop_alike_are_told():
    found = first_disagreement(
        [[SAME], [Draw("dropout", "third", "third")], [Draw("dropout", "state", "another")]], Layout(tensor=3)
    )
    assert found is not None
    assert found.ranks == (0, 2)
    assert "drop from different tensors" in found.told


def test_data_ranks_must_draw_differently_whatever_they_drop_from():
    assert first_disagreement([[SAME], [Draw("dropout", "other state", "tensor")]], Layout(data=2)) is None
    found = first_disagreement([[SAME], [SAME]], Layout(data=2))
    assert found is not None
    assert "see different data" in found.told


def test_what_was_not_seen_is_not_judged():
    assert first_disagreement([[Draw("m", "one", "")], [Draw("m", "one", "")]], Layout(tensor=2)) is None


def test_rank_that_draws_less_often_is_told():
    found = first_disagreement([[SAME, Draw("late", "s", "t")], [SAME]], Layout(tensor=2))
    assert found is not None
    assert (found.module, found.told) == ("late", "make different numbers of draws")


class Drops(nn.Module):
    """One way of dropping out, of the many that models have."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = {"inplace": nn.Dropout(0.5, inplace=True), "channels": nn.Dropout1d(0.5)}.get(how, nn.Dropout(0.5))
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "attention":
            heads = x.view(2, 2, 4, 4)
            return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5).view_as(x)
        if self.how == "compared with a number":
            return x * (torch.rand(x.shape) < 0.5)
        if self.how == "constant probabilities":
            return x * torch.bernoulli(torch.full_like(x, 0.5))
        if self.how == "whole samples":
            return x * x.new_empty(x.shape[0], 1).bernoulli_(0.5).div_(0.5)
        if self.how == "a generator of its own":
            return x * torch.rand(x.shape, generator=self.generator.manual_seed(torch.initial_seed())).round()
        if self.how == "selected":
            return torch.where(torch.rand_like(x) < 0.5, x, 0.0)
        y: Tensor = self.layer(x.clone())
        return y


HOWS = [
    "plain", "inplace", "channels", "attention", "compared with a number", "constant probabilities", "whole samples",
    "a generator of its own", "selected",
]  # fmt: skip


def _disagreement(how: str, own_data: bool, own_seed: bool) -> tuple[list[Draw], Any]:
    mesh = make_mesh(Layout(tensor=2), CPU)
    torch.manual_seed(mesh.tensor.rank if own_seed else 7)
    generator = torch.Generator().manual_seed(mesh.tensor.rank if own_data else 0)
    x = torch.randn(4, 16, generator=generator).requires_grad_()
    model = Drops(how)
    draws = draws_of(model, mesh, lambda: model(x).sum().backward())
    return draws, compare_draws(draws, mesh)


@pytest.mark.parametrize("how", HOWS)
def test_every_way_of_dropping_is_seen_and_judged(ranks: RankPool, how: str) -> None:
    for same, own_data, own_seed in [
        (True, False, False),
        (True, True, True),
        (False, True, False),
        (False, False, True),
    ]:
        draws, found = ranks.run(2, _disagreement, how, own_data, own_seed)[0]
        assert len(draws) == 1
        assert draws[0].dropped, "what it drops from was not seen"
        assert (found is None) == bool(same), (own_data, own_seed, found)
