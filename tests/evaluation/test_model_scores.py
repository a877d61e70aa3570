"""`score_tokens`: loss and hit of single targets, at every layout."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config import IGNORED, Layout, ModelConfig
from crosscut.config.published.folders import reason_against_export
from crosscut.evaluation import score_tokens
from crosscut.model import Batch
from tests.model.twins import CONFIG, randomised
from tests.ranks import RankPool

LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(tensor=4),
    Layout(tensor=2, sequence_parallel=True),
    Layout(tensor=4, sequence_parallel=True),
]


OF_NO_FAMILY = replace(
    CONFIG, num_kv_heads=2, norm="rms", layers=("attention geglu",), mlp_size=88, biases="qkv", tied=False,
    embedding_norm=True,
    logit_softcap=0.5,
)  # fmt: skip
"""A model that only Crosscut can load."""


def example(length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, CONFIG.vocab_size, (3, length), generator=generator)
    targets = torch.randint(0, CONFIG.vocab_size, (3, length), generator=generator)
    return tokens, targets.masked_fill(torch.rand(3, length, generator=generator) < 0.4, IGNORED)


def scores(layout: Layout, length: int, hit: bool, config: ModelConfig = CONFIG) -> dict[str, Any]:
    """With `hit`, every second target is what the model finds likeliest."""
    model = randomised(layout, config=config).eval()
    tokens, targets = example(length)
    with torch.no_grad():
        logits = torch.stack([model.logits(tokens[:, : i + 1]) for i in range(length)], 1)
    if hit:
        targets[:, ::2] = logits.argmax(2)[:, ::2]
    losses, hits = score_tokens(model, Batch(tokens=tokens, targets=targets))
    return {"logits": logits, "targets": targets, "losses": losses, "hits": hits}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("length", [16, 7])  # the tensor axis does not divide 7
def test_each_target_is_scored_from_its_own_logits(ranks: RankPool, layout: Layout, length: int) -> None:
    for result in ranks.run(layout.world_size, scores, layout, length, True):
        assert_from_own_logits(result)


def assert_from_own_logits(result: dict[str, Any]) -> None:
    logits, targets = result["logits"], result["targets"]
    losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    torch.testing.assert_close(result["losses"], losses, rtol=1e-11, atol=1e-11)
    assert torch.equal(result["hits"], logits.argmax(2) == targets)
    assert result["hits"].any()
    assert not result["hits"].all()


def test_a_model_of_no_published_family_is_scored_like_any_other(ranks: RankPool) -> None:
    assert reason_against_export(OF_NO_FAMILY)
    layout = Layout(tensor=2, sequence_parallel=True)
    for result in ranks.run(2, scores, layout, 16, True, OF_NO_FAMILY):
        assert_from_own_logits(result)
        assert result["logits"].abs().max() <= 0.5


def nothing(layout: Layout) -> tuple[Tensor, Tensor]:
    tokens, targets = example(5)
    return tuple(score_tokens(randomised(layout), Batch(tokens=tokens, targets=torch.full_like(targets, IGNORED))))


def test_nothing_is_scored_where_all_targets_are_ignored(ranks: RankPool) -> None:
    for losses, hits in ranks.run(2, nothing, Layout(tensor=2, sequence_parallel=True)):
        assert torch.equal(losses, torch.zeros(3, 5, dtype=torch.float64))
        assert not hits.any()
