"""What saves memory, combined: what the config allows is the uncut model, any two settings of it together."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from crosscut.config import ConfigError, RunConfig
from crosscut.parallel import make_mesh
from crosscut.verification import Report, for_verification, verify_on_mesh
from tests.ranks import RankPool
from tests.verification.runs import CPU, tiny_run

OPTIONS: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2),
    "data": (1, 2, 4),
    "sequence_parallel": (False, True),
    "sharding": ("none", "zero2", "zero3"),
    "shard_group": (0, 2),
    "recompute": ("none", "selective", "operators", "full"),
    "recompute_every": (1, 2),
    "offload": ((), ("activations",), ("optimizer",), ("activations", "optimizer")),
}
LAYOUT = ("tensor", "data", "sequence_parallel", "sharding", "shard_group")


def run_of(values: dict[str, Any]) -> RunConfig:
    """The run as it is verified; raises `ConfigError` where the values cannot be together."""
    run = tiny_run()
    layout = replace(run.layout, **{name: values[name] for name in LAYOUT})
    rest = {name: value for name, value in values.items() if name not in LAYOUT}
    return for_verification(replace(run, training=replace(run.training, **rest)), layout, "float64")


def allowed() -> Iterator[dict[str, Any]]:
    """Every combination that the config allows on up to four ranks."""
    for chosen in product(*OPTIONS.values()):
        values = dict(zip(OPTIONS, chosen, strict=True))
        if values["tensor"] * values["data"] > 4 or (values["sequence_parallel"] and values["tensor"] == 1):
            continue
        try:
            run_of(values)
        except ConfigError:
            continue
        yield values


def covering(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Some of the rows in which every two values that go together at all occur together: each time the row that has
    most pairs not seen yet.
    """

    def pairs(row: dict[str, Any]) -> set[Any]:
        return set(combinations(sorted((name, repr(value)) for name, value in row.items()), 2))

    missing = set().union(*map(pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


ALLOWED = list(allowed())
COVERING = covering(ALLOWED)


def name_of(values: dict[str, Any]) -> str:
    run = run_of(values)
    told = [str(run.layout), values["recompute"], *values["offload"]]
    return " ".join([*told, "every 2"] if values["recompute_every"] > 1 else told)


def verify(values: dict[str, Any]) -> Report:
    """On a rank."""
    run = run_of(values)
    return verify_on_mesh(run, make_mesh(run.layout, CPU))


@pytest.mark.parametrize("values", COVERING, ids=name_of)
def test_any_two_of_them_together_are_the_uncut_model(ranks: RankPool, values: dict[str, Any]) -> None:
    report = ranks.run(values["tensor"] * values["data"], verify, values)[0]
    assert report.same, (report.first, [check for check in report.checks if not check.same])


@pytest.mark.slow
@pytest.mark.parametrize("values", [row for row in ALLOWED if row not in COVERING], ids=name_of)
def test_all_of_them_together_are_the_uncut_model(ranks: RankPool, values: dict[str, Any]) -> None:
    report = ranks.run(values["tensor"] * values["data"], verify, values)[0]
    assert report.same, (report.first, [check for check in report.checks if not check.same])


def test_every_pair_is_covered_by_few_runs() -> None:
    assert len(COVERING) < 30 < len(ALLOWED)
