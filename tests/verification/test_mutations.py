"""Every planted fault is found, and its module named."""

import pytest

from crosscut.config import Layout
from tests.ranks import RankPool
from tests.verification.mutations import MUTATIONS, verify_with


@pytest.mark.parametrize("index", range(len(MUTATIONS)), ids=[m.fault for m in MUTATIONS])
def test_fault_is_found_and_its_module_named(ranks: RankPool, index: int) -> None:
    mutation = MUTATIONS[index]
    report = ranks.run(mutation.layout.world_size, verify_with, index, mutation.layout, mutation.own_module)[0]
    assert not report.same
    assert report.first is not None
    assert report.first.module == mutation.module, report.first


# `test_run.py` proves these layouts without the code that plants faults; of the proofs with it one is enough here.
FAULTLESS = [
    layout if layout == Layout(tensor=2) else pytest.param(layout, marks=pytest.mark.slow)
    for layout in sorted({m.layout for m in MUTATIONS}, key=str)
]


@pytest.mark.parametrize("layout", FAULTLESS, ids=str)
def test_without_a_fault_the_same_verification_passes(ranks: RankPool, layout: Layout) -> None:
    report = ranks.run(layout.world_size, verify_with, None, layout)[0]
    assert report.same, report.first


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(data=2), Layout(tensor=2, data=2)], ids=str)
def test_without_a_fault_a_model_of_one_s_own_passes(ranks: RankPool, layout: Layout) -> None:
    report = ranks.run(layout.world_size, verify_with, None, layout, True)[0]
    assert report.same, report.first
