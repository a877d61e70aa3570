"""Kinds of mixers, of norms and of attention on every kind of layout: without a fault, nothing differs."""

from typing import Any

import pytest

from crosscut.config import Layout
from tests.ranks import RankPool
from tests.verification.kinds import KINDS, cases, compiled_cases
from tests.verification.runs import proven


def _cases() -> list[Any]:
    """Return the cases of all kinds. Only the first case of each kind is quick."""
    return [
        pytest.param(layout, options, id=f"{name}: {case}", marks=[pytest.mark.slow] if number else [])
        for name, kind in KINDS.items()
        for number, (case, layout, options) in enumerate(cases(kind))
    ]


@pytest.mark.parametrize(("layout", "options"), _cases())
def test_every_layout_is_the_uncut_model(ranks: RankPool, layout: Layout, options: dict[str, Any]) -> None:
    report = proven(ranks, layout, **options)
    assert report.largest_tolerance <= 1e-10
    assert any(check.name == "collectives" and "as planned" in check.told for check in report.checks)


@pytest.mark.slow  # it compiles every layer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param(layout, options, id=f"{name}: {case}")
        for name, kind in KINDS.items()
        for case, layout, options in compiled_cases(kind)
    ],
)
def test_compiled_layers_are_the_uncut_model(ranks: RankPool, layout: Layout, options: dict[str, Any]) -> None:
    training = {**options.get("training", {}), "compile": "on"}
    report = proven(ranks, layout, **{**options, "dropout": 0.0, "training": training})
    assert any(check.name == "compiled layers" for check in report.checks)
