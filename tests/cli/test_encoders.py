"""Commands that need a model of the next token, given an encoder."""

import json

import pytest

from tests.pretrained.encoders import make_encoder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """The folder of a tiny BERT."""
    folder = tmp_path_factory.mktemp("bert") / "bert"
    make_encoder(folder, "bert")
    return folder


@pytest.mark.parametrize("command", [("generate", "--prompt", "the"), ("evaluate", "--text", "text.txt")])
def test_commands_that_need_the_next_token_refuse_an_encoder(crosscut_here, bert, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox")
    result = crosscut_here(command[0], str(bert), *command[1:])
    assert result.returncode == 2
    assert result.stderr == (
        f"crosscut: `{bert}` must hold a model that predicts the next token, but holds an encoder (`model.attention` "
        'is "bidirectional"). Choose a model with causal attention, such as a GPT-2 or a Llama. '
        "`crosscut embed` computes embeddings with an encoder.\n"
    )


def test_chat_is_not_trained_into_an_encoder(crosscut_here, bert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "fox"}]}\n'
    )
    result = crosscut_here("finetune", "chat", "chats.jsonl", "--model", str(bert), "training.sequence_length=16")
    assert result.returncode == 2
    assert '`model.attention` must be "causal" for training on the next token' in result.stderr


def test_embeddings_are_lines_of_json(crosscut_here, bert, tmp_path):
    (tmp_path / "texts.txt").write_text("the quick brown fox\ndog\n")
    of_file = crosscut_here("embed", str(bert), str(tmp_path / "texts.txt"), "--tensor", "2", "--device", "cpu")
    assert of_file.returncode == 0, of_file.stderr
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
    result = crosscut_here("embed", str(bert), *options, "--text", "fox", "--device", "cpu")
    assert result.returncode == 2
    assert message in result.stderr
