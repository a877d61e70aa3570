"""Data ranks that share one copy of the model train the same model."""

from typing import Any

import pytest
import torch

from crosscut.config import Layout
from tests.model.test_layouts import _assert_same
from tests.model.twins import SHARDED, train
from tests.ranks import RankPool

NUM_STEPS = 3


@pytest.fixture(scope="module")
def one_device(ranks: RankPool) -> dict[str, Any]:
    """The run that all others must repeat."""
    return ranks.run(1, train, Layout(), torch.float64, NUM_STEPS)[0]


QUICK = [layout for layout in SHARDED if layout.sequence_parallel == (layout.tensor > 1) and layout.sharding == "zero3"]
SLOW = [pytest.param(layout, marks=pytest.mark.slow) for layout in SHARDED if layout not in QUICK]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", [*QUICK, *SLOW], ids=str)
def test_accumulated_and_clipped_steps_are_those_of_one_device(
    ranks: RankPool, one_device: dict[str, Any], layout: Layout
) -> None:
    assert max(one_device["norms"]) > 1.0, "nothing was clipped"
    num_micro_batches = 2 if layout.data == 2 else 1  # of the batch's four sequences
    for result in ranks.run(layout.world_size, train, layout, torch.float64, NUM_STEPS, num_micro_batches):
        assert result["losses"] == pytest.approx(one_device["losses"], rel=1e-10, abs=0.0)
        assert result["norms"] == pytest.approx(one_device["norms"], rel=1e-8, abs=0.0)
        _assert_same(result["gradients"], one_device["gradients"], 1e-10)
        _assert_same(result["parameters"], one_device["parameters"], 1e-8)
