"""Convolutional networks cut by a plan: equal to the uncut network, and of every fault the module is named."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from crosscut.config import ConfigError, Layout, LayoutError
from crosscut.cutting import Plan, Rule, Style, costs_of, cut, print_plan, read_plan, write_plan
from crosscut.cutting.images.messages import image_messages
from crosscut.cutting.resolution import resolve
from crosscut.parallel import CollectiveRecorder, Sent, make_mesh
from crosscut.verification import LayoutReport
from crosscut.verification.foreign.cuts import ForeignCut, prove_on_mesh
from tests.cutting.images import nets
from tests.cutting.images.nets import PLAN, SPATIAL, SPLIT
from tests.ranks import RankPool
from tests.verification.foreign.test_cuts import assert_same
from tests.verification.runs import CPU


def _proofs(cuts: list[ForeignCut], num_ranks: int) -> list[LayoutReport]:
    return [prove_on_mesh(cut, make_mesh(Layout(context=num_ranks), CPU)) for cut in cuts]


def prove(ranks: RankPool, cuts: list[ForeignCut], num_ranks: int = 2) -> list[LayoutReport]:
    reports: list[LayoutReport] = ranks.run(num_ranks, _proofs, cuts, num_ranks, time_limit=240.0)[0]
    return reports


def by_plan(kind: type[nets.Net] = nets.Net, plan: Plan = PLAN) -> ForeignCut:
    return ForeignCut(partial(nets.build, kind), partial(cut, plan=plan))


def test_a_net_cut_by_a_plan_equals_the_uncut_net(ranks: RankPool) -> None:
    (report,) = prove(ranks, [by_plan()])
    assert_same(report)
    checks = {check.name: check for check in report.checks}
    assert checks["random numbers"].told == "1 draws on each rank"
    assert checks["running statistics"].difference is not None
    assert "send over width" in checks["messages"].told


@pytest.mark.slow  # the quick test proves one grid
@pytest.mark.parametrize("grid", [(2, 1), (1, 3), (2, 2), (4, 1)])
def test_other_grids_equal_the_uncut_net(ranks: RankPool, grid: tuple[int, int]) -> None:
    (report,) = prove(ranks, [by_plan(plan=replace(PLAN, grid=grid))], grid[0] * grid[1])
    assert_same(report)


class Fault(NamedTuple):
    kind: type[nets.Net]
    says: str


FUNCTIONS = [
    Fault(nets.Softmax, "`softmax` of an image.*`_softmax` mixes positions.*in the module `Softmax`"),
    Fault(nets.Mean, "`mean` of an image.*mixes positions.*nets.py:[0-9]+, in the module `Mean`"),
    Fault(nets.Flat, "`flatten` of an image.*keep the positions of a part, 9 x 5"),
    Fault(nets.Transposed, "`transpose` of an image.*mixes positions or moves them"),
    Fault(nets.Interpolated, "`interpolate` of an image.*`upsample_nearest2d` is not known to"),
    Fault(nets.Positions, "`add` of an image.*combines one with whole values of the shape 5"),
    Fault(nets.Numbers, "`numpy` must not pass"),
    Fault(nets.OfSize, "input agrees, but its output does not"),
    Fault(nets.Dropped, "does not apply dropout in the same modules"),
]
PLANTS = {
    "a norm over its part": ("norm", "input agrees, but its output does not"),
    "a convolution without halos": ("blocks.0.skip", "shapes do not add up"),
    "weights' gradients of a part": ("mix", "the sum over these ranks is missing"),
    "a whole gradient added by each rank": ("mean", "2 times the right value"),
    "running statistics with another momentum": ("norm", "its running statistics do not"),
    "statistics of one rank": ("norm", "input agrees, but its output does not"),
    "a parameter's gradient of a part": ("act", "the sum over these ranks is missing"),
    "the gradient of a part of the input": ("stem", "the sum over these ranks is missing"),
    "a head that drops other elements": ("drop", "draw different numbers"),
}


@pytest.mark.slow  # eighteen proofs
def test_of_every_fault_the_module_is_named(ranks: RankPool) -> None:
    cuts = [by_plan(fault.kind) for fault in FUNCTIONS]
    cuts += [ForeignCut(nets.build, partial(nets.cut_wrongly, fault=fault)) for fault in PLANTS]
    expected = [(fault.kind.__name__, fault.says) for fault in FUNCTIONS] + list(PLANTS.values())
    for report, (module, says) in zip(prove(ranks, cuts), expected, strict=True):
        assert report.first is not None
        assert report.first.module == module
        assert re.search(says, report.first.cause), report.first.cause


@pytest.mark.slow  # starts four ranks
def test_a_transposed_grid_is_found(ranks: RankPool) -> None:
    plan = replace(PLAN, grid=(2, 2))
    wrong = partial(nets.cut_wrongly, fault="a grid transposed", plan=plan)
    (report,) = prove(ranks, [ForeignCut(partial(nets.build, sizes=(18, 18)), wrong)], 4)
    assert report.first is not None
    assert report.first.module == "stem"


# --- refusals before anything changes --------------------------------------------------------------------------------


class OwnForward(nn.Conv2d):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


def _with(**layers: nn.Module) -> nn.Module:
    net = nets.Net()
    for name, layer in layers.items():
        setattr(net, name, layer)
    return net


def _but(**rules: Rule | None) -> Plan:
    names = {name: rule for name, rule in {**PLAN.rules, **rules}.items() if rule is not None}
    return replace(PLAN, rules=names)


REFUSED: list[tuple[nn.Module, Plan, str]] = [
    (nets.Net(), _but(mix=None), "`mix` must have a rule, because it is a Conv2d, which mixes positions, but has none"),
    (nets.Net(), _but(head=SPATIAL), "`head` must be a convolution, pooling, .* but is a Linear"),
    (nets.Net(), _but(head=SPATIAL), "Remove the rule: code that computes each position on its own needs none"),
    (_with(mix=OwnForward(8, 6, 3)), PLAN, "`mix` cannot have the style `spatial`.*`OwnForward` has its own `forward`"),
    (_with(mix=weight_norm(nn.Conv2d(8, 6, 3))), PLAN, "`mix` cannot have the style `spatial`.*is parametrised"),
    (_with(mix=nn.Conv1d(8, 6, 3)), PLAN, "`mix` cannot have the style `spatial`.*must have 2 directions.*but has 1"),
    (_with(pool=nn.MaxPool2d(2, return_indices=True)), PLAN, "`pool` cannot have the style.*`return_indices`"),
]


@pytest.mark.parametrize(("net", "plan", "says"), REFUSED)
def test_a_plan_that_does_not_fit_is_refused_without_ranks(net: nn.Module, plan: Plan, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(net, plan, 1)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"grid": ()},
            "`grid` must be the numbers of ranks along the directions of images, because `stem` cuts images",
        ),
        ({"grid": (0, 2)}, r"`grid` must be one to three numbers of ranks, each at least 1, but is \[0, 2\]"),
        ({"tensor": (2,)}, r"`tensor` must be \[1\] in a plan with a `grid`, but is \[2\]"),
        ({"rules": {"stem": SPATIAL}}, "`grid` must come with a rule of the style `spatial_split_input`"),
    ],
)
def test_an_impossible_plan_is_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(PLAN, **values)


WRONG_STYLES = [
    (_but(stem=SPATIAL, pool=SPLIT), "`stem` with the style `spatial` must get a part of images, but gets a whole"),
    (_but(norm=SPLIT), "`norm` with the style `spatial_split_input` must get whole images.*but gets a part of images"),
    (_but(head=Rule(style=Style.SPATIAL_GATHER_OUTPUT)), "`head` .*must get a part of images, but gets a whole tensor"),
    (_but(mean=SPATIAL), "`flatten` of an image that ranks share must keep the positions"),
]


@pytest.mark.slow  # four proofs
def test_a_style_at_the_wrong_place_is_told(ranks: RankPool) -> None:
    for report, (_, says) in zip(
        prove(ranks, [by_plan(plan=plan) for plan, _ in WRONG_STYLES]), WRONG_STYLES, strict=True
    ):
        assert report.first is not None
        assert re.search(says, report.first.cause), report.first.cause


# --- messages --------------------------------------------------------------------------------------------------------


def _sent(plan: Plan) -> Counter[Sent]:
    """Messages of a forward and a backward pass on this rank."""
    mesh = make_mesh(Layout(context=4), CPU)
    module, inputs, loss = nets.build()
    net: Any = cut(module, mesh, plan)
    with CollectiveRecorder(mesh, grid=net.cut_axes) as recorder:
        loss(net(**inputs)).backward()
    return Counter(recorder.sent)


@pytest.mark.slow  # four ranks, and as many that this process pretends to be
def test_ranks_send_what_is_forecast_without_ranks(ranks: RankPool) -> None:
    plan = replace(PLAN, grid=(2, 2))
    module, inputs, _ = nets.build()
    planned = image_messages(module, inputs, plan)
    assert [each.forward + each.backward for each in planned] == ranks.run(4, _sent, plan)
    assert {"height", "width", "context"} == {sent.axis for sent in planned[0].forward}


def test_a_forecast_refuses_code_that_mixes_positions_without_ranks() -> None:
    module, inputs, _ = nets.build(nets.Mean)
    with pytest.raises(LayoutError, match="`mean` of an image that ranks share"):
        costs_of(module, inputs, PLAN)


def test_a_plan_of_images_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(PLAN, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml") == PLAN
    module, inputs, _ = nets.build()
    print_plan(PLAN, costs_of(module, inputs, PLAN))
    told = capsys.readouterr().out
    assert "Plan for a grid of 1 x 2 context ranks" in told
    assert "x send over width" in told


@pytest.mark.parametrize(("num", "plan", "says"), [(4, PLAN, "must be 2, the ranks"), (2, Plan(rules={}), "must be 1")])
def test_another_number_of_context_ranks_is_refused(num: int, plan: Plan, says: str) -> None:
    with pytest.raises(LayoutError, match=f"`layout.context` {says}.*but is {num}"):
        plan.require_context(num)
