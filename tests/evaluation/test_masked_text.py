"""The loss of masked tokens in a text, beside `transformers` on the same masks."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from crosscut.architecture import Ability
from crosscut.config import IGNORED, ConfigError, DataError, EvaluationConfig, Layout
from crosscut.config.system.terminal import new_console
from crosscut.data import Tokenizer
from crosscut.evaluation import make_tasks
from crosscut.evaluation.own_text.masked_text import MaskedText
from crosscut.evaluation.places import evaluate_place
from crosscut.evaluation.ranks import Machinery
from crosscut.evaluation.score_table import print_report
from tests.pretrained.encoders import V, make_encoder
from tests.refusals import refusal

pytestmark = pytest.mark.usefixtures("forked_ranks")

DOCUMENTS = ["the quick brown fox jumps over the lazy dog " * 9, "fox", "  ", "over the lazy dog the quick fox"]


@pytest.fixture(scope="module", params=["bert for masked tokens", "bert with heads"])
def model(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("evaluated") / "tiny-bert", request.param, wordpiece=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("texts") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return str(path)


def made(model: Path, text: str, **settings: int) -> MaskedText:
    tokenizer = Tokenizer.load(model / "tokenizer.json")
    return MaskedText((text,), tokenizer, **{"window": 16, "seed": 0, "text_key": "text", **settings})


@torch.no_grad()
def their_loss(folder: Path, task: MaskedText) -> tuple[float, int, int]:
    """Sum of the losses, number of masked tokens, and number of those that are the likeliest, one window at a time."""
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float64).eval()
    loss, count, hits = 0.0, 0, 0
    for tokens, targets in zip(task.texts.read, task.texts.targets, strict=True):
        logits, wanted = model(torch.tensor(tokens[None])).logits[0], torch.tensor(targets)
        loss += float(F.cross_entropy(logits, wanted, reduction="sum", ignore_index=IGNORED))
        count += int((wanted != IGNORED).sum())
        hits += int((logits.argmax(1) == wanted).sum())
    return loss, count, hits


@pytest.mark.one_in(5)  # each model on a layout of its own
@pytest.mark.parametrize("layout", [Layout(tensor=2, data=2), Layout(data=2), Layout(tensor=2), Layout()], ids=str)
def test_figures_are_those_of_transformers(model, text, layout):
    on = Machinery(layout=layout, device="cpu", precision="float64")
    config = EvaluationConfig(text=(text,), batch_size=3)
    found = evaluate_place(str(model), config, on, shown=False)["tasks"]["masked_text"]
    loss, count, hits = their_loss(model, made(model, text))
    assert count >= 10
    assert found["figures"] == pytest.approx(
        {"loss": loss / count, "perplexity": math.exp(loss / count), "accuracy": hits / count}, rel=1e-9
    )
    assert (found["counts"]["masked_tokens"], found["counts"]["documents_blank"]) == (count, 1)
    assert found["protocol"] == {"window": 16, "mask_fraction": 0.15, "mask_words": 3, "seed": 0}
    assert sum(one["loss"] * one["masked_tokens"] for one in found["documents"]) == pytest.approx(loss, rel=1e-9)


def test_windows_hold_every_token_once_between_the_special_tokens(model, text):
    task, tokenizer = made(model, text, window=9), Tokenizer.load(model / "tokenizer.json")
    special = tokenizer.special_tokens()
    original = [
        np.where(targets == IGNORED, read, targets)
        for read, targets in zip(task.texts.read, task.texts.targets, strict=True)
    ]
    assert {(row[0], row[-1], len(row) <= 9) for row in original} == {(special.begin, special.separator, True)}
    whole = [tokenizer.encode(document) for document in DOCUMENTS if not document.isspace()]
    assert np.concatenate([row[1:-1] for row in original]).tolist() == [one for ids in whole for one in ids]
    assert all(targets[[0, -1]].tolist() == [IGNORED, IGNORED] for targets in task.texts.targets)


def test_masks_follow_from_the_seed_alone(model, text):
    one, again, other = made(model, text), made(model, text), made(model, text, seed=1)
    for first, second in zip(one.texts.targets, again.texts.targets, strict=True):
        np.testing.assert_array_equal(first, second)
    assert any(
        len(first) != len(second) or (first != second).any()
        for first, second in zip(one.texts.targets, other.texts.targets, strict=False)
    )


def test_report_is_a_table_of_masked_tokens(model, text, capsys):
    report = evaluate_place(str(model), EvaluationConfig(text=(text,)), Machinery(device="cpu"), shown=False)
    print_report(report, new_console())
    told = " ".join(capsys.readouterr().out.split())
    assert "text with masked words: " in told
    assert "1 blank document left out" in told
    assert "seed of the masks 0" in told
    assert "document tokens masked tokens perplexity accuracy" in told


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"wikitext103": "w.txt"},
            "`evaluation.wikitext103` must be empty for a model that predicts masked tokens, but is",
        ),
        (
            {"lambada": "l.txt"},
            "`evaluation.lambada` must be empty for a model that predicts masked tokens, but is `l.txt`",
        ),
        ({"overlap": 4}, "`evaluation.overlap` must be 0 for a model that predicts masked tokens, but is 4. "),
        ({"window": 2}, "`evaluation.window` must be at least 3 for a model that predicts masked tokens, but is 2. "),
    ],
)
def test_settings_of_the_next_token_are_refused(model, text, settings, message):
    config = EvaluationConfig(text=(text,), **settings)
    tokenizer = Tokenizer.load(model / "tokenizer.json")
    sizes = {"longest": 16, "vocab_size": V, "abilities": {Ability.FILL}}
    assert refusal(ConfigError, make_tasks, config, tokenizer, **sizes).startswith(message)


def test_texts_and_tokenizers_without_words_to_mask_are_refused(model, tmp_path):
    (tmp_path / "blank.txt").write_text("\x01\x02")  # characters that the tokenizer drops
    with pytest.raises(DataError, match=r"`evaluation\.text` must hold words to mask, but holds none\."):
        made(model, str(tmp_path / "blank.txt"))
    Tokenizer.train(["the fox " * 50], vocab_size=260).save(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="must have a token that begins a sequence"):
        made(tmp_path, str(tmp_path / "blank.txt"))
