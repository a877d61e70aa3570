"""The passes over logits in place: masked log-softmax and the loss's gradient, against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from crosscut.kernels.loss_passes import Logits, LossPasses, error_into, log_softmax_

C, V = 5, 9


def _logits() -> torch.Tensor:
    return torch.randn(C, V, generator=torch.Generator().manual_seed(0)).double()


@pytest.mark.parametrize("num_real", [V, 6])
def test_log_softmax_is_of_the_real_columns_and_in_place(num_real: int) -> None:
    logits = _logits()
    expected = torch.log_softmax(logits[:, :num_real], 1)
    log_sum = logits[:, :num_real].logsumexp(1)
    log_p, sums = log_softmax_(logits, num_real)
    assert log_p.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(log_p[:, :num_real], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sums, log_sum, rtol=1e-12, atol=1e-12)
    assert (log_p[:, num_real:] == -torch.inf).all()


def test_without_real_columns_the_sum_is_nothing_and_values_are_finite() -> None:
    log_p, sums = log_softmax_(torch.full((C, V), torch.nan), 0)
    assert log_p.isfinite().all()
    assert (sums == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_error_is_the_gradient_of_the_loss(dtype: torch.dtype) -> None:
    logits = _logits().requires_grad_()
    targets = torch.tensor([0, 8, 3, 3, 5])
    here = torch.tensor([True, True, True, True, False])
    F.cross_entropy(logits, targets.masked_fill(~here, -100), reduction="sum").backward()
    expected = logits.grad.clone()
    expected[~here] = torch.softmax(logits[~here].detach(), 1)  # all of the target's one is on another rank
    log_p = torch.log_softmax(logits.detach(), 1)
    out = log_p if dtype == torch.float64 else torch.empty(C, V, dtype=dtype)
    error = error_into(out, log_p, targets.masked_fill(~here, 0), here)
    assert error.data_ptr() == out.data_ptr()
    close = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(error, expected.to(dtype), **close)


@pytest.mark.parametrize(("num_real", "cap"), [(V, 0.0), (6, 0.0), (6, 2.0)])
def test_the_passes_to_compile_read_logits_once_and_overwrite_them(num_real: int, cap: float) -> None:
    passes, values = LossPasses(lambda function: function), _logits().requires_grad_()
    targets = torch.tensor([0, 5, 3, 3, 5])
    real = (cap * torch.tanh(values / cap) if cap else values)[:, :num_real]
    F.cross_entropy(real, targets, reduction="sum").backward()
    held = values.detach().clone()
    logits = Logits(held, num_real, cap)
    highest, sums, target = passes.sums(logits, targets, torch.float64).unbind()
    torch.testing.assert_close(highest, real.amax(1))
    torch.testing.assert_close(highest + sums.log(), real.logsumexp(1))
    torch.testing.assert_close(target, real.gather(1, targets.unsqueeze(1)).squeeze(1))
    error = passes.error(logits, highest, sums, targets, None)
    assert error.data_ptr() == held.data_ptr()
    torch.testing.assert_close(error, values.grad, rtol=1e-12, atol=1e-12)


def test_a_rank_with_padding_only_adds_nothing_to_the_sums() -> None:
    logits = Logits(torch.full((C, V), torch.nan), 0, 0.0)
    sums = LossPasses(lambda function: function).sums(logits, torch.zeros(C, dtype=torch.long), torch.float32)
    assert sums.tolist() == [[-torch.inf] * C, [0.0] * C, [0.0] * C]
