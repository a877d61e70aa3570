"""WordPiece: trained on a corpus, and read from BERT's `vocab.txt` as transformers reads it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from crosscut.config import ConfigError, DataConfig, DataError
from crosscut.config.data import Objective
from crosscut.data import Tokenizer, prepare
from crosscut.data.tokenization.token_bytes import TokenBytes
from tests.data.conftest import make_texts
from tests.refusals import refusal

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "cut", "un", "##cut", "model", "resume", "R", "##ésumé", "中", "!", "caf", "Caf", "##é"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
TEXT = "The uncut models!  resume\u0301 Résumé 中中 café Café [MASK] zebra \u0001 ☃"


def write_vocabulary(folder: Path, *, cased: bool | None = None, entries: list[str] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "vocab.txt"
    path.write_text("".join(f"{entry}\n" for entry in entries or [*SPECIAL, *WORDS, *LETTERS]), encoding="utf-8")
    if cased is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": not cased}))
    return path


def test_training_gives_the_same_uncased_wordpiece_each_time() -> None:
    first, second = (Tokenizer.train(make_texts(300), vocab_size=400, objective=Objective.MASKED) for _ in range(2))
    assert first._inner.to_str() == second._inner.to_str()
    assert first.vocab_size <= 400
    assert [first._inner.id_to_token(number) for number in range(5)] == SPECIAL
    assert first.encode("Every RANK meets") == first.encode("every rank meets")
    assert first.decode(first.encode("every rank meets others")) == "every rank meets others"
    assert first.end_of_text == first.special_tokens().separator == 3
    assert first.special_tokens() == (2, 3, 4, 0)


def test_characters_take_at_most_half_of_a_trained_vocabulary() -> None:
    texts = [
        "".join(chr(0x4E00 + number * 7 % 3000) + "x" for number in range(start, start + 50)) for start in range(99)
    ]
    assert Tokenizer.train([*texts, *make_texts(300)], vocab_size=300, objective=Objective.MASKED).vocab_size <= 300


def test_trained_tokenizer_puts_pairs_between_the_special_tokens_for_other_programs() -> None:
    tokenizer = Tokenizer.train(make_texts(300), vocab_size=400, objective=Objective.MASKED)
    encoding = type(tokenizer._inner).from_str(tokenizer._inner.to_str()).encode("the cut", "model")
    assert encoding.tokens == ["[CLS]", "the", "cut", "[SEP]", "model", "[SEP]"]
    assert encoding.type_ids == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("cased", [None, False, True])
def test_vocabulary_file_encodes_as_in_transformers(tmp_path: Path, cased: bool | None) -> None:
    from transformers import BertTokenizer

    path = write_vocabulary(tmp_path / "bert", cased=cased)
    theirs = BertTokenizer(vocab=str(path), do_lower_case=not cased)
    ours = Tokenizer.load(path)
    text = TEXT.replace("[MASK]", "")
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert len(set(ours.encode(text))) > 10
    assert ours.special_tokens() == (
        theirs.cls_token_id,
        theirs.sep_token_id,
        theirs.mask_token_id,
        theirs.pad_token_id,
    )


def test_names_of_special_tokens_in_a_document_are_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_vocabulary(tmp_path / "bert"))
    ids, lengths = tokenizer.documents.encode(["the [MASK] [SEP]", "cut"])
    ends = np.flatnonzero(ids == tokenizer.end_of_text)
    assert (ends + 1).tolist() == lengths.cumsum().tolist()
    assert tokenizer.special_tokens().mask not in ids


def test_bytes_of_a_token_have_no_prefix_and_a_blank_before_a_word(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_vocabulary(tmp_path / "bert"))
    single = TokenBytes(tokenizer._inner)
    assert b"".join(map(single, tokenizer.encode("the uncut models"))) == b" the uncut models"


def prepared(path: Path, corpus: Path, folder: Path) -> DataConfig:
    config = DataConfig(text=(str(corpus),), tokenizer=str(path), objective="masked", num_shards=1)
    assert prepare(config, folder, seed=1, progress=False).tokenizer().end_of_text == 3
    return config


def test_tokens_of_a_vocabulary_file_are_prepared_and_used_again(corpus: Path, tmp_path: Path) -> None:
    path, folder = write_vocabulary(tmp_path / "bert"), tmp_path / "tokens"
    config = prepared(path, corpus, folder)
    assert Tokenizer.load(folder / "tokenizer.json").encode(TEXT) == Tokenizer.load(path).encode(TEXT)
    prepared(path, corpus, folder)
    write_vocabulary(tmp_path / "bert", cased=True)
    with pytest.raises(DataError, match=r"was made from another `data.tokenizer`. Choose"):
        prepare(config, folder, seed=1, progress=False)


def test_masked_tokens_have_a_trained_wordpiece(corpus: Path, tmp_path: Path) -> None:
    config = DataConfig(text=(str(corpus),), objective="masked", vocab_size=300, num_shards=1)
    tokens = prepare(config, tmp_path / "tokens", seed=1, progress=False)
    assert tokens.tokenizer().special_tokens() == (2, 3, 4, 0)
    assert tokens.manifest.settings.objective == "masked"
    with pytest.raises(DataError, match=r"was made from `data.objective` 'masked' instead of 'causal'. Choose"):
        prepare(DataConfig(text=(str(corpus),), vocab_size=300, num_shards=1), tmp_path / "tokens", seed=1)


def test_tokenizer_without_a_mask_token_is_an_error(corpus: Path, tokenizer_file: Path, tmp_path: Path) -> None:
    config = DataConfig(text=(str(corpus),), tokenizer=str(tokenizer_file), objective="masked")
    assert refusal(DataError, prepare, config, tmp_path / "tokens", seed=1, progress=False) == (
        f"`{tokenizer_file}` must have a token that begins a sequence (`[CLS]` or `<s>`) for masked language "
        "modelling, but has none. Use the tokenizer of a BERT or a RoBERTa, or leave the option empty to train a "
        "tokenizer."
    )


@pytest.mark.parametrize(
    ("entries", "reason"),
    [([*SPECIAL[:3], "a"], "it lacks `[SEP]`"), ([*SPECIAL, "a", "b", "a"], "it lists an entry twice")],
)
def test_vocabulary_that_is_not_of_a_bert_is_an_error(tmp_path: Path, entries: list[str], reason: str) -> None:
    path = write_vocabulary(tmp_path / "bert", entries=entries)
    assert refusal(DataError, Tokenizer.load, path) == (
        f"`{path}` must be the vocabulary of a BERT, with one entry per line and the entries [PAD], [UNK], [CLS], "
        f"[SEP], [MASK], but {reason}. Copy the file again."
    )


def test_vocabulary_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    missing = "must be a readable vocabulary, but is not: No such file or directory. Check `data.tokenizer`."
    coded = "must be a readable vocabulary, but is not: it is not UTF-8."
    for setting, told in (
        ("data.tokenizer", missing),
        ("", "must exist, but is missing. The folder must hold the tokenizer of the model. Copy `vocab.txt`"),
    ):
        with pytest.raises(DataError, match=re.escape(f"`{path}` {told}")):
            Tokenizer.load(path, setting=setting)
    path.write_bytes(b"\xff")
    for setting, told in (
        ("data.tokenizer", f"{coded} Check `data.tokenizer`."),
        ("", f"{coded} Copy the file again."),
    ):
        with pytest.raises(DataError, match=re.escape(f"`{path}` {told}")):
            Tokenizer.load(path, setting=setting)


def test_letter_case_that_is_neither_true_nor_false_is_an_error(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "bert")
    (path.parent / "tokenizer_config.json").write_text('{"do_lower_case": "no"}')
    assert refusal(ConfigError, Tokenizer.load, path) == (
        f"`do_lower_case` in `{path.parent / 'tokenizer_config.json'}` must be true or false, but is 'no'. Correct the "
        "file."
    )


def test_vocabulary_of_the_smallest_size() -> None:
    assert (
        refusal(DataError, Tokenizer.train, make_texts(3), vocab_size=256, objective=Objective.MASKED)
        == "`data.vocab_size` must be at least 257, but is 256. Set a larger `data.vocab_size`."
    )


def test_transformers_reads_the_special_tokens_of_a_saved_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.train(make_texts(300), vocab_size=400, objective=Objective.MASKED)
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer.settings()))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.cls_token_id, theirs.sep_token_id, theirs.mask_token_id, theirs.pad_token_id) == (2, 3, 4, 0)
    assert theirs("the cut", "model")["input_ids"] == [
        2,
        *tokenizer.encode("the cut"),
        3,
        *tokenizer.encode("model"),
        3,
    ]
    assert "mask_token" not in Tokenizer.train(make_texts(9), vocab_size=270).settings()
