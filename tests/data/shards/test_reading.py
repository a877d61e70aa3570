"""A token folder opens when it is whole, and every kind of damage is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosscut.config import DataConfig, DataError
from crosscut.data import TokenFolder, prepare
from crosscut.data.hashing import sha256
from tests.refusals import refusal

AGAIN = "Delete the folder and prepare the tokens again."


@pytest.fixture
def folder(corpus: Path, tokenizer_file: Path, tmp_path: Path) -> Path:
    config = DataConfig(text=(str(corpus),), tokenizer=str(tokenizer_file), num_shards=2)
    return prepare(config, tmp_path / "tokens", seed=5, progress=False).path


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    path = folder / "manifest.json"
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    return path


def check_message(folder: Path, message: str, **options: bool) -> None:
    assert refusal(DataError, TokenFolder.open, folder, **options) == message


def test_documents_come_back_as_they_went_in(folder: Path, texts: list[str]) -> None:
    tokens = TokenFolder.open(folder)
    tokenizer = tokens.tokenizer()
    found = {}
    for shard in (*tokens.train, tokens.validation):
        for number in range(shard.num_documents):
            *ids, end = shard.document(number).tolist()
            assert end == tokens.end_of_text
            found[shard.origin(number)] = tokenizer.decode(ids)
    name = tokens.manifest.sources[0].name
    assert found == {(name, line): text for line, text in enumerate(texts, start=1)}
    assert tokens.vocab_size == tokenizer.vocab_size
    assert tokens.validation.num_documents == 3


def test_shard_without_documents_opens(tmp_path: Path, tokenizer_file: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    config = DataConfig(text=(str(path),), tokenizer=str(tokenizer_file), num_shards=3)
    tokens = prepare(config, tmp_path / "tokens", seed=5, progress=False)
    assert sorted(shard.num_documents for shard in TokenFolder.open(tokens.path).train) == [0, 0, 1]


def test_folder_without_manifest_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        check_message(
            path,
            f"`{path}` must be a folder of token shards, but has no manifest.json. Make the folder with "
            "`crosscut prepare`.",
        )


def test_manifest_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.mkdir()
    check_message(tmp_path, f"`{path}` must be a readable file, but is not: Is a directory. Check the path.")
    path.rmdir()
    path.write_text("{")
    check_message(
        tmp_path,
        f"`{path}` must be valid JSON, but is not: Expecting property name enclosed in double quotes: line 1 column 2 "
        f"(char 1). Prepare the tokens again.",
    )
    path.write_text("[]")
    check_message(tmp_path, f"`{path}` must be a JSON object, but is a list. Prepare the tokens again.")


FIELDS = "`PATH` must have the fields of version 1, but does not: "


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda table: table.update(version=2),
            "`PATH` must have format 'crosscut-tokens', version 1, but has 'crosscut-tokens', version 2",
        ),
        (lambda table: table.update(dtype="int8"), "`dtype` in `PATH` must be 'uint16' or 'uint32', but is 'int8'"),
        (
            lambda table: table.update(vocab_size=65_537),
            "`vocab_size` in `PATH` must be at most 65,536, the limit of uint16, but is 65,537",
        ),
        (
            lambda table: table.update(end_of_text=300),
            "`end_of_text` in `PATH` must be an id of the vocabulary, 0 to 299, but is 300",
        ),
        (lambda table: table.pop("train"), f"{FIELDS}`train` is missing"),
        (lambda table: table["train"][0].update(tokens="many"), f"{FIELDS}`tokens` must be an integer, but is 'many'"),
        (lambda table: table["train"][0].update(tokens=-1), f"{FIELDS}`tokens` must be from 0 to 2^63 - 1, but is -1"),
        (lambda table: table["validation"].update(name=None), f"{FIELDS}`name` must be a string, but is None"),
        *(
            (
                lambda table, name=name: table["validation"].update(name=name),
                f"{FIELDS}the `name` of a shard must be a file's name without its folder, but is {name!r:.60}",
            )
            for name in ("../validation", "/etc/passwd", "a/b", "..", "", ".hidden", "a\n", "a\\b", "a\0")
        ),
        (lambda table: table["sources"][0].update(name=["a"]), f"{FIELDS}`name` must be a string, but is ['a']"),
        (lambda table: table["settings"].update(seed=1.5), f"{FIELDS}`seed` must be an integer, but is 1.5"),
        (lambda table: table.update(vocab_size=float("inf")), f"{FIELDS}`vocab_size` must be an integer, but is inf"),
    ],
)
def test_faulty_manifest_is_an_error(folder: Path, change, fault: str) -> None:
    path = change_manifest(folder, change)
    check_message(folder, f"{fault}. Prepare the tokens again.".replace("PATH", str(path)))


@pytest.mark.parametrize(
    ("content", "reason"), [("[" * 100_000, "it is nested too deeply"), ('{"n": ' + "9" * 10_000, "Exceeds the limit")]
)
def test_manifest_that_the_parser_refuses_is_an_error(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=rf"`{tmp_path}/manifest.json` must be valid JSON, but is not: {reason}"):
        TokenFolder.open(tmp_path)


@pytest.mark.parametrize("name", ["train-1.tokens", "validation.index", "tokenizer.json"])
def test_missing_file_is_an_error(folder: Path, name: str) -> None:
    (folder / name).unlink()
    message = f"`{folder / name}` must exist, but is missing. manifest.json lists this file. {AGAIN}"
    check_message(folder, message, verify=False)


@pytest.mark.parametrize("name", ["train-1.tokens", "validation.index"])
def test_file_of_another_length_is_an_error(folder: Path, name: str) -> None:
    path = folder / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    check_message(folder, f"`{path}` must be {size:,} bytes long, but is {size - 1:,}. {AGAIN}", verify=False)


@pytest.mark.parametrize("name", ["train-0.tokens", "train-1.index", "validation.tokens", "tokenizer.json"])
def test_file_whose_hash_does_not_match_is_an_error(folder: Path, name: str) -> None:
    path = folder / name
    expected = sha256(path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    check_message(
        folder,
        f"`{path}` must have the SHA-256 {expected[:12]}... that manifest.json lists, but has {sha256(path)[:12]}.... "
        f"The file was changed or damaged. {AGAIN}",
    )


def test_hashes_are_compared_only_when_asked(folder: Path) -> None:
    path = folder / "train-0.tokens"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    TokenFolder.open(folder, verify=False)


def test_token_outside_the_vocabulary_is_an_error(folder: Path) -> None:
    highest = max(int(shard.tokens[:].max()) for shard in TokenFolder.open(folder).train)
    change_manifest(folder, lambda table: table.update(vocab_size=highest))
    path = folder / "train-0.tokens"
    check_message(folder, f"`{path}` must hold ids below the vocabulary size {highest}, but holds {highest}. {AGAIN}")


@pytest.mark.parametrize("verify", [True, False])
def test_index_that_ends_elsewhere_is_an_error(folder: Path, verify: bool) -> None:
    tokens = TokenFolder.open(folder).train[0].num_tokens
    path = folder / "train-0.index"
    index = np.fromfile(path, dtype="<u8")
    index[-3] += 1
    index.tofile(path)
    change_manifest(folder, lambda table: table["train"][0].update(index_sha256=sha256(path)))
    check_message(
        folder,
        f"`{path}` must ascend to {tokens:,}, the number of tokens in the shard, but does not. The last entry is "
        f"{tokens + 1:,}. {AGAIN}",
        verify=verify,
    )


def test_index_that_does_not_ascend_is_an_error(folder: Path) -> None:
    path = folder / "train-0.index"
    index = np.fromfile(path, dtype="<u8")
    index[0] = 2**40
    index.tofile(path)
    change_manifest(folder, lambda table: table["train"][0].update(index_sha256=sha256(path)))
    with pytest.raises(DataError, match=r"must ascend to [\d,]+, the number of tokens in the shard"):
        TokenFolder.open(folder)
