"""GeLU against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from crosscut.kernels.gelu import gelu


@pytest.mark.parametrize("size", [(3, 5, 7), (1025, 1024)], ids=["small", "large"])
def test_values_and_gradients_are_those_of_pytorch(size: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(size, generator=generator, dtype=torch.float64) * 4 for _ in range(2))
    x.view(-1)[:4] = torch.tensor([0.0, -0.0, 400.0, -400.0])
    found = []
    for function in (gelu, lambda x: F.gelu(x, approximate="tanh")):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        y.backward(grad)
        found.append((y.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_the_input_is_kept(dtype: torch.dtype) -> None:
    kept: list[torch.Tensor] = []
    x = torch.randn(6, 8, dtype=dtype).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = gelu(x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]
    assert y.dtype == dtype


def test_a_value_that_is_no_number_stays_none() -> None:
    x = torch.tensor([float("nan"), float("inf"), 1.0]).requires_grad_()
    y = gelu(x)
    y.sum().backward()
    assert y.isnan().tolist() == [True, False, False]
    assert y[1] == float("inf")
