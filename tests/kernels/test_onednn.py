"""oneDNN's products: the same as PyTorch's own, asked for only where they can be had, whole and in blocks."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from crosscut.kernels import ORDINARY, onednn
from crosscut.kernels.products import add_product, multiply_into
from crosscut.rehearsal.pretence import as_on

N, IN, OUT = 301, 205, 299  # odd, and enough to be worth it
FILLED = 320
"""Tokens of a product of 301."""


@pytest.fixture(autouse=True)
def _any_processor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not onednn.IS_THERE:
        pytest.skip("this PyTorch is without oneDNN")
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    monkeypatch.setattr(onednn, "_BLOCK_ELEMENTS", 64 * N)  # several blocks, the last one smaller
    with torch.no_grad():
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Tokens and outputs of the products that oneDNN was asked for."""
    shapes, plain = [], onednn._linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append((x.shape[:-1].numel(), weight.shape[0]))
        return plain(x, weight, bias)

    monkeypatch.setattr(onednn, "_linear", linear)
    return shapes


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_three_products_of_a_layer_are_the_exact_ones(calls, has_bias):
    x, weight, grad, bias = (
        _random(7, 43, IN),
        _random(OUT, IN),
        _random(7, 43, OUT),
        _random(OUT) if has_bias else None,
    )
    exact_x, exact_weight, exact_grad = (t.double() for t in (x, weight, grad))
    expected = exact_x @ exact_weight.t() + (0.0 if bias is None else bias.double())
    _assert_same(ORDINARY.output(x, weight, bias), expected)
    _assert_same(ORDINARY.input_gradient(grad, weight), exact_grad @ exact_weight)
    onto = _random(7, 43, IN)
    again = ORDINARY.input_gradient(grad, weight, onto)
    assert again is onto
    _assert_same(again, _random(7, 43, IN).double() + exact_grad @ exact_weight)
    _assert_same(ORDINARY.weight_gradient(grad, x), exact_grad.view(-1, OUT).t() @ exact_x.view(-1, IN))
    assert calls == [(FILLED, OUT), (FILLED, IN), (FILLED, IN), (OUT, IN)]


@pytest.mark.parametrize(("outputs", "inputs"), [(OUT, IN), (4 * OUT, IN // 2), (IN // 2, 4 * OUT)])
def test_a_weights_gradient_is_laid_out_as_the_weight_whatever_was_turned(calls, outputs, inputs):
    grad, x = _random(N, outputs), _random(N, inputs)
    found = ORDINARY.weight_gradient(grad, x)
    assert found.is_contiguous()
    _assert_same(found, grad.double().t() @ x.double())
    turned = (N + outputs) * inputs < N * outputs
    assert turned == (outputs == 4 * OUT)
    assert calls == [(inputs, outputs) if turned else (outputs, inputs)]
    gaps = _random(N, 2 * outputs)[:, ::2]
    _assert_same(ORDINARY.weight_gradient(gaps, x), gaps.double().t() @ x.double())
    assert len(calls) == 1


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_turned", [False, True])
def test_a_product_is_put_where_it_is_wanted(calls, has_bias, is_turned):
    x, weight, bias = _random(7, 43, IN), _random(OUT, IN), _random(OUT) if has_bias else None
    kept = _random(IN, OUT).copy_(weight.t()).t() if is_turned else weight
    out = torch.full((7, 43, OUT), torch.nan)
    multiply_into(out, x, kept, bias)
    _assert_same(out, x.double() @ weight.double().t() + (0.0 if bias is None else bias.double()))
    assert len(calls) == (1 if is_turned else 5)  # blocks of 64 of the 299 rows


def test_a_product_is_added_block_by_block(calls):
    error, hidden = _random(N, OUT), _random(N, IN)
    expected = error.double().t() @ hidden.double()
    total = torch.full((OUT, IN), torch.nan)
    add_product(total, error.t(), hidden, is_first=True)
    _assert_same(total, expected)
    add_product(total, error.t(), hidden)
    _assert_same(total, 2 * expected)
    assert len(calls) > 2


def test_factors_with_gaps_give_the_same(calls):
    x, weight = _random(N, 2 * IN)[:, ::2], _random(OUT, IN)
    _assert_same(ORDINARY.output(x, weight), x.double() @ weight.double().t())
    assert len(calls) == 1
    gaps = _random(OUT, 2 * IN)[:, ::2]
    _assert_same(ORDINARY.output(_random(N, IN), gaps), _random(N, IN).double() @ gaps.double().t())
    assert len(calls) == 1  # the slow reference code is not asked for


@pytest.mark.parametrize("is_packed", [False, True])
def test_texts_of_all_lengths_are_few_shapes(calls, is_packed):
    weight, bias = _random(OUT, IN), _random(OUT)
    kept = onednn.packed(weight, num_tokens=8) if is_packed else weight
    for num_tokens in range(1, 260):
        x = _random(1, num_tokens, IN)
        y = onednn.linear(x, kept, bias)
        assert y.shape == (1, num_tokens, OUT)
        if num_tokens % 50 == 3:
            _assert_same(y, x.double() @ weight.double().t() + bias.double())
    assert len(set(calls)) == 32 + 5


def test_it_is_asked_only_where_it_can_be_and_pays():
    x, weight = _random(N, IN), _random(OUT, IN)
    assert onednn.suits(x, weight)
    assert onednn.suits(x, _random(IN, OUT).t())
    assert not onednn.suits(x[:100], weight)
    assert not onednn.suits(x.double(), weight.double())
    assert not onednn.suits(x.bfloat16(), weight.bfloat16())
    assert not onednn.suits(x.to("meta"), weight.to("meta"))
    with torch.enable_grad():
        assert not onednn.suits(x, weight)
    with as_on("cuda"):
        assert not onednn.suits(x, weight)
        assert not onednn.IS_THERE
    assert onednn.suits(x, weight)
    assert onednn.IS_THERE


def test_a_compiler_sees_pytorchs_own_products_alone(calls, monkeypatch):
    monkeypatch.setattr(onednn, "is_faster", lambda: pytest.fail("a compiler would look at the processor"))
    x, weight = _random(N, IN), _random(OUT, IN)
    found = torch.compile(ORDINARY.output, backend="eager", fullgraph=True)(x, weight)
    _assert_same(found, x.double() @ weight.double().t())
    assert not calls
