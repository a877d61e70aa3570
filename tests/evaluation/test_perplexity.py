import math

import pytest
import torch
import torch.nn.functional as F

from crosscut.config import Layout, ModelConfig
from crosscut.evaluation import Score, evaluate_loss
from crosscut.model import Batch
from tests.evaluation.conftest import make_model

MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, vocab_size=100, max_sequence_length=8, dropout=0.5)


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 100, (6, 9), generator=generator)
    targets = text[:, 1:].clone()
    targets[-1, 3:] = -100
    return Batch(tokens=text[:, :-1], targets=targets).chunk(3)


def score(layout: Layout) -> tuple[float, int, bool]:
    model = make_model(MODEL, layout)
    data = model.mesh.data
    mine = [batch.chunk(data.size)[data.rank] for batch in batches()]
    shares = [p.to_local().shape for p in model.parameters()]
    result = evaluate_loss(model, mine)
    assert [p.to_local().shape for p in model.parameters()] == shares, "what was gathered must be given back"
    return result.loss, result.num_tokens, model.training


def score_by_logits() -> float:
    """The same from whole logits, each position on its own."""
    model = make_model(MODEL, Layout()).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for tokens, targets in ((batch.tokens, batch.targets) for batch in batches()):
            for end in range(1, tokens.shape[1] + 1):
                logits = model.logits(tokens[:, :end])
                total += F.cross_entropy(logits, targets[:, end - 1], reduction="sum").item()
                count += int((targets[:, end - 1] != -100).sum())
    return total / count


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tensor=2),
        Layout(data=2),
        Layout(tensor=2, data=2),
        Layout(tensor=2, sequence_parallel=True),
        Layout(data=2, sharding="zero2"),
    ],
    ids=str,
)
def test_score_is_the_mean_cross_entropy_on_every_layout(ranks, layout):
    expected = ranks.run(1, score_by_logits)[0]
    for loss, num_tokens, was_training in ranks.run(layout.world_size, score, layout):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert num_tokens == 6 * 8 - 5
        assert was_training, "the model must be left in training mode"


def test_bits_per_byte_are_the_total_loss_in_bits_over_the_bytes():
    """Four tokens of probability 1/2 each are four bits."""
    score = Score(loss=math.log(2), num_tokens=4, num_bytes=10)
    assert score.bits_per_byte == pytest.approx(0.4)
    assert Score(loss=math.log(2), num_tokens=4).bits_per_byte is None, "nobody has counted the bytes"


def test_perplexity_is_the_exponential_of_the_loss():
    assert Score(loss=2.0, num_tokens=1).perplexity == pytest.approx(math.exp(2))
    assert Score(loss=1e4, num_tokens=1).perplexity == math.inf
