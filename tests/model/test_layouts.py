"""One model on every layout: the same losses, the same gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.kernels import onednn
from tests.model.twins import CONFIG, LAYOUTS, SHARDED, train
from tests.ranks import RankPool

NUM_LEARNING = 17
"""Steps on one device, in which the model learns."""
NUM_COMPARED = 3
"""Steps on every layout."""
CASES = [
    (LAYOUTS[-1], 2),
    *((layout, 1) for layout in LAYOUTS),
    *((layout, 2) for layout in (Layout(), LAYOUTS[1], LAYOUTS[4])),
    *((layout, 2 if layout.data == 2 else 1) for layout in SHARDED),
]
"""A layout, and the micro-batches of each data rank, which has four sequences in all."""
QUICK = [CASES[0], (Layout(data=2, sharding="zero3"), 2)]
"""All axes, split sequences and accumulation; and data ranks that share one copy of the model."""


@pytest.fixture(scope="module")
def one_device(ranks: RankPool) -> dict[torch.dtype, dict[str, Any]]:
    """The runs that all others must repeat."""
    losses = ranks.run(1, train, Layout(), torch.float64, NUM_LEARNING)[0]["losses"]
    assert losses[-1] < 0.8 * losses[0], "nothing was learned"
    return {dtype: ranks.run(1, train, Layout(), dtype, NUM_COMPARED)[0] for dtype in (torch.float64, torch.float32)}


def _assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        margin = tolerance * tensor.abs().max().item()
        torch.testing.assert_close(actual[name], tensor, rtol=tolerance, atol=margin, msg=lambda m, n=name: f"{n}: {m}")


def _assert_ranks_agree(results: list[dict[str, Any]]) -> None:
    """All ranks have the same parameters, to the last bit."""
    for other in results[1:]:
        for name, parameter in results[0]["parameters"].items():
            assert torch.equal(parameter, other["parameters"][name]), f"ranks differ in {name}"


@pytest.mark.parametrize(
    ("layout", "num_micro_batches"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
    ids=str,
)
def test_float64_training_agrees_to_ten_digits(
    ranks: RankPool, one_device: dict[torch.dtype, dict[str, Any]], layout: Layout, num_micro_batches: int
) -> None:
    expected = one_device[torch.float64]
    assert max(expected["norms"]) > 1.0, "nothing was clipped"
    results = ranks.run(layout.world_size, train, layout, torch.float64, NUM_COMPARED, num_micro_batches)
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-10, abs=0.0)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-8, abs=0.0)
        _assert_same(result["gradients"], expected["gradients"], 1e-10)
        _assert_same(result["parameters"], expected["parameters"], 1e-8)
    _assert_ranks_agree(results)


def _train_with_onednn(layout: Layout) -> tuple[dict[str, Any], int]:
    """The same training where all products that oneDNN takes are its own, and how many these were."""
    before, calls = (onednn.is_faster, onednn._LEAST_FLOPS, onednn._linear), []

    def linear(*arguments: Any) -> Tensor:
        calls.append(arguments)
        return before[-1](*arguments)

    onednn.is_faster, onednn._LEAST_FLOPS, onednn._linear = (lambda: onednn.IS_THERE), 0, linear
    try:
        return train(layout, torch.float32, NUM_COMPARED), len(calls)
    finally:
        onednn.is_faster, onednn._LEAST_FLOPS, onednn._linear = before


@pytest.mark.one_in(3)
@pytest.mark.skipif(not onednn.IS_THERE, reason="this PyTorch is without oneDNN")
@pytest.mark.parametrize("layout", [Layout(), LAYOUTS[1], LAYOUTS[5]], ids=str)
def test_float32_training_by_onednn_agrees_to_five_digits(
    ranks: RankPool, one_device: dict[torch.dtype, dict[str, Any]], layout: Layout
) -> None:
    expected = one_device[torch.float32]
    for result, num_calls in ranks.run(layout.world_size, _train_with_onednn, layout):
        # Of a layer four matrices, each forward and backward; of the loss three products in blocks.
        assert num_calls >= NUM_COMPARED * (CONFIG.num_layers * 4 * 3 + 3)
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=0.0)
        _assert_same(result["gradients"], expected["gradients"], 1e-5)
