"""The end-of-text token that the files of a folder name, the order of these files, and tokens made with this token."""

import json
from pathlib import Path
from typing import Any

import pytest

from crosscut.config import ConfigError, DataConfig, DataError
from crosscut.data import Tokenizer, prepare
from tests.data.conftest import make_texts, write_jsonl
from tests.refusals import refusal

END, TURN, KNOWN = "<\uff5cend\u2581of\u2581text\uff5c>", "<|turn|>", "</s>"
"""A name that nobody could guess, another token that ends something, and a name that is known."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a `tokenizer.json` that has all three; no other file."""
    import tokenizers

    path = tmp_path / "model" / "tokenizer.json"
    path.parent.mkdir()
    Tokenizer.train(make_texts(20), vocab_size=270).save(path)
    path.write_text(path.read_text(encoding="utf-8").replace("<|endoftext|>", "<pad>"), encoding="utf-8")
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.add_special_tokens([KNOWN, TURN, END])
    inner.save(str(path))
    return path.parent


def say(folder: Path, **files: Any) -> None:
    """Write files, each by its name without `.json`."""
    for name, table in files.items():
        (folder / f"{name}.json").write_text(json.dumps(table), encoding="utf-8")


def end_of(folder: Path) -> int:
    return Tokenizer.load(folder / "tokenizer.json").end_of_text


def id_of(folder: Path, token: str) -> int:
    (found,) = Tokenizer.load(folder / "tokenizer.json").encode_prompt(token)
    return found


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, KNOWN),
        ({"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": None}}, KNOWN),
        ({"tokenizer_config": {"eos_token": END}}, END),
        ({"tokenizer_config": {"eos_token": {"content": END, "lstrip": False}}}, END),
        ({"special_tokens_map": {"eos_token": END}}, END),
        ({"tokenizer_config": {"eos_token": END}, "config": {"eos_token_id": "TURN"}}, END),
        ({"tokenizer_config": {}, "config": {"eos_token_id": "END", "model_type": "unknown"}}, END),
        ({"config": {"eos_token_id": ["END", "TURN"]}, "generation_config": {"eos_token_id": "TURN"}}, END),
        ({"config": {}, "generation_config": {"eos_token_id": ["END"]}}, END),
        ({"config": {"eos_token_id": []}, "manifest": {"name": "of something else"}}, KNOWN),
        ({"tokenizer_config": {"eos_token": END}, "manifest": ["a list of files"]}, END),
    ],
)
def test_the_first_file_that_says_something_is_believed(folder, files, expected):
    ids = {"END": id_of(folder, END), "TURN": id_of(folder, TURN)}
    text = json.dumps(files)
    for name, token in ids.items():
        text = text.replace(f'_id": "{name}"', f'_id": {token}').replace(f'"{name}"', str(token))
    say(folder, **json.loads(text))
    assert end_of(folder) == id_of(folder, expected)


@pytest.mark.parametrize("settings", [{}, {"eos_token": TURN}, {"eos_token": TURN, "added_tokens_decoder": {}}])
@pytest.mark.parametrize("special", [{}, {"eos_token": END}, {"eos_token": {"content": END, "lstrip": False}}])
def test_a_named_end_is_that_of_transformers(folder, settings, special):
    from transformers import AutoTokenizer

    say(folder, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", **settings}, special_tokens_map=special)
    theirs = AutoTokenizer.from_pretrained(folder).eos_token_id
    assert end_of(folder) == (id_of(folder, KNOWN) if theirs is None else theirs)


def test_a_name_that_the_tokenizer_lacks_is_told_with_both_files(folder):
    say(folder, tokenizer_config={"eos_token": "<gone>"}, config={"eos_token_id": 0})
    assert refusal(DataError, end_of, folder) == (
        f"`eos_token` in `{folder}/tokenizer_config.json` must be a token of `{folder}/tokenizer.json`, but is "
        "'<gone>', which the tokenizer does not have. Take both files from the same model, or correct the value."
    )


def test_an_id_that_the_tokenizer_lacks_is_told_with_both_files(folder):
    say(folder, generation_config={"eos_token_id": [50256]})
    assert refusal(DataError, end_of, folder) == (
        f"`eos_token_id` in `{folder}/generation_config.json` must be an id of `{folder}/tokenizer.json`, but is "
        "50256, which the tokenizer does not have. Take both files from the same model, or correct the value."
    )


@pytest.mark.parametrize("ends", ["2", [1, None], 2.0, True, -5, [1, -1], 1 << 31, 10**30])
def test_what_is_no_id_is_told(folder, ends):
    say(folder, config={"eos_token_id": ends})
    assert refusal(ConfigError, end_of, folder) == (
        f"`eos_token_id` in `{folder}/config.json` must be an id or a list of ids, each from 0 to 2147483647, but is "
        f"{ends!r}. Correct or remove `eos_token_id`."
    )


def test_what_is_given_comes_before_all(folder):
    say(folder, tokenizer_config={"eos_token": "<gone>"})
    assert Tokenizer.load(folder / "tokenizer.json", end_of_text=5).end_of_text == 5


def test_what_is_written_beside_a_tokenizer_says_the_same(folder):
    say(folder, tokenizer_config=Tokenizer.load(folder / "tokenizer.json", end_of_text=id_of(folder, END)).settings())
    assert end_of(folder) == id_of(folder, END)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("workers", [1, 2])
def test_tokens_end_as_the_folder_says_and_keep_it(folder, tmp_path, workers):
    """Also where the tokenizer is taken from the tokens by its path, and nothing else lies beside it."""
    end = id_of(folder, END)
    say(folder, config={"eos_token_id": end})
    text = write_jsonl(tmp_path / "text.jsonl", ["one", f"a {END} in it", "three"])
    config = DataConfig(text=(str(text),), tokenizer=str(folder / "tokenizer.json"), num_shards=1)
    tokens = prepare(config, tmp_path / "tokens", seed=1, workers=workers, progress=False)
    shards = (*tokens.train, tokens.validation)
    documents = [shard.document(number).tolist() for shard in shards for number in range(shard.num_documents)]
    assert [ids.index(end) for ids in documents] == [len(ids) - 1 for ids in documents]
    assert tokens.end_of_text == tokens.tokenizer().end_of_text == end_of(tokens.path) == end
    assert prepare(config, tmp_path / "tokens", seed=1, progress=False).end_of_text == end, "used as it is"


def test_tokens_of_another_end_of_text_are_refused(folder, tmp_path):
    text = write_jsonl(tmp_path / "text.jsonl", ["one", "two", "three"])
    config = DataConfig(text=(str(text),), tokenizer=str(folder / "tokenizer.json"), num_shards=1)
    before = prepare(config, tmp_path / "tokens", seed=1, progress=False).end_of_text
    say(folder, tokenizer_config={"eos_token": END})
    with pytest.raises(DataError) as error:
        prepare(config, tmp_path / "tokens", seed=1, progress=False)
    what = f"was made from documents that end with id {before} instead of {id_of(folder, END)}. Choose another"
    assert what in str(error.value)


@pytest.mark.parametrize("token", [7, ["</s>"], {"content": 7}, True], ids=str)
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_token_that_is_not_a_string_is_told(folder, file, token):
    say(folder, **{file: {"eos_token": token}})
    assert refusal(ConfigError, end_of, folder) == (
        f"`eos_token` in `{folder}/{file}.json` must be a string, or an object whose `content` is a string, but is "
        f"{'true' if token is True else repr(token)}. Correct or remove `eos_token`."
    )
