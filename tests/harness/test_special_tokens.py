import json

import pytest
import tokenizers

from crosscut.config import ConfigError
from crosscut.data import Tokenizer
from crosscut.harness.special_tokens import named_ids

IDS = {"<|endoftext|>": 0, "<s>": 1, "</s>": 2}


@pytest.fixture
def named(tmp_path):
    """The ids that files name, by their content."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({**IDS, "a": 3, "b": 4}, unk_token="a"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(list(IDS))

    def ids(**files):
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return named_ids(tmp_path / "tokenizer.json", Tokenizer(inner))

    return ids


def test_tokens_are_named_as_texts_or_as_objects(named):
    assert named(tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}}) == {
        "bos_token": 1,
        "eos_token": 2,
    }


def test_a_token_that_is_said_not_to_be_is_told_from_one_that_is_not_spoken_of(named):
    assert named() == {}
    assert named(tokenizer_config={"bos_token": None}) == {"bos_token": None}


def test_a_name_of_no_token_stands_for_none(named):
    assert named(tokenizer_config={"bos_token": "a b"}) == {"bos_token": None}


def test_the_older_file_holds_unless_the_newer_one_lists_all_tokens(named):
    older = {"bos_token": "</s>"}
    assert named(tokenizer_config={"bos_token": "<s>"}, special_tokens_map=older) == {"bos_token": 2}
    assert named(tokenizer_config={"bos_token": "<s>", "added_tokens_decoder": {}}) == {"bos_token": 1}


def test_a_file_that_is_no_json_is_named(named):
    with pytest.raises(ConfigError, match=r"tokenizer_config.json` must be valid JSON, but is not: "):
        named(tokenizer_config="{")


@pytest.mark.parametrize("token", [7, ["<s>"], {"content": 7}], ids=str)
def test_begin_token_that_is_not_a_string_is_told(named, token):
    with pytest.raises(ConfigError, match=r"`bos_token` in `.*tokenizer_config.json` must be a string, or an object"):
        named(tokenizer_config={"bos_token": token})
