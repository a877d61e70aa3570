"""Dropout that drops by value."""

import pytest
import torch
import torch.nn.functional as F

from crosscut.verification.dropout.dropping import drop_by_value

X = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_the_values_decide_and_the_others_are_scaled_up():
    with drop_by_value():
        whole, part = F.dropout(X, 0.2), F.dropout(X[:7], 0.2)
    assert torch.equal(whole[:7], part)
    assert 0.05 < (whole == 0).double().mean() < 0.15
    torch.testing.assert_close(whole, torch.where(whole == 0, 0.0, X / 0.8))
    assert not torch.equal(F.dropout(X, 0.2), F.dropout(X, 0.2)), "outside, the elements are random again"


@pytest.mark.parametrize("how", ["causal", "mask", "shared heads"])
def test_attention_without_dropped_weights_is_attention(how):
    q, k, v = (X.view(2, 4, 8, 64)[..., :16].roll(i, 2) for i in range(3))
    given = {"causal": {"is_causal": True}, "mask": {"attn_mask": torch.zeros(8, 8).triu(1) * -9}}.get(how, {})
    if how == "shared heads":
        k, v, given = k[:, :2], v[:, :2], {"enable_gqa": True}
    expected = F.scaled_dot_product_attention(q, k, v, **given)
    with drop_by_value():
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, **given), expected)
        dropped = F.scaled_dot_product_attention(q, k, torch.ones_like(v), dropout_p=0.5, **given)
    totals = dropped / 2  # the sum of the weights that stay
    assert totals.max() <= 1 + 1e-12
    assert totals.min() < 1 - 1e-3, "no weight was dropped"


def test_each_call_draws_so_that_streams_move_on():
    with drop_by_value():
        before = torch.get_rng_state()
        F.dropout(X, 0.2)
        assert not torch.equal(before, torch.get_rng_state())
