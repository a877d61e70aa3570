"""The proof of a run whose layers are compiled: they are compared as wholes, everything else as ever."""

from typing import Any
from unittest import mock

import pytest
import torch.nn.functional as F
from torch import Tensor

from crosscut.config import Layout
from crosscut.parallel import linear
from crosscut.parallel.collectives import split
from crosscut.parallel.mesh import ParallelMesh
from crosscut.verification import LayoutReport, for_verification
from tests.ranks import RankPool
from tests.verification.runs import MODERN, proven, tiny_run, verify_run

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # what the compiler does inside is not ours to mend
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


COMPILED = {"compile": "on"}


@pytest.mark.parametrize(
    ("layout", "dropout", "num_layers"),
    [
        pytest.param(Layout(data=2), 0.1, 2, marks=pytest.mark.slow),  # compiles more
        (Layout(tensor=2, sequence_parallel=True), 0.0, 1),
    ],
    ids=str,
)
def test_compiled_layers_are_compared_as_wholes(
    ranks: RankPool, layout: Layout, dropout: float, num_layers: int
) -> None:
    report = proven(ranks, layout, training=COMPILED, dropout=dropout, num_layers=num_layers)
    told = {check.name: check.told for check in report.checks}
    assert told["compiled layers"] == f"{num_layers}, each compared as a whole"
    assert "as planned" in told["collectives"]
    draws = f"{3 * num_layers + 1} draws on each rank"
    assert told["random numbers"] == (draws if dropout else "the model has no dropout")
    watched = {row.module for row in report.rows if row.forward is not None}
    blocks = [f"blocks.{i}" for i in range(num_layers)]
    assert watched == {"tokens", "positions", "dropout", *blocks, "final_norm", "GPT", "loss"}
    inside = {row.module for row in report.rows if row.forward is None and row.gradient is not None}
    assert {"blocks.0.attention.qkv.query", f"{blocks[-1]}.mlp.contract"} <= inside, (
        "gradients of weights are compared all the same"
    )


@pytest.mark.slow  # compiled combinations are verified as well
@pytest.mark.parametrize("recompute", ["operators", pytest.param("full", marks=pytest.mark.slow)])
def test_a_modern_recipe_is_the_uncut_model_in_compiled_layers(ranks: RankPool, recompute: str) -> None:
    training = {**COMPILED, "recompute": recompute, "z_loss": 0.01, "initial_spread": "fan_in"}
    options = {"training": training, "optimizer": {"embedding_learning_rate": 0.1}, **MODERN, "dropout": 0.0}
    report = proven(ranks, Layout(tensor=2, sequence_parallel=True), **options)
    assert "compiled layers" in {check.name for check in report.checks}


def _verify_faulty(layout: Layout) -> LayoutReport:
    def unsummed(x: Tensor, weight: Tensor, bias: Tensor, *, mesh: ParallelMesh, **_: Any) -> Tensor:
        product = F.linear(x, weight)
        return (split(product, mesh.tensor, 1) if mesh.tensor.size > 1 else product) + bias

    with mock.patch.object(linear, "multiply_and_leave", unsummed):
        return verify_run(for_verification(tiny_run(training=COMPILED, dropout=0.0), layout, "float64"))


@pytest.mark.slow
def test_a_fault_inside_a_compiled_layer_is_found_in_that_layer(ranks: RankPool) -> None:
    report = ranks.run(2, _verify_faulty, Layout(tensor=2, sequence_parallel=True))[0]
    assert not report.same
    assert report.first.module == "blocks.0"
