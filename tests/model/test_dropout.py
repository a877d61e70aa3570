"""Dropout at the paper's places: embeddings, attention, residuals."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.model import GPT
from crosscut.parallel import gather_from_sequence_parallel
from tests.model.twins import CONFIG, B, S, batch, build
from tests.parallel.twins import each
from tests.ranks import RankPool

DROPPING = replace(CONFIG, dropout=0.1)


def _forward(layout: Layout, training: bool, step: int = 0) -> tuple[list[Tensor], Tensor]:
    """The residual stream after the embeddings and after each layer, and the whole of the last hidden states."""
    model = build(layout, config=DROPPING).train(training)
    model.dropout.streams.restart(step=step)
    stream: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, inputs, output: stream.extend([inputs[0].detach(), output[0].detach()]))
    y = model(batch(0))
    if model.mesh.sequence_parallel:
        y = gather_from_sequence_parallel(y, model.mesh.tensor)
    return stream, y.detach()


def test_the_residual_stream_is_the_same_on_all_tensor_ranks(ranks: RankPool) -> None:
    first, *others = ranks.run(2, _forward, Layout(tensor=2), True)
    assert len(first[0]) == 2 * DROPPING.num_layers
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first[0], other[0], strict=True))
        assert torch.equal(first[1], other[1])


def test_a_split_sequence_gathers_to_the_same_on_all_tensor_ranks(ranks: RankPool) -> None:
    first, *others = ranks.run(4, _forward, Layout(tensor=4, sequence_parallel=True), True)
    assert first[0][0].shape == (B, S // 4, DROPPING.hidden_size)
    for other in others:
        assert torch.equal(first[1], other[1])
        zeros = [(stream[0] == 0) for stream in (first[0], other[0])]
        assert not torch.equal(*zeros), "two parts of the sequence dropped alike"


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(tensor=2, sequence_parallel=True)], ids=str)
def test_what_stays_of_the_embeddings_is_scaled_up(ranks: RankPool, layout: Layout) -> None:
    for (before, _), (after, _) in ranks.run(2, each, _forward, [(layout, False), (layout, True)]):
        stays = after[0] != 0
        assert 0 < (~stays).sum() < stays.numel() / 2
        torch.testing.assert_close(after[0], torch.where(stays, before[0] / 0.9, 0.0), rtol=1e-12, atol=1e-12)


def test_the_embeddings_drop_the_same_whatever_the_layout(ranks: RankPool) -> None:
    one, two = (ranks.run(n, _forward, Layout(tensor=n), True)[0][0][0] for n in (1, 2))
    assert torch.equal(one == 0, two == 0)
    assert abs((one == 0).double().mean() - 0.1) < 0.02


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(tensor=2, sequence_parallel=True)], ids=str)
def test_training_drops_anew_each_step_and_evaluation_drops_nothing(ranks: RankPool, layout: Layout) -> None:
    plain = ranks.run(1, _forward, Layout(), False)[0][1]
    cases = [(layout, False), *((layout, True, step) for step in (0, 0, 1))]
    evaluated, first, again, next_step = (y for _, y in ranks.run(layout.tensor, each, _forward, cases)[0])
    torch.testing.assert_close(evaluated, plain, rtol=1e-12, atol=1e-12)
    assert torch.equal(first, again)
    assert not torch.allclose(first, plain)
    assert not torch.allclose(first, next_step)


def _attention(layout: Layout) -> tuple[Tensor, bool]:
    """The first layer's heads, put together, where all weights and values are alike on all ranks."""
    model = build(layout, config=DROPPING)
    attention = model.blocks[0].attention
    with torch.no_grad():
        for layer in (attention.qkv.query, attention.qkv.key_value):
            layer.weight.zero_()
            layer.bias.fill_(1.0)  # uniform weights over earlier positions, of values of one
    heads: list[Tensor] = []
    attention.output.register_forward_pre_hook(lambda _, inputs: heads.append(inputs[0].detach()))
    attention(torch.zeros(B, S, DROPPING.hidden_size).double())
    return heads[0].unflatten(-1, (-1, DROPPING.head_size))[..., 0], bool(torch.rand(1) == _next_shared(model))


def _next_shared(model: GPT) -> Tensor:
    model.dropout.streams.restart(step=0)
    return torch.rand(1)


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(tensor=2, sequence_parallel=True)], ids=str)
def test_attention_drops_in_each_rank_s_heads_for_itself(ranks: RankPool, layout: Layout) -> None:
    (first, shared_kept), (second, _) = ranks.run(2, _attention, layout)
    assert shared_kept or layout.sequence_parallel, "attention drew from the shared stream"
    assert not torch.equal(first, second), "both ranks dropped alike"
    for heads in (first, second):
        assert set(heads[:, 0].unique().tolist()) <= {0.0, 1 / 0.9}  # a position that sees itself alone
        numbers = torch.arange(1, heads.shape[1] + 1).view(-1, 1)  # each position weighs itself and all before it alike
        kept = heads * numbers * 0.9
        torch.testing.assert_close(kept, kept.round(), rtol=0.0, atol=1e-12)
        assert heads.mean().item() == pytest.approx(1.0, abs=0.1)
        assert heads.std() > 0.01
