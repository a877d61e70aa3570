"""Index of sentences: made by `prepare`, and checked when the folder is opened."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crosscut.config import DataConfig, DataError
from crosscut.config.data import Objective
from crosscut.data import Shard, TokenFolder, Tokenizer, prepare
from crosscut.data.hashing import sha256
from crosscut.data.text.sentences import sentence_rules, sentence_starts
from tests.data.conftest import write_jsonl
from tests.data.shards.test_reading import AGAIN, change_manifest
from tests.refusals import refusal

SENTENCES = ["One is here. ", "Two is there! ", "Caf\u00e9 three?\n\n", "4 is \u4eca\u5929\u3002", "Five"]
TEXTS = ["".join(SENTENCES[: number % 5 + 1]) for number in range(60)] + ["\u200b", "\n\n\u200b\n\n Odd. \u200b\n\n"]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A WordPiece, and a byte-level BPE with RoBERTa's special tokens."""
    folder = tmp_path_factory.mktemp("tokenizers")
    Tokenizer.train(TEXTS, vocab_size=300, objective=Objective.MASKED).save(folder / "wordpiece.json")
    bpe = Tokenizer.train(TEXTS, vocab_size=300)
    bpe._inner.add_special_tokens(["<s>", "</s>", "<mask>", "<pad>"])
    bpe.save(folder / "bpe.json")
    return {kind: folder / f"{kind}.json" for kind in ("wordpiece", "bpe")}


def config_of(tokenizer: Path, tmp_path: Path) -> DataConfig:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", TEXTS)
    return DataConfig(text=(str(corpus),), tokenizer=str(tokenizer), objective="masked", num_shards=2)


@pytest.fixture(scope="module")
def prepared(tokenizers: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    return prepare(config_of(tokenizers["wordpiece"], folder), folder / "tokens", seed=5, progress=False).path


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy of the tokens, to change."""
    return shutil.copytree(prepared, tmp_path / "tokens")


def sentences_of(shard: Shard) -> dict[int, list[list[int]]]:
    """The ids of every sentence, by the record of its document."""
    found: dict[int, list[list[int]]] = {}
    ends = shard.sentences[:].tolist()
    start = 0
    for number, end in enumerate(shard.ends.tolist()):
        cuts = [start, *(place for place in ends if start < place < end)]
        ids = shard.tokens[start:end].tolist()
        found[shard.origin(number)[1]] = [ids[begin - start : stop - start] for begin, stop in itertools.pairwise(cuts)]
        start = end
    return found


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_sentences_of_a_shard_are_those_of_its_texts(kind: str, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    tokens = prepare(config_of(tokenizers[kind], tmp_path), tmp_path / "tokens", seed=5, progress=False)
    tokenizer = tokens.tokenizer()
    found = {}
    for shard in (*tokens.train, tokens.validation):
        found.update(sentences_of(shard))
    assert len(found) == len(TEXTS)
    for record, sentences in found.items():
        text = TEXTS[record - 1]
        places = [0, *sentence_starts(text), len(text)]
        expected = [tokenizer.encode(text[start:end].strip()) for start, end in itertools.pairwise(places)]
        if kind == "wordpiece":  # a byte-level BPE also has tokens for the blanks
            assert sentences == [ids for ids in expected if ids]
        else:
            decoded = [tokenizer.decode(ids).strip() for ids in sentences]
            assert decoded == [part for part in map(tokenizer.decode, expected) if part]
        assert [token for ids in sentences for token in ids] == tokenizer.encode(text), "the tokens stay the same"


def test_sentences_that_other_rules_found_are_refused_and_used_only_as_they_are(
    folder: Path, tokenizers: dict[str, Path], tmp_path: Path
) -> None:
    config = config_of(tokenizers["wordpiece"], tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["settings"]["sentences"] == sentence_rules()
    manifest["settings"]["sentences"] = "other rules"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert refusal(DataError, prepare, config, folder, seed=5, progress=False) == (
        f"`{folder}` must hold the tokens of this text with these settings, but was made from sentences that other "
        "rules found. Choose another `data.tokens`, delete the folder, or leave `data.text` empty to use the folder's "
        "tokens unchanged."
    )
    unchanged = replace(config, text=(), tokens=str(folder))
    assert prepare(unchanged, folder, seed=5, progress=False).train[0].sentences is not None
    causal = prepare(replace(config, objective="causal"), tmp_path / "causal", seed=5, progress=False)
    assert causal.manifest.settings.sentences == ""


@pytest.mark.usefixtures("forked_workers")
def test_tokens_do_not_depend_on_the_workers(prepared: Path, tokenizers: dict[str, Path], tmp_path: Path) -> None:
    same_text = (str(prepared.parent / "corpus.jsonl"),)
    config = replace(config_of(tokenizers["wordpiece"], tmp_path), text=same_text)
    second = prepare(config, tmp_path / "tokens", seed=5, workers=2, progress=False).path
    names = {path.name for path in prepared.iterdir()}
    assert {"train-0.sentences", "train-1.sentences", "validation.sentences"} <= names
    for name in names:
        assert (prepared / name).read_bytes() == (second / name).read_bytes()


def test_tokens_for_causal_models_have_no_sentences(tokenizers: dict[str, Path], tmp_path: Path) -> None:
    config = config_of(tokenizers["wordpiece"], tmp_path)
    causal = DataConfig(text=config.text, tokenizer=config.tokenizer, num_shards=2)
    tokens = prepare(causal, tmp_path / "tokens", seed=5, progress=False)
    assert tokens.validation.sentences is None
    assert not list(tokens.path.glob("*.sentences"))


def damage(folder: Path, ends: np.ndarray) -> None:
    """Replace the sentences of `train-0`, with a manifest that agrees."""
    file = folder / "train-0.sentences"
    ends.astype("<u8").tofile(file)
    entry = {"sentences": len(ends), "sentences_sha256": sha256(file)}
    change_manifest(folder, lambda table: table["train"][0].update(entry))


def check_message(folder: Path, message: str) -> None:
    assert refusal(DataError, TokenFolder.open, folder) == message


@pytest.mark.parametrize(
    "change",
    [lambda ends: ends[::-1], lambda ends: ends[:-1], lambda ends: np.append(ends, 10**6), lambda ends: ends[:0]],
)
def test_sentences_that_do_not_fit_the_documents_are_an_error(folder: Path, change) -> None:
    damage(folder, change(np.fromfile(folder / "train-0.sentences", dtype="<u8")))
    check_message(
        folder,
        f"`{folder / 'train-0'}.sentences` must list the ends of sentences in ascending order, with the end of every "
        f"document among them, but does not. {AGAIN}",
    )


def test_missing_or_changed_sentences_are_an_error(folder: Path) -> None:
    file = folder / "validation.sentences"
    content = file.read_bytes()
    file.write_bytes(content[:-8])
    check_message(folder, f"`{file}` must be {len(content)} bytes long, but is {len(content) - 8}. {AGAIN}")
    file.unlink()
    check_message(folder, f"`{file}` must exist, but is missing. manifest.json lists this file. {AGAIN}")


def test_sentences_that_change_while_they_are_read_are_noticed(folder: Path) -> None:
    shard = TokenFolder.open(folder).train[0]
    file = folder / "train-0.sentences"
    with file.open("r+b") as opened:
        opened.truncate(8)
    with pytest.raises(DataError, match=r"must not change while it is read"):
        shard.check_unchanged()
