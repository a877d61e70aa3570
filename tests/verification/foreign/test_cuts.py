"""Cuts that are not Crosscut's: right ones pass, and of every planted fault the module is named."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from crosscut.config import ConfigError, Layout
from crosscut.parallel import make_mesh
from crosscut.verification import LayoutReport
from crosscut.verification.foreign.cuts import ForeignCut, prove_on_mesh
from crosscut.verification.report import StepPhase
from examples import wrong_cut
from tests.ranks import RankPool
from tests.verification.foreign import net
from tests.verification.runs import CPU

ROOT = Path(__file__).parents[3]

BY_TORCH = ForeignCut(net.build_plain, net.by_torch)
BY_HAND = ForeignCut(net.build, net.by_hand, partial(net.places, net.INNER), net.step_by_hand)
UNEVEN = ForeignCut(net.build_uneven, net.by_hand, partial(net.places, net.INNER - 1), net.step_by_hand)


class Fault(NamedTuple):
    fault: str
    cut: ForeignCut
    module: str
    says: str
    """Part of the cause."""


def by_torch(fault: str, module: str, says: str, **styles: Any) -> Fault:
    changes = {name.replace("_", "."): style for name, style in styles.items()}
    return Fault(fault, replace(BY_TORCH, cut=partial(net.by_torch, **changes)), module, says)


def by_hand(fault: str, module: str, says: str) -> Fault:
    return Fault(fault, replace(BY_HAND, cut=partial(net.by_hand, fault=fault)), module, says)


def step(fault: str, module: str, says: str) -> Fault:
    return Fault(fault, replace(BY_HAND, step=partial(net.step_by_hand, fault=fault)), module, says)


FAULTS = [
    by_torch(
        "two names of a plan swapped",
        "blocks.0.mlp.up",
        "raises",
        mlp_up=RowwiseParallel(),
        mlp_down=ColwiseParallel(),
    ),
    by_torch("logits without their output's layout", "loss", "raises IndexError", head=ColwiseParallel()),
    by_torch(
        "a row layer without its output's layout",
        "blocks.0",
        "raises RuntimeError",
        mlp_down=RowwiseParallel(output_layouts=Shard(-1)),
    ),
    by_torch(
        "keys whole, queries cut", "blocks.0.attention", "", attention_k=ColwiseParallel(output_layouts=Replicate())
    ),
    by_hand("bias added by every rank", "blocks.1.attention.o", "the same vector at every token"),
    by_hand("no sum of the output", "blocks.1.mlp.down", "a sum over the ranks is missing"),
    by_hand("no sum of the input's gradient", "blocks.1.mlp.up", "is missing"),
    by_hand("the output's gradient summed again", "blocks.1.mlp.down", "2 times the right value"),
    by_hand("keys of other heads", "blocks.0.attention.k", "in another order"),
    by_hand("rows of another rank", "blocks.1.mlp.down", ""),
    by_hand("norm over this rank's part", "blocks.1.mlp.norm", ""),
    by_hand("gradient of a replicated weight not summed", "blocks.1.attention.q_norm", "is missing"),
    by_hand("gradient of the shared key part not summed", "blocks.1.attention.shared_key", "is missing"),
    by_hand("embedding without its offset", "embed", ""),
    by_hand("logits gathered in another order", "head", "in another order"),
    by_hand("replicas that start apart", "blocks.1.norm", "Replicas differ"),
    by_hand("replicas that drop apart", "blocks.0.dropout", "draw different numbers"),
    step("norm of this rank's part", "gradient norm", "over which ranks squares are summed"),
    step("step without biases", "parameters after a step", "check the optimizer"),
    step("replicas that step apart", "parameters after a step", ""),
]


def prove_all(cuts: Sequence[ForeignCut], layout: Layout) -> list[LayoutReport]:
    """On a rank: prove several cuts one after the other."""
    return [prove_on_mesh(cut, make_mesh(layout, CPU)) for cut in cuts]


def assert_same(report: LayoutReport) -> None:
    assert report.same, (report.first, [check for check in report.checks if not check.same])


def prove(ranks: RankPool, cuts: Sequence[ForeignCut], num_ranks: int = 2) -> list[LayoutReport]:
    """Prove several cuts in one job, because the ranks take a fraction of a second for each."""
    reports: list[LayoutReport] = ranks.run(num_ranks, prove_all, cuts, Layout(tensor=num_ranks), time_limit=240.0)[0]
    return reports


def test_right_cuts_pass_whoever_made_them(ranks: RankPool) -> None:
    by_torch, uneven = prove(ranks, [BY_TORCH, UNEVEN])
    assert_same(by_torch)
    assert_same(uneven)
    for report in (by_torch, uneven):
        messages = {check.name: check.told for check in report.checks}["messages"]
        assert "1 x all_gather over tensor (120 elements), " in messages
        assert "x all_reduce over tensor" in messages


def test_inputs_that_need_gradients_are_compared_by_name(ranks: RankPool) -> None:
    """The parent applies f to its inputs, so that its layers get other tensors than in the uncut module."""
    cut = ForeignCut(net.build_merge, net.cut_merge, net.merge_places, net.step_merge)
    right, wrong = prove(ranks, [cut, replace(cut, cut=partial(net.cut_merge, fault="second input"))])
    assert_same(right)
    assert wrong.first is not None
    assert (wrong.first.module, wrong.first.direction) == ("Merge", StepPhase.BACKWARD)
    assert "all-reduce" in wrong.first.cause


def test_the_mistake_that_the_readme_shows_is_found(ranks: RankPool) -> None:
    (report,) = prove(ranks, [ForeignCut(wrong_cut.build, wrong_cut.cut)])
    assert report.first is not None
    assert (report.first.module, report.first.direction) == ("norm", StepPhase.BACKWARD)
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"The first difference is in the backward pass of norm. {report.first.cause.partition('. ')[0]}. ..." in page


@pytest.mark.slow  # the quick test proves such cuts on two ranks
def test_right_cuts_pass_on_more_ranks(ranks: RankPool) -> None:
    distributed = partial(net.by_torch, **{"mlp.up": ColwiseParallel(use_local_output=False)})
    for report in prove(ranks, [BY_TORCH, BY_HAND, replace(BY_TORCH, cut=distributed)], 4):
        assert_same(report)


QUICK = {
    "logits without their output's layout",
    "no sum of the output",
    "gradient of the shared key part not summed",
    "replicas that drop apart",
    "replicas that step apart",
}
"""Faults of five kinds: an error, a forward pass, a backward pass, random draws, the optimizer's step."""


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([fault for fault in FAULTS if fault.fault in QUICK], id="quick"),
        pytest.param([fault for fault in FAULTS if fault.fault not in QUICK], id="others", marks=pytest.mark.slow),
    ],
)
def test_faults_are_found_and_their_modules_named(ranks: RankPool, faults: list[Fault]) -> None:
    reports = prove(ranks, [fault.cut for fault in faults])
    found = [(fault.fault, report.first and report.first.module) for fault, report in zip(faults, reports, strict=True)]
    assert found == [(fault.fault, fault.module) for fault in faults]
    for fault, report in zip(faults, reports, strict=True):
        assert not report.same
        assert fault.says in report.first.cause


def test_the_page_lists_every_fault() -> None:
    page = (ROOT / "docs" / "tables" / "foreign-faults.md").read_text(encoding="utf-8")
    assert f"The tests plant {len(FAULTS)} faults" in page
    for fault in FAULTS:
        assert f"| {fault.fault} | `{fault.module}` |" in page


def prove_patched(cut: ForeignCut) -> LayoutReport:
    """On a rank: prove a cut that patches a class, and undo the patch."""
    try:
        return prove_on_mesh(cut, make_mesh(Layout(tensor=2), CPU))
    finally:
        net.Scaled.factor = 1.0


def test_the_uncut_module_runs_before_the_cut_patches_its_class(ranks: RankPool) -> None:
    assert not ranks.run(2, prove_patched, ForeignCut(net.build_scaled, net.patch_class))[0].same


def test_a_module_that_is_returned_twice_is_refused(ranks: RankPool) -> None:
    with pytest.raises(ConfigError, match="`build` must make a new module at each call"):
        ranks.run(2, prove_patched, ForeignCut(net.build_one, net.patch_class))
