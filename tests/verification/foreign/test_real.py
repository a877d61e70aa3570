"""Faults of respected codebases: the proof names the module, and passes the right cut."""

import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from crosscut.verification.foreign.cuts import ForeignCut
from crosscut.verification.report import StepPhase
from tests.ranks import RankPool
from tests.verification.foreign import real
from tests.verification.foreign.test_cuts import assert_same, prove

LATENT = partial(real.build, real.LatentAttention)
MIXTURE = partial(real.build, real.Mixture)


class Issue(NamedTuple):
    issue: str
    wrong: ForeignCut
    right: ForeignCut
    module: str
    direction: StepPhase
    says: str
    """Part of the cause."""


def inside_experts(kind: type[real.Experts]) -> ForeignCut:
    return ForeignCut(MIXTURE, partial(real.cut_inside_experts, kind=kind), real.place_inside_experts, real.step)


def between_experts(*, is_right: bool) -> ForeignCut:
    return ForeignCut(
        MIXTURE, partial(real.cut_between_experts, is_right=is_right), real.place_between_experts, real.step
    )


ISSUES = [
    Issue(
        "torchtitan#1373",
        ForeignCut(LATENT, real.cut_latent_attention),
        ForeignCut(LATENT, partial(real.cut_latent_attention, is_right=True)),
        "layer.k_pe",
        StepPhase.BACKWARD,
        "Each tensor rank holds only its part of a sum",
    ),
    Issue(
        "torchtitan#4245",
        inside_experts(real.Experts),
        inside_experts(real.Scaled),
        "layer.experts",
        StepPhase.FORWARD,
        "The module's input agrees, but its output does not",
    ),
    Issue(
        "torchtitan#4332",
        inside_experts(real.Divided),
        inside_experts(real.Scaled),
        "layer.experts",
        StepPhase.BACKWARD,
        "The value is 1/2 of the right value",
    ),
    Issue(
        "transformers#48687",
        between_experts(is_right=False),
        between_experts(is_right=True),
        "layer",
        StepPhase.BACKWARD,
        "the gradient of its input does not",
    ),
]


@pytest.mark.slow  # the quick tests find planted faults of the same kinds
def test_real_faults_are_found_and_the_right_cuts_pass(ranks: RankPool) -> None:
    reports = prove(ranks, [cut for issue in ISSUES for cut in (issue.wrong, issue.right)])
    for issue, wrong, right in zip(ISSUES, reports[::2], reports[1::2], strict=True):
        assert wrong.first is not None, issue.issue
        assert (wrong.first.module, wrong.first.direction) == (issue.module, issue.direction), issue.issue
        assert issue.says in wrong.first.cause
        assert_same(right)


@pytest.mark.slow  # one fault of the proof's own; the quick tests pass other right cuts
def test_values_that_are_summed_later_are_no_difference(ranks: RankPool) -> None:
    cuts = [ForeignCut(LATENT, real.cut_latent_attention_inside), ForeignCut(MIXTURE, real.cut_into_summands)]
    for report in prove(ranks, cuts):
        assert_same(report)


def test_the_page_lists_every_issue() -> None:
    page = (Path(__file__).parents[3] / "docs" / "verification.md").read_text(encoding="utf-8")
    for issue in ISSUES:
        assert re.search(rf"\| \[{issue.issue}\]\(\S+\) \|.*\| `{issue.module}`, {issue.direction} \|", page), (
            issue.issue
        )
