"""Attention over context ranks, in three ways, beside attention on one rank: values and gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config import Layout, LayoutError
from crosscut.config.layout import ContextAttention
from crosscut.parallel import Axis, CollectiveRecorder, make_mesh
from crosscut.parallel.context import enter_context, leave_context, ring_attention, split_zigzag
from tests.parallel.twins import CPU, each
from tests.ranks import RankPool

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
HEADS = 12
HEAD_SIZE = 4
LENGTH = 24
WAYS = [ContextAttention.GATHER, ContextAttention.ALL_TO_ALL, ContextAttention.RING]


class Case(NamedTuple):
    """Attention whose sequences the ranks share."""

    num_kv_heads: int = HEADS
    is_causal: bool = True
    has_documents: bool = False
    has_padding: bool = False
    scale: float = 1.0
    """Factor of the queries. A large factor gives scores whose exponentials overflow."""


CASES = {
    "causal": Case(),
    "three key-value heads": Case(num_kv_heads=3),
    "one key-value head": Case(num_kv_heads=1),
    "documents": Case(num_kv_heads=3, has_documents=True),
    "bidirectional": Case(is_causal=False),
    "bidirectional with padding": Case(is_causal=False, has_padding=True),
    "bidirectional documents with padding": Case(is_causal=False, has_documents=True, has_padding=True),
    "large scores": Case(scale=400.0),
}


def _operands(case: Case) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values of two sequences, and the gradient of the result."""
    generator = torch.Generator().manual_seed(1)

    def drawn(heads: int) -> Tensor:
        return torch.randn(2, heads, LENGTH, HEAD_SIZE, generator=generator, dtype=torch.float64)

    return [drawn(HEADS) * case.scale, drawn(case.num_kv_heads), drawn(case.num_kv_heads)], drawn(HEADS)


def _shown(case: Case) -> Tensor:
    """Whether each query sees each key [2, 1, S, S]. The documents begin within the parts of the ranks, and some are
    shorter than a part."""
    shown = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    if case.has_documents:
        starts = torch.zeros(2, LENGTH, dtype=torch.long)
        starts[0, [2, 3, 11, 17]] = 1
        starts[1, [13]] = 1
        numbers = starts.cumsum(1)
        shown &= (numbers.unsqueeze(2) == numbers.unsqueeze(1)).unsqueeze(1)
    if case.has_padding:
        shown[0, :, :, 20:] = False
        shown[1, :, :, 5:] = False  # some ranks hold only padding
        shown |= ~shown.any(-1, keepdim=True)
    return shown.tril() if case.is_causal else shown


def _mask(case: Case) -> Tensor | None:
    """Mask of the whole sequence; None if causality alone hides keys."""
    if not (case.has_documents or case.has_padding):
        return None
    shown = _shown(case)
    if not case.has_documents and not case.is_causal:
        shown = shown[:, :, :1]  # all queries see the same keys
    return torch.zeros(shown.shape, dtype=torch.float64).masked_fill(~shown, float("-inf"))


def _own(x: Tensor, axis: Axis, dim: int = 2) -> Tensor:
    return split_zigzag(x, axis.size, dim)[axis.rank]


def _own_mask(case: Case, axis: Axis, way: ContextAttention) -> Tensor | None:
    """Mask of this rank's queries and all keys. Gathered keys need a mask for causality, too."""
    mask = _mask(case)
    if mask is None and way is ContextAttention.GATHER and case.is_causal:
        mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill(~_shown(case)[:1], float("-inf"))
    if mask is None or mask.shape[2] == 1 or way is ContextAttention.ALL_TO_ALL:
        return mask
    return _own(mask, axis)


def _attend(q: Tensor, k: Tensor, v: Tensor, axis: Axis, way: ContextAttention, case: Case) -> Tensor:
    mask = _own_mask(case, axis, way)
    if way is ContextAttention.RING:
        return ring_attention(q, k, v, axis, is_causal=case.is_causal, mask=mask)
    q, k, v = enter_context(q, k, v, axis, way)
    how: Any = {"is_causal": case.is_causal} if mask is None else {"attn_mask": mask}
    return leave_context(F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how), axis, way)


def _compute(way: ContextAttention, case: Case, num_ranks: int) -> tuple[list[Tensor], list[tuple[str, int]]]:
    mesh = make_mesh(Layout(tensor=num_ranks), CPU)
    axis = mesh.tensor
    operands, grad = _operands(case)
    leaves = [_own(x, axis).requires_grad_() for x in operands]
    before = [x.detach().clone() for x in leaves]
    with CollectiveRecorder(mesh) as recorder:
        result = _attend(*leaves, axis, way, case)
        result.backward(_own(grad, axis))
    assert all(torch.equal(x, y) for x, y in zip(leaves, before, strict=True)), "an argument was changed"
    with torch.no_grad():
        assert torch.equal(_attend(*leaves, axis, way, case), result), "differs without gradients"
    return [result.detach(), *(x.grad for x in leaves)], [(sent.operation, sent.elements) for sent in recorder.sent]


