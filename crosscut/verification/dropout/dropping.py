"""Dropout that drops the same elements on every layout, so that results with dropout can be compared number by number.

Random dropout drops other elements on other layouts, by design. In the context `drop_by_value`, dropout drops an
element if the digits of its value say so: the digits are the same on every layout, up to rounding in float64.
Everything else that dropout does, such as dividing the other elements by 1 - p, stays as it is.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.parallel.linear import is_recomputing

_SLICES = 256
"""Number of equal slices in which the numbers from 1/2 to 1 are cut."""
_FIRST, _LAST = 0.3, 0.4
"""Part of each slice that is dropped: a tenth. No round number lies at the borders."""


@contextmanager
def drop_by_value() -> Iterator[None]:
    """Context in which `F.dropout` and `F.scaled_dot_product_attention` drop elements by their values.

    The two functions are replaced for the whole process. A `TorchFunctionMode` would not do: PyTorch leaves it before a
    backward pass recomputes a layer.
    """
    plain = F.dropout, F.scaled_dot_product_attention
    by_value = _ByValue(*plain)
    F.dropout, F.scaled_dot_product_attention = by_value.drop, by_value.attend  # type: ignore[assignment]
    try:
        yield
    finally:
        F.dropout, F.scaled_dot_product_attention = plain


class _ByValue:
    """Replacements of `F.dropout` and `F.scaled_dot_product_attention`.

    A recomputation may call dropout on a tensor that it has not computed, because the backward pass needs only the
    choice of the elements. The choice is therefore kept, by the state of the random generator: a recomputation from the
    right state finds it again. Each call also draws random numbers, like the function that it replaces.
    """

    def __init__(self, dropout: Callable[..., Tensor], attention: Callable[..., Tensor]) -> None:
        self._dropout, self._attention = dropout, attention
        self._chosen: dict[bytes, Tensor] = {}

    def drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Replacement of `F.dropout`."""
        if not training:
            return x
        assert not inplace, "dropout in place cannot be compared"
        return self._dropped(x, p, lambda: self._dropout(x, p))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, **how: Any) -> Tensor:
        """Replacement of `F.scaled_dot_product_attention`."""
        if not dropout_p:
            return self._attention(q, k, v, **how)
        weights = _weights(q, k, **how)
        kept = self._dropped(weights, dropout_p, lambda: self._attention(q, k, v, dropout_p=dropout_p, **how))
        y: Tensor = kept @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return y

    def _dropped(self, x: Tensor, p: float, draw: Callable[[], Tensor]) -> Tensor:
        state = torch.get_rng_state() if x.device.type == "cpu" else torch.cuda.get_rng_state(x.device)
        key = hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest()
        kept = self._chosen.get(key) if is_recomputing() else None
        if kept is None or kept.shape != x.shape:
            place = torch.frexp(x.detach()).mantissa.abs() * _SLICES % 1.0
            kept = self._chosen[key] = (place < _FIRST) | (place >= _LAST)
        with torch.no_grad():
            draw()
        return x * kept / (1.0 - p)


def _weights(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Weights of attention before dropout: the softmax of the scores."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1) if enable_gqa else k
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights: Tensor = scores.softmax(-1)
    return weights
