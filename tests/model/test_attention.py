"""Attention with fewer heads of keys and values than of queries, whether or not a kernel shares them."""

import pytest
import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.model import attention
from crosscut.model.attention import types_that_share_heads
from tests.model.twins import FAMILIES, B, S, batch, build
from tests.ranks import RankPool

WIDE = {torch.float64, torch.float32}
NARROW = {torch.bfloat16, torch.float16}


@pytest.mark.parametrize(
    ("device", "capability", "head_size", "shared"),
    [
        ("cpu", None, 512, WIDE | NARROW),
        ("cuda", (7, 0), 64, set()),
        ("cuda", (7, 5), 64, set()),
        ("cuda", (8, 0), 64, NARROW),
        ("cuda", (9, 0), 256, NARROW),
        ("cuda", (9, 0), 264, set()),
        ("cuda", (12, 0), 128, NARROW),
    ],
)
def test_heads_are_shared_where_a_fused_kernel_shares_them(
    device: str,
    capability: tuple[int, int] | None,
    head_size: int,
    shared: set[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert types_that_share_heads(torch.device(device), head_size) == shared


def _gradients(layout: Layout, family: str, shares: bool) -> tuple[bool, float, dict[str, Tensor]]:
    """Whether the kernel was given as many heads of keys as of queries, the loss and all gradients."""
    alike: list[bool] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        alike.append(q.shape[1] == k.shape[1] == v.shape[1] and not options["enable_gqa"])
        return attend(q, k, v, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.F, "scaled_dot_product_attention", watched)
        if not shares:
            patch.setattr(attention, "types_that_share_heads", lambda *_: frozenset())
        model = build(layout, config=FAMILIES[family])
        loss = model.loss(*batch(0), scale=1 / (B * S))
        loss.backward()
    return all(alike), loss.item(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["Llama grouped-query", "GPT-2 multi-query", "Qwen3"])
def test_heads_repeated_for_the_kernel_are_the_same_model(ranks: RankPool, family: str) -> None:
    layout = Layout(tensor=2)
    alike, loss, gradients = ranks.run(2, _gradients, layout, family, False)[0]
    _, expected_loss, expected = ranks.run(2, _gradients, layout, family, True)[0]
    assert alike
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
