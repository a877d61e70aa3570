"""Runners of a run's layers: what recomputes, what is compiled, and what of both goes together."""

from typing import Any

import pytest

from crosscut.config import Layout
from crosscut.config.training import TrainingConfig
from crosscut.kernels import FLOAT8, ORDINARY
from crosscut.kernels.functions import call
from crosscut.model.running import Runner
from crosscut.parallel import RandomStreams, make_mesh
from crosscut.training.runners import make_runners
from crosscut.training.speed.compilation import Compiler
from tests.training.jobs import CPU

OFFLOADED = {"recompute": "full", "offload": ("activations",)}


def _called_by(runner: Runner) -> dict[str, str]:
    """Class of the caller of each function of a layer. Functions that are called directly are left out."""
    calls = {name: getattr(runner, name) for name in ("layer", "core", "cheap", "kept")}
    return {
        name: type(getattr(found, "__self__", found)).__name__ for name, found in calls.items() if found is not call
    }


def _runners(options: dict[str, Any], compiled: bool) -> list[tuple[dict[str, str], bool, bool]]:
    """For each of three layers: the callers of its functions, whether its last product is skipped, and whether it is
    compiled.
    """
    if "recompute" in options:
        options = {**options, "recompute_every": 2}
    streams = RandomStreams(make_mesh(Layout(), CPU), seed=1)
    compiler = Compiler("eager") if compiled else None
    runner_of = make_runners(TrainingConfig(**options), streams=streams, device=CPU, compiler=compiler)
    runners = [runner_of(index) for index in range(3)]
    assert runners[0] is runners[2]
    assert {runner.products for runner in runners} == {FLOAT8 if options["precision"] == "float8" else ORDINARY}
    assert all(runner.compiler is compiler for runner in runners)
    return [(_called_by(runner), runner.skips_last_product, runner.compiler is not None) for runner in runners]


@pytest.mark.parametrize("precision", ["float32", "float8"])
@pytest.mark.parametrize(
    ("options", "calls", "skips"),
    [
        ({}, {}, False),
        ({"recompute": "full"}, {"layer": "Recomputed"}, True),
        (OFFLOADED, {"layer": "Recomputed"}, True),
        ({"recompute": "selective"}, {"core": "Recomputed"}, False),
        ({"recompute": "operators"}, {"layer": "CheapOutputs", "cheap": "CheapOutputs"}, False),
    ],
    ids=str,
)
def test_every_second_layer_recomputes_as_the_run_says(ranks, precision, options, calls, skips):
    options = {**options, "precision": precision}
    recomputing, plain = (calls, skips, False), ({}, False, False)
    assert ranks.run(1, _runners, options, False)[0] == [recomputing, plain, recomputing]


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, {"layer": "CompiledCode"}),
        ({"recompute": "full"}, {"layer": "Recomputed"}),
        (OFFLOADED, {"layer": "Recomputed"}),
        ({"recompute": "selective"}, {"layer": "CompiledCode"}),
        ({"recompute": "operators"}, {"layer": "CompiledCode", "cheap": "function"}),
    ],
    ids=str,
)
def test_compiled_layers_run_whole_inside_recomputation(ranks, options, calls):
    options = {**options, "precision": "float32"}
    kept = {"kept": "function"}
    recomputing, plain = (calls | kept, False, True), ({"layer": "CompiledCode"} | kept, False, True)
    assert ranks.run(1, _runners, options, True)[0] == [recomputing, plain, recomputing]
