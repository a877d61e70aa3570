"""Commands that need a model of the next token, given an encoder."""

import pytest

from tests.pretrained.encoders import make_encoder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """The folder of a tiny BERT."""
    folder = tmp_path_factory.mktemp("bert") / "bert"
    make_encoder(folder, "bert")
    return folder


@pytest.mark.parametrize(
    "command", [("generate", "--prompt", "the"), ("serve", "--port", "0"), ("evaluate", "--text", "text.txt")]
)
def test_commands_that_need_the_next_token_refuse_an_encoder(crosscut_here, bert, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox")
    result = crosscut_here(command[0], str(bert), *command[1:])
    assert result.returncode == 2
    assert result.stderr == (
        f"crosscut: `{bert}` must hold a model that predicts the next token, but holds an encoder (`model.attention` "
        'is "bidirectional"). Choose a model with causal attention, such as a GPT-2 or a Llama.\n'
    )


def test_chat_is_not_trained_into_an_encoder(crosscut_here, bert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "fox"}]}\n'
    )
    result = crosscut_here("finetune", "chat", "chats.jsonl", "--model", str(bert), "training.sequence_length=16")
    assert result.returncode == 2
    assert '`model.attention` must be "causal" for training on the next token' in result.stderr
