"""The proof of a run whose layers are compiled: they are compared as wholes, everything else as ever."""

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch.nn.functional as F
from torch import Tensor

from crosscut.config import Layout
from crosscut.parallel import linear, make_mesh
from crosscut.parallel.collectives import split
from crosscut.parallel.mesh import ParallelMesh
from crosscut.training.speed import compilation
from crosscut.verification import LayoutReport, for_verification, verify_on_mesh
from tests.ranks import RankPool
from tests.verification.runs import CPU, MODERN, tiny_run

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # what the compiler does inside is not ours to mend
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


def _verify(layout: Layout, dropout: float) -> LayoutReport:
    run = tiny_run(dropout=dropout)
    run = dataclasses.replace(run, training=dataclasses.replace(run.training, compile="on"))
    mesh = make_mesh(layout, CPU)
    with mock.patch.object(compilation, "BACKEND", "aot_eager"):
        return verify_on_mesh(for_verification(run, layout, "float64"), mesh)


@pytest.mark.parametrize(
    ("layout", "dropout"),
    [
        pytest.param(Layout(data=2), 0.1, marks=pytest.mark.slow),
        (Layout(tensor=2, sequence_parallel=True), 0.0),
    ],
    ids=str,
)
def test_compiled_layers_are_compared_as_wholes(ranks: RankPool, layout: Layout, dropout: float) -> None:
    report = ranks.run(2, _verify, layout, dropout)[0]
    assert report.same, report.first
    told = {check.name: check.told for check in report.checks}
    assert told["compiled layers"] == "2, each compared as a whole"
    assert "as planned" in told["collectives"]
    assert told["random numbers"] == ("7 draws on each rank" if dropout else "the model has no dropout")
    watched = {row.module for row in report.rows if row.forward is not None}
    assert watched == {"tokens", "positions", "dropout", "blocks.0", "blocks.1", "final_norm", "GPT", "loss"}
    inside = {row.module for row in report.rows if row.forward is None and row.gradient is not None}
    assert {"blocks.0.attention.qkv.query", "blocks.1.mlp.contract"} <= inside, (
        "gradients of weights are compared all the same"
    )


def _verify_modern(layout: Layout, recompute: str) -> LayoutReport:
    training = {"compile": "on", "recompute": recompute, "z_loss": 0.01, "initial_spread": "fan_in"}
    run = tiny_run(training=training, optimizer={"embedding_learning_rate": 0.1}, **{**MODERN, "dropout": 0.0})
    with mock.patch.object(compilation, "BACKEND", "aot_eager"):
        return verify_on_mesh(for_verification(run, layout, "float64"), make_mesh(layout, CPU))


@pytest.mark.slow  # compiled combinations are verified as well
@pytest.mark.parametrize("recompute", ["operators", pytest.param("full", marks=pytest.mark.slow)])
def test_a_modern_recipe_is_the_uncut_model_in_compiled_layers(ranks: RankPool, recompute: str) -> None:
    layout = Layout(tensor=2, sequence_parallel=True)
    report = ranks.run(2, _verify_modern, layout, recompute)[0]
    assert report.same, report.first
    assert "compiled layers" in {check.name for check in report.checks}


def _verify_faulty(layout: Layout) -> LayoutReport:
    def unsummed(x: Tensor, weight: Tensor, bias: Tensor, *, mesh: ParallelMesh, **_: Any) -> Tensor:
        product = F.linear(x, weight)
        return (split(product, mesh.tensor, 1) if mesh.tensor.size > 1 else product) + bias

    with mock.patch.object(linear, "multiply_and_leave", unsummed):
        return _verify(layout, 0.0)


@pytest.mark.slow
def test_a_fault_inside_a_compiled_layer_is_found_in_that_layer(ranks: RankPool) -> None:
    report = ranks.run(2, _verify_faulty, Layout(tensor=2, sequence_parallel=True))[0]
    assert not report.same
    assert report.first is not None
    assert report.first.module == "blocks.0"
