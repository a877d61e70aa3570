"""Combinations of the settings that save memory or time. Every pair of settings occurs together. An allowed combination
computes the same as the uncut model. Any other combination is refused before a rank starts, with the reason.

Two tables repeat the reasons: one for the checks of the config, and one for the checks of the machine. Settings for
GPUs are proven with PyTorch's replacements on the CPU.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest

from crosscut.config import ConfigError, RunConfig
from crosscut.training.precision import resolve_on
from crosscut.training.requirements import require_capabilities
from crosscut.verification import for_verification
from tests.ranks import RankPool
from tests.verification.runs import CPU, tiny_run, verify_run

Values = dict[str, Any]

OPTIONS: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2),
    "data": (1, 2, 4),
    "sequence_parallel": (False, True),
    "sharding": ("none", "zero2", "zero3"),
    "shard_group": (0, 2),
    "symmetric_memory": (False, True),
    "recompute": ("none", "selective", "operators", "full"),
    "recompute_every": (1, 2),
    "offload": ((), ("activations",), ("optimizer",), ("activations", "optimizer")),
    "precision": ("float64", "float32", "bfloat16", "float16", "float8"),
    "compile": ("off", "on"),
    "dropout": (0.0, 0.1),
    "micro_batch_size": (0, 1),
}
LAYOUT = ("tensor", "data", "sequence_parallel", "sharding", "shard_group", "symmetric_memory")
MOST_RANKS = 4


class Refusal(NamedTuple):
    """Settings that exclude each other, and a part of the message about them."""

    holds: Callable[[Values], bool]
    reason: str


NOT_TOGETHER = (
    Refusal(lambda v: v["shard_group"] and v["sharding"] == "none", "must be 0 without sharding, but is 2"),
    Refusal(
        lambda v: v["shard_group"] and v["data"] % v["shard_group"],
        "`layout.shard_group` must divide `layout.data` (1), but is 2",
    ),
    Refusal(
        lambda v: v["symmetric_memory"] and not (v["sequence_parallel"] and v["tensor"] > 1),
        "`layout.symmetric_memory` needs sequence parallelism over several tensor ranks",
    ),
    Refusal(
        lambda v: v["recompute_every"] > 1 and v["recompute"] == "none",
        "`training.recompute_every` must be 1 if nothing is recomputed, but is 2",
    ),
    Refusal(
        lambda v: "activations" in v["offload"] and v["recompute"] != "full",
        '"activations" only with training.recompute="full", but',
    ),
    Refusal(
        lambda v: v["precision"] == "float8" and v["symmetric_memory"],
        '`training.precision` must not be "float8" with `layout.symmetric_memory`',
    ),
    Refusal(
        lambda v: v["compile"] == "on" and v["dropout"] and v["tensor"] > 1 and not v["sequence_parallel"],
        "switches between two random streams, and a compiler cannot trace the switches",
    ),
)
"""On any machine, in the order in which they are found."""

KEEPS_SCORES = Refusal(
    lambda v: v["compile"] == "on" and v["dropout"] and v["recompute"] == "selective",
    'attention with dropout keeps its scores on the CPU, but training.recompute="selective" keeps none',
)
NOT_ON_THE_CPU = (
    Refusal(lambda v: v["precision"] == "float8", 'must be a precision that the device supports, but is "float8"'),
    KEEPS_SCORES,
    Refusal(
        lambda v: v["symmetric_memory"],
        "must be false here, but is true. Symmetric memory needs GPUs, but the run is on the CPU",
    ),
)
"""To train with, in the order in which they are found. All but `KEEPS_SCORES` can be proven without a GPU."""

REFUSED = (*NOT_TOGETHER, *NOT_ON_THE_CPU)


def reasons_against(values: Values) -> list[str]:
    return [refusal.reason for refusal in REFUSED if refusal.holds(values)]


def run_of(values: Values) -> RunConfig:
    """The run as it is verified; raises `ConfigError` where the values cannot be together."""
    run = tiny_run(dropout=values["dropout"], hidden_size=64)  # of which two ranks' parts do for float8
    layout = replace(run.layout, **{name: values[name] for name in LAYOUT})
    rest = {name: value for name, value in values.items() if name not in (*LAYOUT, "dropout")}
    run = replace(run, training=replace(run.training, **rest, device="cpu"))
    return for_verification(run, layout, values["precision"])


def every() -> Iterator[Values]:
    """All products of the options on few ranks, but for what does nothing: a sequence that one rank would split."""
    for chosen in product(*OPTIONS.values()):
        values = dict(zip(OPTIONS, chosen, strict=True))
        if values["tensor"] * values["data"] <= MOST_RANKS and (
            values["tensor"] > 1 or not values["sequence_parallel"]
        ):
            yield values


def covering(rows: Iterable[Values]) -> list[Values]:
    """Some of the rows in which every two values that go together at all occur together: each time the row that has
    most pairs not seen yet.
    """
    bits: dict[Any, int] = {}
    pairs: list[tuple[int, Values]] = []
    for row in rows:
        settings = list(row.items())
        found = 0
        for pair in combinations(settings, 2):
            found |= 1 << bits.setdefault(pair, len(bits))
        pairs.append((found, row))
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        found, best = max(pairs, key=lambda one: (one[0] & missing).bit_count())
        chosen.append(best)
        missing &= ~found
    return chosen


EVERY = list(every())
ALLOWED = [values for values in EVERY if not any(refusal.holds(values) for refusal in (*NOT_TOGETHER, KEEPS_SCORES))]
PLAIN = covering(values for values in ALLOWED if values["compile"] == "off")
COMPILED = covering(values for values in ALLOWED if values["compile"] == "on")


QUICK = next(
    v for v in PLAIN if (v["tensor"], v["data"], v["sequence_parallel"], v["precision"]) == (2, 1, True, "float8")
)
"""Split sequences in the precision that no other quick test verifies."""


def name_of(values: Values) -> str:
    layout = replace(tiny_run().layout, **{name: values[name] for name in LAYOUT})
    told = [str(layout), values["precision"], values["recompute"], *values["offload"]]
    told += ["in pieces"] * values["symmetric_memory"]
    told += ["every 2"] * (values["recompute_every"] > 1) + ["compiled"] * (values["compile"] == "on")
    told += ["accumulated"] * values["micro_batch_size"]
    return " ".join([*told, "dropout"] if values["dropout"] else told)


def require_the_uncut_model(ranks: RankPool, values: Values) -> None:
    run = run_of(values)
    report = ranks.run(run.layout.world_size, verify_run, run, time_limit=240.0)[0]
    assert report.same, (report.first, [check for check in report.checks if not check.same])
    assert report.precision == values["precision"]
    assert ("compiled layers" in {check.name for check in report.checks}) == (values["compile"] == "on")


@pytest.mark.parametrize(
    "values",
    [values if values == QUICK else pytest.param(values, marks=pytest.mark.slow) for values in PLAIN],
    ids=name_of,
)
def test_any_two_of_them_together_are_the_uncut_model(ranks: RankPool, values: Values) -> None:
    require_the_uncut_model(ranks, values)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("values", COMPILED, ids=name_of)
def test_any_two_of_them_together_are_the_uncut_model_in_compiled_layers(ranks: RankPool, values: Values) -> None:
    require_the_uncut_model(ranks, values)


IN_ONE_PRECISION = ("float64", "off", 0.1, 1)
LAYOUTS_AND_MEMORY = random.Random(0).sample(
    [
        values
        for values in ALLOWED
        if (values["precision"], values["compile"], values["dropout"], values["micro_batch_size"]) == IN_ONE_PRECISION
        and values not in PLAIN
    ],
    100,
)
"""Some of the combinations of all settings of layouts and memory. `PLAIN` has every pair of them."""


@pytest.mark.slow
@pytest.mark.parametrize("values", LAYOUTS_AND_MEMORY, ids=name_of)
def test_layouts_and_memory_together_are_the_uncut_model(ranks: RankPool, values: Values) -> None:
    require_the_uncut_model(ranks, values)


def test_every_pair_is_covered_by_few_runs() -> None:
    assert len(PLAIN) < 40
    assert len(COMPILED) < 40
    assert len(ALLOWED) > 1000


def refusal_of(values: Values) -> str:
    """Message about settings that is raised before a rank starts; empty if the settings are valid."""
    try:
        require_capabilities(resolve_on(run_of(values), CPU))
    except ConfigError as error:
        return str(error)
    return ""


def require_what_the_table_says(rows: Iterable[Values]) -> None:
    for values in rows:
        reasons, told = reasons_against(values), refusal_of(values)
        assert bool(reasons) == bool(told), (values, reasons, told)
        assert not reasons or any(reason in told for reason in reasons), (values, reasons, told)


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: re.sub(r"[^a-z0-9 ]", "", refusal.reason))
def test_what_cannot_be_together_is_refused_with_the_reason(refusal: Refusal) -> None:
    values = next(values for values in EVERY if reasons_against(values)[:1] == [refusal.reason])
    assert refusal.reason in refusal_of(values)


def test_everything_else_is_allowed() -> None:
    require_what_the_table_says([*PLAIN, *COMPILED, *random.Random(0).sample(EVERY, 300)])


@pytest.mark.slow
def test_each_of_all_combinations_is_allowed_or_refused_as_the_table_says() -> None:
    require_what_the_table_says(EVERY)
