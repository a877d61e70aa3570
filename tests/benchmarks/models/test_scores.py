"""The comparison of scores runs, and tells where scores differ."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.models import scores
from crosscut.evaluation import Window
from tests.benchmarks.conftest import run_program

FIGURES = {
    "lambada": ["accuracy", "last_token_accuracy", "perplexity"],
    "wikitext103": ["perplexity", "perplexity_per_token", "bits_per_byte", "loss_per_token"],
}


@pytest.mark.slow
def test_two_layouts_and_transformers_score_alike(tmp_path):
    file = tmp_path / "scores.json"
    done = run_program("models/scores.py", "--tiny", "--json", file)
    told = json.loads(file.read_text())
    assert told["machine"]["transformers"]
    for task, names in FIGURES.items():
        found = told["tasks"][task]
        assert list(found) == ["tensor 1", "tensor 3", "transformers"]
        for figures in found.values():
            assert list(figures["figures"]) == names
            assert figures["counts"] == found["transformers"]["counts"]
            assert figures["figures"]["perplexity"] > 1e5
        for name in names:
            (row,) = [line for line in done.stdout.splitlines() if line.startswith(f"{task} {name} ")]
            assert row.endswith("same")


@pytest.mark.parametrize(
    ("values", "same"),
    [
        ([26.541, 26.5419, 26.5411], True),
        ([26.541, 26.5424, 26.5411], False),
        ([26.541, 26.5411, 26.5424], False),
        ([0.0, 0.0], True),
        ([0.0, 0.0002], False),
        ([None, 26.54], False),
        ([None, None], False),
    ],
)
def test_figures_are_the_same_to_four_digits(values: list[float | None], same: bool):
    assert scores.agree(values) is same


@pytest.mark.parametrize(("theirs", "status"), [(0.30061, 0), (0.3008, 1)])
def test_a_difference_is_told(monkeypatch, capsys, theirs, status):
    def found(accuracy: float) -> dict[str, object]:
        return {"figures": {"accuracy": accuracy}, "counts": {"passages": 5153}, "protocol": {"window": 64}}

    def made_up(*_: object) -> dict[str, object]:
        by_contender = {"tensor 1": found(0.3006), "tensor 3": found(0.3006), "transformers": found(theirs)}
        return {"model": "small", "precision": "float32", "tasks": {"lambada": by_contender}}

    monkeypatch.setattr(scores, "run", made_up)
    assert scores.main(["small", "--lambada", "passages.jsonl"]) == status
    printed = capsys.readouterr().out
    assert "lambada: 5,153 passages, window 64" in printed
    assert ("DIFFERENT" in printed) == (status == 1)


def test_windows_of_several_lengths_are_read_together():
    """Against each window alone, for a model whose logits depend on the token only."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7, 7, generator=generator)
    texts = [np.array([1, 2, 3, 4, 5, 6, 0, 1]), np.array([3, 3, 3, 1])]
    for text in texts:
        text[-1] = table[text[-2]].argmax()
    windows = [Window(0, 0, 8, 5), Window(1, 0, 4, 1), Window(0, 2, 8, 7)]

    def model(*, input_ids: torch.Tensor, use_cache: bool, logits_to_keep: int) -> SimpleNamespace:
        return SimpleNamespace(logits=table[input_ids][:, -logits_to_keep:])

    for window, (loss, hits, last) in zip(windows, scores.read_together(model, texts, windows), strict=True):
        ids = torch.from_numpy(texts[window.text])
        logits, targets = table[ids[window.first - 1 : -1]], ids[window.first :]
        assert loss == pytest.approx(float(F.cross_entropy(logits, targets, reduction="sum")))
        assert hits == int((logits.argmax(1) == targets).sum()) >= 1
        assert last == 1


def test_every_window_is_read_once_and_long_ones_first():
    windows = [Window(0, 0, length, 1) for length in (9, 1500, 700, 3000, 701, 10)]
    assert list(scores.in_groups(windows)) == [[3], [1], [4, 2], [5, 0]]


@pytest.mark.parametrize("arguments", [[], ["small"], ["--tiny", "--lambada", "x"], ["small", "--tiny"]])
def test_what_is_to_be_scored_must_be_said(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        scores.main(arguments)
    assert ended.value.code == 2
    assert "Give a model folder with --lambada or --wikitext, or give --tiny alone." in capsys.readouterr().err


def test_missing_file_is_told(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        scores.main([str(tmp_path), "--lambada", "missing.jsonl"])
    assert ended.value.code == 2
    assert str(tmp_path) in capsys.readouterr().err
