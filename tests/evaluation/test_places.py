"""A whole evaluation of a published model, beside transformers' own computation of the same protocol."""

import json
import math
from pathlib import Path

import pytest

from crosscut.config import ConfigError, DataError, EvaluationConfig, Layout, LayoutError
from crosscut.evaluation.places import evaluate_place
from crosscut.evaluation.ranks import Machinery
from tests.evaluation.theirs import Theirs
from tests.pretrained.models import make

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
    bits = loss / math.log(2) / len(by_the_paper(WORDS).encode())
    assert wiki["figures"]["bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    assert wiki["figures"]["perplexity_per_token"] == pytest.approx(math.exp(loss / num_tokens), rel=1e-4)

    lambada, expected = report["tasks"]["lambada"]["figures"], list(theirs.last_words(PASSAGES))
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
    assert wiki["protocol"] == {"window": 24, "stride": 5, "detokenizer": "paper", "first_id": 0}
    assert [set(task["data"][0]) for task in report["tasks"].values()] == [{"file", "sha256"}] * 3


def test_mistakes_are_told_before_a_rank_starts(
    model: Path, files: EvaluationConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_launch(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a process was about to start")

    monkeypatch.setattr("crosscut.launch.door.launch", no_launch)

    def told(error: type[Exception], place: Path = model, on: Machinery | None = None, **config: object) -> str:
        output = config.pop("output", None)
        with pytest.raises(error) as raised:
            evaluate_place(str(place), EvaluationConfig(**config), on or Machinery(device="cpu"), output=output)
        return str(raised.value)

    assert told(ConfigError, tmp_path, lambada=files.lambada).startswith(f"`{tmp_path}` must be ")
    assert told(DataError, lambada="nowhere.jsonl").startswith("`evaluation.lambada` must be a readable file, but")
    assert told(ConfigError, text=files.text, window=999).startswith(
        "`evaluation.window` must be at most the model's maximum of 64 tokens"
    )
    three = Machinery(layout=Layout(tensor=3), device="cpu")
    assert told(LayoutError, on=three, text=files.text).startswith("`layout.tensor` must")
    missing = tmp_path / "none" / "scores.json"
    assert told(ConfigError, text=files.text, output=missing).startswith(
        f"`--output` must name a file that can be written, but is `{missing}`: No such file or directory. Create its"
    )
