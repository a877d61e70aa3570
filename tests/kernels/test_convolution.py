"""The causal convolution against PyTorch's, document by document."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.kernels.recurrent.convolution import _plain, convolve, convolve_next


def of_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Plain twin of `convolve` for sequences of one document."""
    padded = F.pad(x.transpose(1, 2), (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=len(weight))).transpose(1, 2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lengths", [(9,), (1,), (2,), (3, 1, 5)], ids=str)
def test_convolution_is_that_of_each_document(lengths: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, sum(lengths), 6, dtype=torch.float64, requires_grad=True)
    shapes = ((6, 4), (6,))[: 1 + bias]
    parameters = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(2, -1)
    documents = numbers if len(lengths) > 1 else None
    plain = torch.cat([of_torch(part, *parameters) for part in x.split(lengths, 1)], 1)
    given = torch.randn_like(plain)
    wanted = torch.autograd.grad(plain, (x, *parameters), given)
    shift = parameters[1] if bias else None
    for ours in (convolve(x, *parameters, documents=documents), _plain(x, parameters[0], shift, documents)):
        torch.testing.assert_close(ours, plain, rtol=1e-13, atol=1e-13)
        found = torch.autograd.grad(ours, (x, *parameters), given)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("length", [1, 5])
@torch.no_grad()
def test_next_tokens_are_convolved_as_in_the_whole_text(length: int) -> None:
    torch.manual_seed(1)
    x, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 3 + length, 6), (6, 4), (6,)))
    whole = convolve(x, weight, bias)[:, 3:]
    torch.testing.assert_close(convolve_next(x, weight, bias, before=3), whole, rtol=0, atol=0)
