"""Scores of single tokens over a cut vocabulary against `F.cross_entropy` and `argmax` of the full logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config import IGNORED, ConfigError, Layout, LayoutError, padded_vocab_size
from crosscut.evaluation import vocab_parallel_scores
from crosscut.parallel import CollectiveRecorder, LossSettings, make_mesh
from tests.parallel.twins import CLOSE, CPU
from tests.ranks import RankPool

N, H, V = 13, 8, 300
SIZES = [1, 2, 4]  # with four ranks one holds real rows and padding, and one only padding


def _example() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the vocabulary's rows, and targets: some the likeliest, some on the parts' edges, some ignored."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(N, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    targets = (hidden @ weight.t()).argmax(1)
    targets[:4] = torch.tensor([0, 127, 128, V - 1])
    targets[5] = targets[12] = IGNORED
    return hidden, weight, targets


def _scores(
    tensor: int,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_tokens: int | None = None,
    padding: float = 0.0,
    soft_cap: float = 0.0,
) -> dict[str, Any]:
    """On a rank: what comes out and what was sent. `padding`: what the padded rows hold."""
    mesh = make_mesh(Layout(tensor=tensor), CPU)
    padded = torch.full((padded_vocab_size(V, tensor), weight.shape[1]), padding, dtype=weight.dtype)
    padded[:V] = weight
    own = padded.chunk(tensor)[mesh.tensor.rank]
    with CollectiveRecorder(mesh) as recorder:
        scores = vocab_parallel_scores(
            hidden,
            own,
            targets,
            vocab_size=V,
            axis=mesh.tensor,
            settings=LossSettings(soft_cap=soft_cap, chunk_tokens=chunk_tokens),
        )
    return {"losses": scores.losses, "hits": scores.hits, "sent": list(recorder.sent)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tensor", SIZES)
@pytest.mark.parametrize("chunk_tokens", [None, 1, 4])
def test_each_token_has_its_loss_and_its_hit(ranks: RankPool, tensor: int, chunk_tokens: int | None) -> None:
    hidden, weight, targets = _example()
    logits = hidden @ weight.t()
    losses = F.cross_entropy(logits, targets, reduction="none")
    hits = logits.argmax(1) == targets
    assert 0 < hits.sum() < N - 2
    for result in ranks.run(tensor, _scores, tensor, hidden, weight, targets, chunk_tokens):
        torch.testing.assert_close(result["losses"], losses, **CLOSE)
        assert torch.equal(result["hits"], hits)


@pytest.mark.parametrize("tensor", [1, 2])
def test_losses_are_those_of_capped_logits(ranks: RankPool, tensor: int) -> None:
    hidden, weight, targets = _example()
    losses = F.cross_entropy(3.0 * torch.tanh(hidden @ weight.t() / 3.0), targets, reduction="none")
    for result in ranks.run(tensor, _scores, tensor, hidden, weight, targets, 4, 1e6, 3.0):
        torch.testing.assert_close(result["losses"], losses, **CLOSE)


@pytest.mark.parametrize("tensor", SIZES)
def test_of_equally_likely_entries_the_first_wins(ranks: RankPool, tensor: int) -> None:
    """Numbers whose products are exact, so that equal ones are equal on every layout."""
    weight = torch.zeros(V, 2, dtype=torch.float64)
    weight[[100, 120, 200, 299], 0] = 4.0  # two in one part, two in others
    weight[:, 1] = 0.5  # every entry alike
    hidden = torch.tensor([[1.0, 0.0]] * 4 + [[0.0, 1.0]] * 2, dtype=torch.float64)
    targets = torch.tensor([100, 120, 200, 299, 0, 1])
    for result in ranks.run(tensor, _scores, tensor, hidden, weight, targets):
        assert result["hits"].tolist() == [True, False, False, False, True, False]


@pytest.mark.parametrize("tensor", SIZES)
def test_padding_takes_no_probability_and_wins_nothing(ranks: RankPool, tensor: int) -> None:
    hidden, weight, targets = _example()
    hidden = hidden.abs()  # so that padding would win
    logits = hidden @ weight.t()
    for result in ranks.run(tensor, _scores, tensor, hidden, weight, targets, None, 1e6):
        torch.testing.assert_close(result["losses"], F.cross_entropy(logits, targets, reduction="none"), **CLOSE)
        assert torch.equal(result["hits"], logits.argmax(1) == targets)


@pytest.mark.parametrize("tensor", [1, 2])
def test_bfloat16_hidden_states_are_scored_in_float32(ranks: RankPool, tensor: int) -> None:
    hidden, weight, targets = _example()
    rounded = (hidden.bfloat16() @ weight.bfloat16().t()).float()
    for result in ranks.run(tensor, _scores, tensor, hidden.bfloat16(), weight.float(), targets, 5):
        assert result["losses"].dtype == torch.float32
        torch.testing.assert_close(result["losses"], F.cross_entropy(rounded, targets, reduction="none"))
        assert torch.equal(result["hits"], rounded.argmax(1) == targets)


def test_large_logits_are_stable(ranks: RankPool) -> None:
    hidden, weight, targets = _example()
    losses = F.cross_entropy(1e4 * hidden @ weight.t(), targets, reduction="none")
    for result in ranks.run(2, _scores, 2, 1e4 * hidden, weight, targets):
        torch.testing.assert_close(result["losses"], losses, **CLOSE)


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_four_elements_per_token_are_sent_and_none_per_entry(ranks: RankPool, chunk_tokens: int | None) -> None:
    for result in ranks.run(2, _scores, 2, *_example(), chunk_tokens):
        assert {(sent.operation, sent.axis) for sent in result["sent"]} == {("all_reduce", "tensor")}
        assert [sent.elements for sent in result["sent"]] == (
            [13, 39] if chunk_tokens is None else [4, 12] * 3 + [1, 3]
        )


def test_no_targets_give_no_scores_and_send_nothing(ranks: RankPool) -> None:
    hidden, weight, targets = _example()
    for result in ranks.run(2, _scores, 2, hidden[:0], weight, targets[:0]):
        assert result["losses"].shape == result["hits"].shape == (0,)
        assert result["sent"] == []


def test_mistakes_are_told(ranks: RankPool) -> None:
    hidden, weight, targets = _example()
    with pytest.raises(ConfigError, match="`chunk_tokens` must be at least 1, but is 0"):
        ranks.run(1, _scores, 1, hidden, weight, targets, 0)
    with pytest.raises(LayoutError, match=r"`targets` must hold one target for each row of `hidden` \(12\)"):
        ranks.run(1, _scores, 1, hidden[1:], weight, targets)
    with pytest.raises(RuntimeError, match="Targets must be token ids from 0 to 299"):
        ranks.run(1, _scores, 1, hidden, weight, torch.full((N,), V))
