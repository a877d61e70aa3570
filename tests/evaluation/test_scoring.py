"""The same scores on every layout, and those of a plain computation."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from crosscut.config import GenerationError, Layout, ModelConfig
from crosscut.evaluation import Window, WindowScores, evaluate, score_windows, sliding_windows
from crosscut.evaluation.own_text.text import OwnText
from crosscut.evaluation.scoring import require_numbers, rounds_of
from tests.evaluation.conftest import Letters, make_model
from tests.ranks import RankPool
from tests.refusals import refusal

MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, vocab_size=300, max_sequence_length=16, dropout=0.5)
LAYOUTS = [
    Layout(tensor=2),
    Layout(tensor=4),
    Layout(data=2),
    Layout(data=3),
    Layout(tensor=2, data=2),
    Layout(tensor=2, sequence_parallel=True),
    Layout(tensor=4, sequence_parallel=True),
    Layout(data=2, sharding="zero3"),
    Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True),
]


def texts() -> tuple[list[np.ndarray], list[Window]]:
    """Uneven ones, whose windows make batches with an odd end on two and three data ranks."""
    generator = np.random.default_rng(0)
    ids = [generator.integers(0, MODEL.vocab_size, length) for length in (40, 2, 23, 5, 17)]
    windows = [w for i, text in enumerate(ids) for w in sliding_windows(i, len(text), window=11, overlap=4)]
    return ids, windows


def scored(layout: Layout, batch_size: int) -> tuple[WindowScores, bool]:
    model = make_model(MODEL, layout)
    shares = [p.to_local().shape for p in model.parameters()]
    scores = score_windows(model, *texts(), batch_size=batch_size)
    assert [p.to_local().shape for p in model.parameters()] == shares, "what was gathered must be given back"
    return scores, model.training


def by_logits() -> WindowScores:
    """Each window on its own, each target from whole logits after the tokens before it."""
    model = make_model(MODEL, Layout()).eval()
    ids, windows = texts()
    losses, hits, last = [], [], []
    with torch.no_grad():
        for window in windows:
            text = torch.from_numpy(ids[window.text])
            loss, right = 0.0, []
            for t in range(window.first, window.stop):
                logits = model.logits(text[window.start : t].unsqueeze(0))[0]
                loss += F.cross_entropy(logits, text[t]).item()
                right.append(int(logits.argmax() == text[t]))
            losses.append(loss)
            hits.append(sum(right))
            last.append(right[-1])
    return WindowScores(np.array(losses), np.array(hits), np.array(last))


@pytest.fixture(scope="module")
def plain(ranks: RankPool) -> WindowScores:
    expected = ranks.run(1, by_logits)[0]
    assert expected.losses.sum() > 0
    return expected


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_scores_are_those_of_each_token_after_those_before_it(
    ranks: RankPool, plain: WindowScores, batch_size: int
) -> None:
    scores, was_training = ranks.run(1, scored, Layout(), batch_size)[0]
    np.testing.assert_allclose(scores.losses, plain.losses, rtol=1e-12)
    assert scores.hits.tolist() == plain.hits.tolist()
    assert scores.last_hits.tolist() == plain.last_hits.tolist()
    assert was_training, "the model must be left as it was"


@pytest.mark.one_in(8)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_the_same_scores(ranks: RankPool, plain: WindowScores, layout: Layout) -> None:
    for scores, _ in ranks.run(layout.world_size, scored, layout, 3):
        np.testing.assert_allclose(scores.losses, plain.losses, rtol=1e-12)
        assert scores.hits.tolist() == plain.hits.tolist()
        assert scores.last_hits.tolist() == plain.last_hits.tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_every_window_is_read_once_by_one_rank(size: int, batch_size: int) -> None:
    lengths = (2, 8, 4, 1, 6, 6, 3)
    rounds = [rounds_of(lengths, batch_size, rank=rank, size=size) for rank in range(size)]
    assert sorted(i for own in rounds for group in own for i in group) == list(range(7))
    assert len({len(own) for own in rounds}) == 1, "as many rounds on every rank"
    assert rounds[0][0][0] == 1, "the longest first"
    assert all(len(group) <= batch_size for own in rounds for group in own)


def evaluated(layout: Layout, file: str) -> tuple[dict, list[int]]:
    task = OwnText([file], Letters(), start=0, window=8, overlap=8, text_key="text")
    seen: list[int] = []

    def around(rounds):
        for group in rounds:
            seen.append(len(group))
            yield group

    (result,) = evaluate(make_model(MODEL, layout), [task], batch_size=2, around=around)
    return result.to_json(), seen


def test_an_evaluation_tells_what_it_found_and_how(ranks: RankPool, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("It was the best of times, it was the worst of times.")
    (one, seen), (other, seen_by_other) = ranks.run(2, evaluated, Layout(data=2), str(file))
    assert one["figures"] == other["figures"]
    assert one["figures"]["perplexity"] == pytest.approx(math.exp(one["figures"]["loss_per_token"]))
    assert one["figures"]["perplexity"] == pytest.approx(300, rel=0.3), "an untrained model knows nothing"
    assert one["counts"] == {"documents": 1, "tokens": 52, "bytes": 52, "windows": 7, "documents_blank": 0}
    assert one["protocol"] == {"window": 8, "stride": 8, "first_id": 0}
    assert one["documents"][0]["perplexity"] == one["figures"]["perplexity"]
    assert one["tokens_per_second"] > 0
    assert (seen, seen_by_other) == ([2, 2], [2, 1])


def broken(file: str) -> dict:
    model = make_model(MODEL, Layout())
    with torch.no_grad():
        model.final_norm.weight.to_local()[:] = math.nan
    task = OwnText([file], Letters(), start=0, window=8, overlap=8, text_key="text")
    return evaluate(model, [task], batch_size=2)[0].to_json()


def test_a_model_that_gives_no_numbers_has_no_figures_in_json(ranks: RankPool, tmp_path: Path) -> None:
    """An evaluation of a run in training: the next step of the run then says what is not finite."""
    file = tmp_path / "text.txt"
    file.write_text("It was the best of times.")
    assert set(ranks.run(1, broken, str(file))[0]["figures"].values()) == {None}


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.inf, math.nan]], ids=str)
def test_figures_that_are_nan_are_an_error_but_infinite_ones_are_not(values: list[float]) -> None:
    require_numbers("lambada", [1.0, math.inf])
    assert refusal(GenerationError, require_numbers, "lambada", values).startswith(
        "The losses of `lambada` must be numbers, but some are NaN, because the model's logits are not finite. "
    )
