"""The run's tokenizer is the one that is given, or one made from the documents that are left."""

from collections.abc import Callable
from pathlib import Path

import pytest

from crosscut.config import DataError
from crosscut.config.corpora import TokensConfig
from crosscut.corpus.documents import Drop, Lineage, Part, write_drops
from crosscut.corpus.execution.stages import Output
from crosscut.corpus.tokens.tokenizer import FILE, check_tokenizer, make_tokenizer
from crosscut.data import Tokenizer

WORDS = "the cut model is the uncut one "


def test_a_given_tokenizer_is_copied(tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    Tokenizer.train([WORDS] * 9, vocab_size=270).save(given)
    given.write_text(given.read_text() + "\n \n")  # to the byte
    (tmp_path / "out").mkdir()
    counts = make_tokenizer([], TokensConfig(tokenizer=str(given)), Output(tmp_path / "out"))
    assert (tmp_path / "out" / FILE).read_bytes() == given.read_bytes()
    assert counts == {"vocab_size": 270, "trained_on": {"documents": 0, "characters": 0}}


def test_a_copy_says_how_a_text_ends(tmp_path: Path) -> None:
    given = tmp_path / "tokenizer.json"
    Tokenizer.train([WORDS] * 9, vocab_size=270).save(given)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "out").mkdir()
    make_tokenizer([], TokensConfig(tokenizer=str(given)), Output(tmp_path / "out"))
    assert Tokenizer.load(tmp_path / "out" / FILE).end_of_text == 7


def test_one_is_trained_on_the_documents_that_are_left(tmp_path: Path, make_part: Callable[..., Part]) -> None:
    first = make_part([WORDS * 50, "zq" * 500, WORDS * 10])
    second = make_part([WORDS * 20], name="000000-0001")
    (tmp_path / "urls").mkdir()
    write_drops(Output(tmp_path / "urls"), first.name, [Drop(1, "domain")])
    write_drops(Output(tmp_path / "urls"), second.name, [])
    parts = [Part(part.work, part.name, Lineage(("urls",))) for part in (first, second)]
    counts = make_tokenizer(parts, TokensConfig(vocab_size=270), Output(tmp_path))
    assert counts == {"vocab_size": 270, "trained_on": {"documents": 3, "characters": 80 * len(WORDS)}}
    made = Tokenizer.load(tmp_path / FILE)
    assert len(made.encode("uncut")) < 5
    assert len(made.encode("zqzq")) == 4
    Tokenizer.train([WORDS * 50, WORDS * 10, WORDS * 20], vocab_size=270).save(tmp_path / "expected.json")
    assert (tmp_path / FILE).read_bytes() == (tmp_path / "expected.json").read_bytes()


def test_a_tokenizer_that_is_none_is_told_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"No such file or directory\. Check `tokens\.tokenizer`\."):
        check_tokenizer(TokensConfig(tokenizer=str(tmp_path / "none.json")))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"must be a `tokenizer\.json` of the tokenizers library"):
        make_tokenizer([], TokensConfig(tokenizer=str(tmp_path / "bad.json")), Output(tmp_path))


def test_masked_objective_trains_a_wordpiece_and_needs_special_tokens(
    tmp_path: Path, make_part: Callable[..., Part]
) -> None:
    config = TokensConfig(vocab_size=270, objective="masked")
    make_tokenizer([make_part([WORDS * 50])], config, Output(tmp_path))
    assert Tokenizer.load(tmp_path / FILE).special_tokens() == (2, 3, 4, 0)
    given = tmp_path / "given.json"
    Tokenizer.train([WORDS] * 9, vocab_size=270).save(given)
    with pytest.raises(DataError, match=r"must have a token that begins a sequence"):
        check_tokenizer(TokensConfig(tokenizer=str(given), objective="masked"))


def test_vocabulary_of_a_bert_is_given_as_a_wordpiece(tmp_path: Path) -> None:
    given, out = tmp_path / "vocab.txt", tmp_path / "out"
    given.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\n##cut\nun\n")
    out.mkdir()
    make_tokenizer([], TokensConfig(tokenizer=str(given), objective="masked"), Output(out))
    assert Tokenizer.load(out / FILE).encode("the uncut") == [5, 7, 6]
