"""Packed weights: the products of plain ones, and no gradient."""

import pytest
import torch

from crosscut.kernels import onednn
from crosscut.kernels.packed import PACKED, is_faster_packed, packed

pytestmark = pytest.mark.skipif(not onednn.IS_THERE, reason="this PyTorch has no oneDNN")


@pytest.mark.parametrize("num_tokens", [1, 5, 40, 64])
def test_a_packed_weight_gives_the_product_of_the_plain_one(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((2, num_tokens, 23), (44, 23), (44,)))
    own = packed(weight)
    assert own.is_mkldnn
    with torch.no_grad():
        for added in (bias, None):
            expected = torch.nn.functional.linear(x, weight, added)
            torch.testing.assert_close(PACKED.output(x, own, added), expected, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(PACKED.output(x, weight, added), expected, rtol=1e-5, atol=1e-4)


def test_gradients_are_refused() -> None:
    x, weight = torch.ones(2, 3), torch.ones(4, 3)
    for gradient in (lambda: PACKED.input_gradient(x, weight), lambda: PACKED.weight_gradient(x, x)):
        with pytest.raises(RuntimeError, match="needs plain weights to compute gradients, but"):
            gradient()


def test_one_or_two_tokens_are_faster_with_a_plain_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [n for n in range(1, 6) if is_faster_packed(n)] == [3, 4, 5]
    monkeypatch.setattr(onednn, "IS_THERE", False)
    assert not is_faster_packed(5)
