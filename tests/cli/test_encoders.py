"""Commands with an encoder, and commands that need a model of the next token and refuse one."""

import json
import re

import pytest

from crosscut.config.data import Objective
from crosscut.data import Tokenizer
from tests.pretrained.encoders import V, make_encoder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """The folder of a tiny BERT."""
    folder = tmp_path_factory.mktemp("bert") / "bert"
    make_encoder(folder, "bert", wordpiece=True)
    return folder


@pytest.mark.parametrize("command", [("generate", "--prompt", "the"), ("evaluate", "--text", "text.txt")])
def test_commands_that_need_the_next_token_refuse_an_encoder(crosscut_here, bert, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox")
    result = crosscut_here(command[0], str(bert), *command[1:], status=2)
    assert result.stderr == (
        f"crosscut: `{bert}` must hold a model that predicts the next token, but holds an encoder (`model.attention` "
        'is "bidirectional"). Choose a model with causal attention, such as a GPT-2 or a Llama. '
        "`crosscut embed` computes embeddings with an encoder, and `crosscut generate` fills in masked words with "
        "an encoder that has a head for masked tokens, such as a BertForMaskedLM.\n"
    )


def test_chat_is_not_trained_into_an_encoder(crosscut_here, bert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "fox"}]}\n'
    )
    result = crosscut_here(
        "finetune", "chat", "chats.jsonl", "--model", str(bert), "training.sequence_length=16", status=2
    )
    assert '`model.attention` must be "causal" for training on the next token' in result.stderr


def test_embeddings_are_lines_of_json(crosscut_here, bert, tmp_path):
    (tmp_path / "texts.txt").write_text("the quick brown fox\ndog\n")
    of_file = crosscut_here(
        "embed", str(bert), str(tmp_path / "texts.txt"), "--tensor", "2", "--device", "cpu", status=0
    )
    vectors = [json.loads(line) for line in of_file.stdout.splitlines()]
    assert [len(vector) for vector in vectors] == [32, 32]
    assert [sum(x * x for x in vector) for vector in vectors] == pytest.approx([1.0, 1.0])
    given = crosscut_here("embed", str(bert), "--text", "the quick brown fox", "--text", "dog", "--device", "cpu")
    for one, other in zip(given.stdout.splitlines(), vectors, strict=True):
        assert json.loads(one) == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch-size", "0"), "crosscut: `--batch-size` must be at least 1, but is 0."),
        (("--max-tokens", "17"), "crosscut: `--max-tokens` must be at most 16, but is 17."),
        (("--tensor", "3"), "crosscut: `--tensor` must divide `model.num_heads` (4), but is 3. Try 1, 2 or 4."),
        (("texts.txt",), "Error: Give either FILE or --text, not both."),
    ],
)
def test_mistakes_with_embeddings_are_told(crosscut_here, bert, options, message):
    assert message in crosscut_here("embed", str(bert), *options, "--text", "fox", "--device", "cpu", status=2).stderr


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """The folder of a tiny BERT with its head for masked tokens and a WordPiece."""
    folder = tmp_path_factory.mktemp("masked") / "bert"
    make_encoder(folder, "bert for masked tokens")
    Tokenizer.train(["the quick brown fox " * 50], vocab_size=V, objective=Objective.MASKED).save(
        folder / "tokenizer.json"
    )
    return folder


def test_masked_loss_is_a_score(crosscut_here, masked, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox " * 30)
    scores = []
    for layout in (("--tensor", "1"), ("--tensor", "2", "--data", "2"), ("--mask-seed", "1")):
        result = crosscut_here(
            "evaluate", str(masked), "--text", str(tmp_path / "text.txt"), "--json", *layout, status=0
        )
        scores.append(json.loads(result.stdout)["tasks"]["masked_text"]["figures"])
    one, cut, other = scores
    assert cut == pytest.approx(one, rel=1e-5)
    assert other["loss"] != pytest.approx(one["loss"], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--task", "lambada=l.txt"), "`--task lambada` must be empty for a model that predicts masked tokens, but is"),
        (
            ("--text", "t.txt", "--stride", "4"),
            "`--stride` must be 0 for a model that predicts masked tokens, but is 4.",
        ),
        pytest.param(
            ("--harness", "arc_easy"),
            "must hold a model that predicts the next token, but holds an encoder",
            marks=[pytest.mark.slow, pytest.mark.extras],
        ),
    ],
)
def test_scores_of_the_next_token_are_refused(crosscut_here, masked, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("the quick brown fox")
    if options[0] == "--harness":
        pytest.importorskip("lm_eval")
    assert message in crosscut_here("evaluate", str(masked), *options, "--device", "cpu", status=2).stderr


def test_masked_words_are_filled_in(crosscut_here, masked):
    prompts = ("--prompt", "the [MASK] brown [MASK]", "--device", "cpu")
    printed = crosscut_here("generate", str(masked), *prompts, "--top-k", "2", status=0)
    assert re.fullmatch(
        r"the \[MASK\] brown \[MASK\]\nmask 1\n( +[\d.]+%  \S*\n){2}mask 2\n( +[\d.]+%  \S*\n){2}", printed.stdout
    )
    lines = [
        json.loads(crosscut_here("generate", str(masked), *prompts, "--json", "--tensor", tensor).stdout)
        for tensor in ("1", "2")
    ]
    one, other = lines
    assert (one.keys(), one["text"], one["tokens"]) == (other.keys(), other["text"], other["tokens"])
    assert [len(words) for words in one["masks"]] == [5, 5]
    for words, others in zip(one["masks"], other["masks"], strict=True):
        assert [word["probability"] for word in words] == pytest.approx([word["probability"] for word in others])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompt", "the fox"), "The prompt 'the fox' must have the mask token `[MASK]` in place of each word"),
        (
            ("--prompt", "[MASK]", "--seed", "0", "--stop", "fox", "--samples", "2"),
            "), but these are given: `--samples`, `--stop`, `--seed`. Remove these options.",
        ),
        (("--prompt", "[MASK]", "--top-k", "0"), "`--top-k` must be at least 1, but is 0."),
        (("--prompt", "[MASK]", "--tensor", "3"), "`--tensor` must divide `model.num_heads` (4), but is 3."),
    ],
)
def test_mistakes_with_masked_words_are_told(crosscut_here, masked, options, message):
    assert message in crosscut_here("generate", str(masked), *options, "--device", "cpu", status=2).stderr