def _expected(case: Case) -> list[Tensor]:
    operands, grad = _operands(case)
    q, k, v = leaves = [x.requires_grad_() for x in operands]
    mask = torch.zeros(_shown(case).shape, dtype=torch.float64).masked_fill(~_shown(case), float("-inf"))
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    result = (q @ k.mT / HEAD_SIZE**0.5 + mask).softmax(-1) @ v
    result.backward(grad)
    return [result.detach(), *(x.grad for x in leaves)]  # type: ignore[list-item]


QUICK = [(ContextAttention.GATHER, 2), (ContextAttention.ALL_TO_ALL, 2), (ContextAttention.RING, 4)]
"""Each way on one number of ranks. Keys and values on a ring of four ranks pass through ranks in between."""


@pytest.mark.parametrize(
    ("way", "num_ranks"),
    [
        *QUICK,
        *(pytest.param(way, n, marks=pytest.mark.slow) for way in WAYS for n in (2, 4) if (way, n) not in QUICK),
    ],
)
def test_results_and_gradients_are_those_of_one_rank(ranks: RankPool, way: ContextAttention, num_ranks: int) -> None:
    """Trap: with whole rows masked, PyTorch's log-sum-exp is 0, and a merge with it is wrong by a tenth."""
    of_ranks = ranks.run(num_ranks, each, _compute, [(way, case, num_ranks) for case in CASES.values()])
    for (name, case), found in zip(CASES.items(), zip(*of_ranks, strict=True), strict=True):
        for i, expected in enumerate(_expected(case)):
            scale = expected.abs().max() * case.scale  # a score's own rounding error grows with the score
            for (tensors, _), part in zip(found, split_zigzag(expected, num_ranks, 2), strict=True):
                torch.testing.assert_close(tensors[i] / scale, part / scale, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


BOTH = 2 * 2 * HEAD_SIZE * LENGTH
"""Elements of keys and values, per head, of two whole sequences."""


@pytest.mark.parametrize(
    ("way", "num_kv_heads", "messages"),
    [
        (ContextAttention.GATHER, 3, [("all_gather", 3 * BOTH), ("reduce_scatter", 3 * BOTH)]),
        # Of 3 heads of keys and values, each is sent 4 times; of 4 heads, each is sent once.
        (ContextAttention.ALL_TO_ALL, 3, [("all_to_all", (6 + 12) * BOTH // 4), ("all_to_all", 6 * BOTH // 4)]),
        (ContextAttention.ALL_TO_ALL, 4, [("all_to_all", (6 + 4) * BOTH // 4), ("all_to_all", 6 * BOTH // 4)]),
        (ContextAttention.RING, 3, [("shift", 3 * BOTH // 4)] * 3),
    ],
)
def test_messages_are_those_of_the_docstrings(
    ranks: RankPool, way: ContextAttention, num_kv_heads: int, messages: list[tuple[str, int]]
) -> None:
    expected = list(messages)
    if way is ContextAttention.ALL_TO_ALL:
        expected += messages[::-1]
    elif way is ContextAttention.RING:
        expected += [*[messages[0]] * 6, messages[0]]
    for _, sent in ranks.run(4, _compute, way, Case(num_kv_heads=num_kv_heads), 4):
        assert sent == expected


def _compile(way: ContextAttention, case: Case) -> None:
    axis = make_mesh(Layout(tensor=2), CPU).tensor
    operands, grad = _operands(case)
    found = []
    compiled: Callable[..., Tensor] = torch.compile(_attend, fullgraph=True, backend="aot_eager")
    for attend in (_attend, compiled):
        leaves = [_own(x, axis).requires_grad_() for x in operands]
        result = attend(*leaves, axis, way, case)
        result.backward(_own(grad, axis))
        found.append([result.detach(), *(x.grad for x in leaves)])
    for eager, traced in zip(*found, strict=True):
        torch.testing.assert_close(traced, eager, **CLOSE)


@pytest.mark.slow  # compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.parametrize("way", WAYS)
def test_a_compiler_traces_each_way_as_one_graph(ranks: RankPool, way: ContextAttention) -> None:
    ranks.run(2, _compile, way, CASES["three key-value heads"])


def _exchange_too_few() -> None:
    axis = make_mesh(Layout(tensor=2), CPU).tensor
    x = torch.ones(1, 3, 4, 4)
    enter_context(x, x, x, axis, ContextAttention.ALL_TO_ALL)


def test_heads_that_the_ranks_do_not_divide_cannot_be_exchanged(ranks: RankPool) -> None:
    with pytest.raises(LayoutError, match=r"must be a multiple of the number of context ranks \(2\) .* but is 3"):
        ranks.run(2, _exchange_too_few)
