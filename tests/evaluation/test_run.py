"""A whole evaluation of a published model, beside transformers' own computation of the same protocol."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from crosscut.config import ConfigError, DataError, EvaluationConfig, Layout, LayoutError
from crosscut.data import Tokenizer
from crosscut.evaluation.ranks import Machinery
from crosscut.evaluation.run import evaluate_place
from tests.pretrained.models import make, their_model

PASSAGES = ["the quick brown fox jumps over the lazy dog", "over the lazy dog the quick fox", "a dog jumps over a dog"]
WORDS = " \n = Foxes = \n \n the quick @-@ brown fox , it jumps over the lazy dog . " * 5 + "\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated") / "tiny-llama"
    make(folder, "llama tied")
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> EvaluationConfig:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "wiki.test.tokens").write_text(WORDS)
    (folder / "lambada.jsonl").write_text("".join(json.dumps({"text": passage}) + "\n" for passage in PASSAGES))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (WORDS, *PASSAGES)))
    return EvaluationConfig(
        wikitext103=str(folder / "wiki.test.tokens"),
        lambada=str(folder / "lambada.jsonl"),
        text=(str(folder / "text.jsonl"),),
        window=24,
        overlap=5,
        batch_size=3,
    )


class Theirs:
    """The protocols written down a second time: one target at a time, from `transformers`' logits."""

    def __init__(self, folder: Path) -> None:
        self.model = their_model(folder, torch.float32).eval()
        self.tokenizer = Tokenizer.load(folder / "tokenizer.json")

    @torch.no_grad()
    def sliding(self, text: str, window: int, overlap: int) -> tuple[float, int]:
        """Sum of losses and number of tokens."""
        ids = torch.tensor([0, *self.tokenizer.encode(text)])
        total = 0.0
        for first, last in self._pieces(len(ids), window, overlap):
            start = max(0, last - window)
            losses = F.cross_entropy(
                self.model(ids[start:last][None]).logits[0], ids[start + 1 : last + 1], reduction="none"
            )
            total += float(losses[first - start - 1 :].sum())
        return total, len(ids) - 1

    @staticmethod
    def _pieces(length: int, window: int, overlap: int) -> Iterator[tuple[int, int]]:
        """First and last target of each window."""
        done = 0
        while done < length - 1:
            last = min(length - 1, done + (overlap if done else window))
            yield done + 1, last
            done = last

    @torch.no_grad()
    def last_words(self) -> Iterator[tuple[bool, bool, float]]:
        """Whether all tokens are right, whether the last one is, and the loss."""
        for passage in PASSAGES:
            num = len(self.tokenizer.encode(passage.rpartition(" ")[0]))
            ids = torch.tensor(self.tokenizer.encode(passage))
            logits = self.model(ids[None]).logits[0, num - 1 : -1]
            right = logits.argmax(1) == ids[num:]
            yield bool(right.all()), bool(right[-1]), float(F.cross_entropy(logits, ids[num:], reduction="sum"))


def test_figures_are_those_of_transformers(model: Path, files: EvaluationConfig, tmp_path: Path) -> None:
    from crosscut.evaluation.detokenizers import by_the_paper

    output = tmp_path / "scores.json"
    report = evaluate_place(str(model), files, Machinery(device="cpu"), output=output, shown=False)
    assert json.loads(output.read_text()) == report
    theirs = Theirs(model)

    wiki = report["tasks"]["wikitext103"]
    loss, num_tokens = theirs.sliding(by_the_paper(WORDS), 24, 5)
    num_words = len(WORDS.strip().split(" "))
    assert wiki["counts"]["words"] == num_words
    assert wiki["counts"]["tokens"] == num_tokens
    assert wiki["figures"]["perplexity"] == pytest.approx(math.exp(loss / num_words), rel=1e-4)
    assert wiki["figures"]["perplexity_per_token"] == pytest.approx(math.exp(loss / num_tokens), rel=1e-4)

    lambada, expected = report["tasks"]["lambada"]["figures"], list(theirs.last_words())
    assert lambada["accuracy"] == sum(all_right for all_right, _, _ in expected) / 3
    assert lambada["last_token_accuracy"] == sum(last for _, last, _ in expected) / 3
    assert lambada["perplexity"] == pytest.approx(math.exp(sum(loss for _, _, loss in expected) / 3), rel=1e-4)

    text = report["tasks"]["text"]
    each = [theirs.sliding(document, 24, 5) for document in (WORDS, *PASSAGES)]
    for document, (loss, num_tokens) in zip(text["documents"], each, strict=True):
        assert document["perplexity"] == pytest.approx(math.exp(loss / num_tokens), rel=1e-4)
    loss, num_tokens = (sum(values) for values in zip(*each, strict=True))
    assert text["figures"]["perplexity"] == pytest.approx(math.exp(loss / num_tokens), rel=1e-4)

    assert report["model"]["name"] == "tiny-llama"
    assert report["model"]["parameters"] > 0
    assert wiki["protocol"] == {"window": 24, "overlap": 5, "detokenizer": "paper"}
    assert [set(task["data"][0]) for task in report["tasks"].values()] == [{"file", "sha256"}] * 3


def test_mistakes_are_told_before_a_rank_starts(
    model: Path, files: EvaluationConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_launch(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a process was about to start")

    monkeypatch.setattr("crosscut.evaluation.ranks.launch", no_launch)

    def told(error: type[Exception], place: Path = model, on: Machinery | None = None, **config: object) -> str:
        output = config.pop("output", None)
        with pytest.raises(error) as raised:
            evaluate_place(str(place), EvaluationConfig(**config), on or Machinery(device="cpu"), output=output)
        return str(raised.value)

    assert told(ConfigError, tmp_path, lambada=files.lambada).startswith(f"`{tmp_path}` must be ")
    assert told(DataError, lambada="nowhere.jsonl").startswith("`evaluation.lambada` must be a readable file, but")
    assert told(ConfigError, text=files.text, window=999).startswith(
        "`evaluation.window` must be at most the 64 tokens"
    )
    three = Machinery(layout=Layout(tensor=3), device="cpu")
    assert told(LayoutError, on=three, text=files.text).startswith("`layout.tensor` must")
    missing = tmp_path / "none" / "scores.json"
    assert told(ConfigError, text=files.text, output=missing).startswith(
        "`--output` must be a file in a folder that is"
    )
