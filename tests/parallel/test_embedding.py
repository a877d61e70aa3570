"""Tokens cut along the vocabulary, and positions, against `nn.Embedding`."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from crosscut.config import ConfigError, Layout, padded_vocab_size
from crosscut.parallel import (
    CollectiveRecorder,
    LossSettings,
    ParallelMesh,
    PositionEmbedding,
    TokenTypeEmbedding,
    VocabParallelEmbedding,
    enter_tensor_parallel,
    make_mesh,
    vocab_parallel_cross_entropy,
)
from crosscut.training.watching.memory_account import account_of
from tests.parallel.twins import CPU, LAYOUTS, SOME, assert_twins, fill, split_sequence
from tests.ranks import RankPool

V, H, P = 300, 12, 10  # V: the third of four ranks has rows of both kinds, the fourth only padding


make_tokens = partial(VocabParallelEmbedding, V, H, dtype=torch.float64)
make_types = partial(TokenTypeEmbedding, 3, H, dtype=torch.float64)


class Positions(nn.Module):
    """Positions as a layer of a float input, whose length they take."""

    def __init__(self, mesh: ParallelMesh) -> None:
        super().__init__()
        self.embedding = PositionEmbedding(P, H, mesh=mesh, dtype=torch.float64)
        self.num_parts = mesh.tensor.size if mesh.sequence_parallel else 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding(x.shape[1] * self.num_parts)


class SerialPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(P, H).double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embedding(torch.arange(x.shape[1]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_vocabulary_parallel_embedding_is_embedding(ranks: RankPool, layout: Layout) -> None:
    tokens = torch.randint(0, V, (3, 8))
    tokens[0, :4] = torch.tensor([0, 127, 128, V - 1])  # the parts' edges
    tokens[1] = tokens[0]  # looked up twice: gradients add up
    assert_twins(ranks, layout, make_tokens, nn.Embedding(V, H).double(), tokens, (None, split_sequence(layout)))


@pytest.mark.parametrize("layout", SOME, ids=str)
def test_token_type_embedding_is_embedding(ranks: RankPool, layout: Layout) -> None:
    types = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2], [0, 2, 1, 0, 1, 2, 0, 0]])
    assert_twins(ranks, layout, make_types, nn.Embedding(3, H).double(), types, (None, split_sequence(layout)))


def _look_up_type(number: int) -> None:
    make_types(mesh=make_mesh(Layout(), CPU))(torch.tensor([[0, number]]))


@pytest.mark.parametrize("number", [-1, 3])
def test_a_type_that_the_model_has_not_is_an_error(ranks: RankPool, number: int) -> None:
    message = (
        "^Token types must be from 0 to 2, the last type of the model, but a type is outside this range. Number the"
    )
    with pytest.raises(RuntimeError, match=message):
        ranks.run(1, _look_up_type, number)


@pytest.mark.parametrize("layout", SOME, ids=str)
def test_position_embedding_is_embedding(ranks: RankPool, layout: Layout) -> None:
    between = split_sequence(layout)
    assert_twins(ranks, layout, Positions, SerialPositions(), torch.randn(2, 8, H).double(), (between, between))


def _padding_after_steps(layout: Layout) -> tuple[int, Tensor]:
    """Train the tied embedding for some steps of AdamW and return the rows beyond the vocabulary."""
    mesh = make_mesh(layout, CPU)
    embedding = make_tokens(mesh=mesh)
    fill(embedding.weight, torch.randn(V, H).double())
    optimizer = torch.optim.AdamW(embedding.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        tokens = torch.randint(0, V, (2, 8))
        hidden = embedding(tokens).flatten(0, 1)
        local = embedding.weight.to_local()
        loss = vocab_parallel_cross_entropy(hidden, local, tokens.flatten(), vocab_size=V, axis=mesh.tensor)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = embedding.weight.full_tensor().detach()
    return whole.shape[0], whole[V:]


def _tied_gradients(layout: Layout) -> list[tuple[Tensor, int]]:
    """The tied weight's gradient, with the look-up's weight and with another one, and its bytes at the peak."""
    mesh, found = make_mesh(layout, CPU), []
    tokens, targets = torch.arange(24).view(3, 8) % 7, torch.arange(24) * 11 % V
    for shared in (True, False):
        embedding = make_tokens(mesh=mesh)
        fill(embedding.weight, torch.arange(V * H).view(V, H).double().sin())
        if shared:
            embedded, tied = embedding(tokens, with_weight=True)
            weight = tied.tensor
        else:
            embedded, weight = embedding(tokens), embedding.weight.to_local()
        hidden = enter_tensor_parallel(embedded, mesh).flatten(0, 1)
        with account_of({"weight": [embedding.weight]}, CPU) as account:
            loss = vocab_parallel_cross_entropy(
                hidden, weight, targets, vocab_size=V, axis=mesh.tensor, settings=LossSettings(chunk_tokens=4)
            )
            loss.backward()
        of_weight = embedding.weight.to_local().nbytes
        found.append((embedding.weight.grad.to_local(), account.peak()[0] // of_weight))
    return found


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(tensor=2, sequence_parallel=True)], ids=str)
def test_the_weight_given_with_the_look_up_adds_both_gradients_in_one_tensor(ranks: RankPool, layout: Layout) -> None:
    for (tied, lean), (summed, large) in ranks.run(layout.world_size, _tied_gradients, layout):
        torch.testing.assert_close(tied, summed, rtol=1e-12, atol=1e-14)
        assert tied.abs().sum() > 0
        assert lean < large  # no gradient [V/T, H] of the rows alone


@pytest.mark.parametrize("tensor", [1, 4])
def test_the_vocabulary_s_padding_is_never_trained(ranks: RankPool, tensor: int) -> None:
    for num_rows, padding in ranks.run(tensor, _padding_after_steps, Layout(tensor=tensor)):
        assert num_rows == padded_vocab_size(V, tensor) == {1: 384, 4: 512}[tensor]
        assert torch.equal(padding, torch.zeros_like(padding))


def _types(layout: Layout) -> tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]:
    mesh = make_mesh(layout, CPU)
    dtypes = {"dtype": torch.float32, "output_dtype": torch.bfloat16}
    tokens = VocabParallelEmbedding(V, H, mesh=mesh, **dtypes)
    positions = PositionEmbedding(P, H, mesh=mesh, **dtypes)
    y, z = tokens(torch.zeros(2, 4, dtype=torch.long)), positions(4)
    (y + z).float().sum().backward()
    return y.dtype, z.dtype, tokens.weight.grad.dtype, positions.weight.grad.dtype


def test_an_output_type_of_its_own_keeps_float32_gradients(ranks: RankPool) -> None:
    expected = (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
    assert ranks.run(2, _types, Layout(tensor=2)) == [expected] * 2


def _sent(layout: Layout) -> list[str]:
    mesh = make_mesh(layout, CPU)
    tokens, positions = make_tokens(mesh=mesh), PositionEmbedding(P, H, mesh=mesh)
    with CollectiveRecorder(mesh) as recorder:
        (tokens(torch.zeros(2, 4, dtype=torch.long)) + positions(4)).sum().backward()
    assert all(sent.elements == 2 * 4 * H for sent in recorder.sent)
    return [sent.operation for sent in recorder.sent]


def test_tokens_are_added_up_once_and_positions_send_nothing(ranks: RankPool) -> None:
    assert ranks.run(2, _sent, Layout(tensor=2)) == [["all_reduce"]] * 2
    split = ["reduce_scatter", "all_gather"]
    assert ranks.run(2, _sent, Layout(tensor=2, sequence_parallel=True)) == [split] * 2


def _look_up(token: int) -> None:
    mesh = make_mesh(Layout(tensor=2), CPU)
    make_tokens(mesh=mesh)(torch.tensor([[0, token]]))


@pytest.mark.parametrize("token", [-1, V, 10**6])
def test_an_id_outside_of_the_vocabulary_is_an_error_not_a_zero(ranks: RankPool, token: int) -> None:
    message = (
        "^Token ids must be from 0 to 299, the last id of the vocabulary, but an id is outside this range. Tokenize "
        "with "
        "this model's tokenizer.$"
    )
    with pytest.raises(RuntimeError, match=message):
        ranks.run(2, _look_up, token)


def _place(length: int) -> None:
    PositionEmbedding(P, H, mesh=make_mesh(Layout(), CPU))(length)


def test_a_sequence_longer_than_the_positions_is_refused(ranks: RankPool) -> None:
    message = (
        "^A sequence must have at most 10 tokens, one for each position of the model, but has 11. Shorten the "
        "sequence, or train with a larger `model.max_sequence_length`.$"
    )
    with pytest.raises(ConfigError, match=message):
        ranks.run(1, _place, P + 1)
