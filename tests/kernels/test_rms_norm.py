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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_the_input_and_one_number_per_token_are_kept(dtype: torch.dtype) -> None:
    kept: list[torch.Tensor] = []
    x, weight = torch.randn(2, 5, 12, dtype=dtype).requires_grad_(), torch.ones(12, dtype=dtype)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = rms_norm(x, weight, 1e-6)
    assert y.dtype == dtype
    assert [tuple(tensor.shape) for tensor in kept] == [(2, 5, 12), (12,), (2, 5, 1)]
    assert kept[2].dtype == torch.float32
