"""RMS normalisation against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from crosscut.kernels.rms_norm import rms_norm


@pytest.mark.parametrize("has_weight", [True, False])
def test_values_and_gradients_are_those_of_pytorch(has_weight: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(s, generator=generator).double() for s in ((2, 5, 12), (12,), (2, 5, 12)))
    found = []
    for norm in (rms_norm, lambda x, weight, epsilon: F.rms_norm(x, (12,), weight, epsilon)):
        leaves = [leaf.clone().requires_grad_() for leaf in ((x, weight) if has_weight else (x,))]
        y = norm(*leaves, *([] if has_weight else [None]), 1e-3)
        y.backward(grad)
        found.append((y.detach(), *(leaf.grad for leaf in leaves)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_weight_may_be_an_offset_from_one() -> None:
    x, offset = torch.randn(2, 5, 12).double().requires_grad_(), (0.1 * torch.randn(12)).double().requires_grad_()
    results = rms_norm(x, offset, 1e-3, has_offset=True), F.rms_norm(x, (12,), 1 + offset, 1e-3)
    grad = torch.randn(2, 5, 12).double()
    for one, other in zip(*((y, *torch.autograd.grad(y, (x, offset), grad)) for y in results), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_an_offset_keeps_the_digits_that_a_narrow_weight_near_one_has_not() -> None:
    x, offset = torch.randn(4, 512).bfloat16(), torch.full((512,), 0.0015).bfloat16()
    exact = F.rms_norm(x.double(), (512,), 1 + offset.double(), 1e-6)
    errors = [
        (y.double() - exact).abs().mean()
        for y in (rms_norm(x, offset, 1e-6, has_offset=True), F.rms_norm(x, (512,), 1 + offset, 1e-6))
    ]
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.parametrize("has_offset", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_the_input_and_one_number_per_token_are_kept(dtype: torch.dtype, has_offset: bool) -> None:
    kept: list[torch.Tensor] = []
    x, weight = torch.randn(2, 5, 12, dtype=dtype).requires_grad_(), torch.ones(12, dtype=dtype)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = rms_norm(x, weight, 1e-6, has_offset=has_offset)
    assert y.dtype == dtype
    assert [tuple(tensor.shape) for tensor in kept] == [(2, 5, 12), (12,), (2, 5, 1)]
    assert kept[2].dtype == torch.float32
