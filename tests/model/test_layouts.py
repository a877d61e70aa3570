"""One model on every layout: the same losses, the same gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.kernels import onednn
from tests.model.twins import CONFIG, LAYOUTS, train
from tests.ranks import RankPool

NUM_STEPS = 17
"""Steps on one device, in which the model learns."""
NUM_COMPARED = 3
"""Steps on every other layout."""


@pytest.fixture(scope="module")
def one_device(ranks: RankPool) -> dict[torch.dtype, dict[str, Any]]:
    """The runs that all others must repeat."""
    num_steps = {torch.float64: NUM_STEPS, torch.float32: NUM_COMPARED}
    return {dtype: ranks.run(1, train, Layout(), dtype, number)[0] for dtype, number in num_steps.items()}


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


@pytest.mark.one_in(len(LAYOUTS))
@pytest.mark.parametrize("layout", LAYOUTS[::-1], ids=str)  # the last one has all axes, and splits sequences
def test_float64_training_agrees_to_ten_digits(
    ranks: RankPool, one_device: dict[torch.dtype, dict[str, Any]], layout: Layout
) -> None:
    expected = one_device[torch.float64]
    assert expected["losses"][-1] < 0.8 * expected["losses"][0], "nothing was learned"
    assert max(expected["norms"][:NUM_COMPARED]) > 1.0, "nothing was clipped"
    results = ranks.run(layout.world_size, train, layout, torch.float64, NUM_COMPARED)
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"][:NUM_COMPARED], rel=1e-10, abs=0.0)
        assert result["norms"] == pytest.approx(expected["norms"][:NUM_COMPARED], rel=1e-8, abs=0.0)
        _assert_same(result["gradients"], expected["gradients"], 1e-10)
    _assert_ranks_agree(results)


@pytest.mark.slow  # in float64, where a fault shows most, a layout is quick
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_float32_training_agrees_to_five_digits_and_ranks_to_the_last_bit(
    ranks: RankPool, one_device: dict[torch.dtype, dict[str, Any]], layout: Layout
) -> None:
    expected = one_device[torch.float32]
    results = ranks.run(layout.world_size, train, layout, torch.float32, NUM_COMPARED)
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"][:NUM_COMPARED], rel=1e-5, abs=0.0)
        _assert_same(result["gradients"], expected["gradients"], 1e-5)
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
        assert result["losses"] == pytest.approx(expected["losses"][:NUM_COMPARED], rel=1e-5, abs=0.0)
        _assert_same(result["gradients"], expected["gradients"], 1e-5)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", [LAYOUTS[4], Layout(), LAYOUTS[1], LAYOUTS[6]], ids=str)
def test_accumulating_micro_batches_is_the_same_step(
    ranks: RankPool, one_device: dict[torch.dtype, dict[str, Any]], layout: Layout
) -> None:
    expected = one_device[torch.float64]
    for result in ranks.run(layout.world_size, train, layout, torch.float64, 2, 2):
        assert result["losses"] == pytest.approx(expected["losses"][:2], rel=1e-10, abs=0.0)
        _assert_same(result["gradients"], expected["gradients"], 1e-10)
