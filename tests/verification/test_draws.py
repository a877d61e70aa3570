"""Who may draw what: the paper's rule on its own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import Layout
from crosscut.parallel import make_mesh
from crosscut.parallel.collectives import gather_to_first
from crosscut.verification.dropout.draw_rules import first_disagreement, first_other_start
from crosscut.verification.dropout.draws import Drawn, DropoutDraw, ModuleEntry, draws_of
from crosscut.verification.report import FirstDifference
from tests.ranks import RankPool
from tests.verification.runs import CPU

SAME = DropoutDraw("dropout", "state", "tensor")
FIRST_DRAW = DropoutDraw("dropout", "first state", "first tensor")


def _found(
    *ranks: list[DropoutDraw], layout: Layout, repeated: list[DropoutDraw] | None = None
) -> FirstDifference | None:
    """The first disagreement of the draws of these ranks. The first rank also repeats draws."""
    every = [Drawn(draws, [], {}, []) for draws in ranks]
    every[0] = every[0]._replace(repeated=repeated or [])
    return first_disagreement(every, layout, ("dropout", "late"))


OWN = DropoutDraw("dropout", "other state", "other tensor")
UNSEEN = DropoutDraw("m", "one", "")
BY_BERNOULLI = OWN._replace(operator="bernoulli [0.9]")
LATE = DropoutDraw("late", "s", "t")
TENSOR, DATA = Layout(tensor=2), Layout(data=2)
OTHERWISE = "in different modules or with different probabilities"
RANKS = {
    "copies that drop alike": (TENSOR, [[SAME], [SAME]], None),
    "parts that drop each for itself": (TENSOR, [[SAME], [OWN]], None),
    "copies that drop each for itself": (
        TENSOR,
        [[FIRST_DRAW, SAME], [FIRST_DRAW, OWN._replace(dropped="tensor")]],
        ("dropout", "Ranks 0 and 1 drop from the same tensor"),
    ),
    "parts that drop alike": (
        Layout(tensor=3),
        [[SAME], [DropoutDraw("dropout", "third", "third")], [SAME._replace(dropped="another")]],
        ("dropout", "Ranks 0 and 2 drop from different tensors"),
    ),
    "data ranks that draw differently": (DATA, [[SAME], [OWN._replace(dropped="tensor")]], None),
    "data ranks that draw alike": (DATA, [[SAME], [SAME]], ("dropout", "see different data")),
    "what was not seen is not judged": (TENSOR, [[UNSEEN], [UNSEEN]], None),
    "a rank that draws less often": (TENSOR, [[SAME, LATE], [SAME]], ("late", "make different numbers of draws")),
    **{
        f"{name} on {layout}": (layout, [[SAME._replace(operator="bernoulli [0.9]")], [other]], expected)
        for layout in (TENSOR, DATA)
        for name, other, expected in (
            ("the same operator", BY_BERNOULLI, None),
            ("another kernel", BY_BERNOULLI._replace(operator="fused [0.1]"), None),
            ("another probability", BY_BERNOULLI._replace(operator="bernoulli [0.8]"), ("dropout", OTHERWISE)),
            ("another module", BY_BERNOULLI._replace(module="late"), ("dropout", OTHERWISE)),
        )
    },
}
"""A layout, the draws of its ranks, and the module and the words of the disagreement, if there is one."""


@pytest.mark.parametrize(("layout", "draws", "expected"), RANKS.values(), ids=RANKS)
def test_ranks_draw_by_the_papers_rule(
    layout: Layout, draws: list[list[DropoutDraw]], expected: tuple[str, str] | None
) -> None:
    found = _found(*draws, layout=layout)
    assert (found is None) == (expected is None)
    assert expected is None or (found.module == expected[0] and expected[1] in found.cause)


TWICE = {
    "two micro-batches": (Layout(), [[SAME, SAME._replace(micro_batch=2)]], ("dropout", 2)),
    "two layers": (Layout(tensor=2), [[SAME, SAME._replace(module="late")]] * 2, ("late", 1)),
    "two stages": (Layout(pipeline=2), [[SAME._replace(module="late")], [SAME]], ("late", 1)),
    "a data rank's later draw": (
        Layout(data=2),
        [[SAME, LATE], [DropoutDraw("dropout", "u", "v"), DropoutDraw("late", "state", "w")]],
        ("late", 1),
    ),
}


@pytest.mark.parametrize(("layout", "draws", "named"), TWICE.values(), ids=TWICE)
def test_no_two_draws_use_the_same_numbers(
    layout: Layout, draws: list[list[DropoutDraw]], named: tuple[str, int]
) -> None:
    found = _found(*draws, layout=layout)
    assert (found.module, found.micro_batch) == named
    assert "draws the same numbers as `dropout` in micro-batch 1" in found.cause


OTHER = DropoutDraw("late", "other", "other tensor", "operator")
FIRST = SAME._replace(operator="operator")


@pytest.mark.parametrize(
    ("again", "named"),
    [
        (FIRST, None),
        (OTHER._replace(dropped="rounded otherwise"), None),
        (FIRST._replace(state="other"), "dropout"),
        (FIRST._replace(operator="another probability"), "dropout"),
        (OTHER._replace(dropped="", state="unknown"), "recomputation"),
    ],
)
def test_a_recomputation_repeats_the_draws(again: DropoutDraw, named: str | None) -> None:
    found = _found([FIRST, OTHER], layout=Layout(), repeated=[again._replace(module="")])
    assert (None if found is None else found.module) == named
    assert found is None or found.direction == "backward"


def test_a_rank_with_the_first_tokens_starts_its_stream_as_the_uncut_model_does():
    entry = ModuleEntry("blocks.1", 2, 1)
    uncut, other = Drawn([], [], {entry: "state"}, [entry]), Drawn([], [], {entry: "other"}, [])
    ranks = [Drawn([], [], {}, []), Drawn([], [], {}, []), uncut, other]
    assert first_other_start(ranks, uncut, Layout(pipeline=2, data=2)) is None, "the data ranks have other streams"
    found = first_other_start([*ranks[:2], other, uncut], uncut, Layout(pipeline=2, data=2))
    assert (found.module, found.micro_batch) == ("blocks.1", 2)
    assert first_other_start([other, other], uncut, Layout(tensor=2, sequence_parallel=True)) is None


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
    "a generator of its own", "selected"
]  # fmt: skip


JUDGED = {(False, False): True, (True, True): True, (True, False): False, (False, True): False}
"""Whether ranks agree, by whether each has its own data and whether each has its own seed."""


def _disagreements(how: str) -> list[tuple[list[DropoutDraw], Any]]:
    mesh, found = make_mesh(Layout(tensor=2), CPU), []
    for own_data, own_seed in JUDGED:
        torch.manual_seed(mesh.tensor.rank if own_seed else 7)
        generator = torch.Generator().manual_seed(mesh.tensor.rank if own_data else 0)
        x = torch.randn(4, 16, generator=generator).requires_grad_()
        model = Drops(how)
        drawn = draws_of(model, mesh, lambda model=model, x=x: model(x).sum().backward())
        every = gather_to_first(drawn)
        found.append((drawn.draws, None if every is None else first_disagreement(every, Layout(tensor=2))))
    return found


@pytest.mark.parametrize("how", HOWS)
def test_every_way_of_dropping_is_seen_and_judged(ranks: RankPool, how: str) -> None:
    for own, (draws, found) in zip(JUDGED, ranks.run(2, _disagreements, how)[0], strict=True):
        assert len(draws) == 1
        assert draws[0].dropped, "what it drops from was not seen"
        assert (found is None) == JUDGED[own], (own, found)
