"""Messages of one forward and backward pass of the whole model."""

import torch

from crosscut.config import Layout
from crosscut.parallel import CollectiveRecorder, GradientReducer, Sent
from tests.model.twins import CONFIG, B, S, batch, build
from tests.ranks import RankPool

H, L = CONFIG.hidden_size, CONFIG.num_layers


def _sent(layout: Layout, dtype: torch.dtype) -> tuple[list[Sent], list[Sent], list[Sent]]:
    model = build(layout, dtype=dtype)
    reducer = GradientReducer(model.parameters(), model.mesh)
    with CollectiveRecorder(model.mesh) as forward:
        loss = model.loss(batch(0))
    reducer.arm()
    with CollectiveRecorder(model.mesh) as backward:
        loss.backward()
    with CollectiveRecorder(model.mesh) as finish:
        reducer.finish()
    return forward.sent, backward.sent, finish.sent


LOSS = [("all_reduce", "tensor", B * S), ("all_reduce", "tensor", 2 * B * S)]


def test_each_layer_sends_two_all_reduces_forward_and_two_backward(ranks: RankPool) -> None:
    one = [("all_reduce", "tensor", B * S * H)]
    for forward, backward, finish in ranks.run(2, _sent, Layout(tensor=2), torch.float32):
        assert forward == one + 2 * L * one + LOSS  # the embedding, the layers, the loss
        assert backward == one + 2 * L * one  # the output projection, the layers
        assert finish == []


def test_a_split_sequence_sends_a_gather_and_a_scatter_for_each(ranks: RankPool) -> None:
    layout = Layout(tensor=2, sequence_parallel=True)
    gather, scatter = [("all_gather", "tensor", B * S * H)], [("reduce_scatter", "tensor", B * S * H)]
    replicated = CONFIG.max_sequence_length * H + L * 6 * H + 2 * H
    for forward, backward, finish in ranks.run(2, _sent, layout, torch.float32):
        assert forward == scatter + 2 * L * (gather + scatter) + gather + LOSS
        assert backward == scatter + 2 * L * (2 * gather + scatter) + gather  # the inputs were kept split
        assert finish == [("all_reduce", "tensor", replicated)]


def test_the_loss_sends_three_elements_per_token_whatever_the_vocabulary(ranks: RankPool) -> None:
    forward, _, _ = ranks.run(2, _sent, Layout(tensor=2), torch.float32)[0]
    assert sum(sent.elements for sent in forward if sent.elements != B * S * H) == 3 * B * S


def test_one_rank_sends_nothing(ranks: RankPool) -> None:
    assert ranks.run(1, _sent, Layout(), torch.float32) == [([], [], [])]


def test_data_ranks_send_every_gradient_once_and_nothing_else(ranks: RankPool) -> None:
    for forward, backward, finish in ranks.run(2, _sent, Layout(data=2), torch.float32):
        assert forward == finish == []
        assert {(sent.operation, sent.axis) for sent in backward} == {("all_reduce", "data")}
        padded = 384
        size = 12 * H * H + 13 * H
        assert sum(s.elements for s in backward) == padded * H + CONFIG.max_sequence_length * H + L * size + 2 * H
