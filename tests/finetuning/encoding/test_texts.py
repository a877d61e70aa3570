"""Texts and pairs of texts as rows of token ids."""

from pathlib import Path

import pytest

from crosscut.config import ConfigError, DataError
from crosscut.data.tokenization.decoder_rows import Special
from crosscut.finetuning.encoding.texts import Long, encode_texts
from crosscut.finetuning.encoding.tokens import TextEncoder
from crosscut.finetuning.tasks import TextExample
from tests.finetuning.encoding.conftest import TEXT, encoder_of, model_of
from tests.refusals import refusal

PAIRS = [("the quick brown fox", "a dog sleeps"), ("the dog", TEXT), (TEXT, "the dog"), (TEXT, TEXT), ("[SEP]", "fox")]


def examples(pairs: list[tuple[str, str | None]]) -> list[TextExample]:
    return [TextExample(text=text, pair=pair, label=number % 2) for number, (text, pair) in enumerate(pairs)]


@pytest.mark.parametrize("is_pair", [True, False])
def test_rows_equal_those_of_transformers(wordpiece: Path, is_pair: bool) -> None:
    from transformers import BertTokenizerFast

    theirs = BertTokenizerFast(tokenizer_file=str(wordpiece))
    chosen = PAIRS[:4]
    found = theirs(
        [text for text, _ in chosen], [pair for _, pair in chosen] if is_pair else None, truncation=True, max_length=19
    )
    ours = encode_texts(
        encoder_of(wordpiece, length=19),
        examples([(text, pair if is_pair else None) for text, pair in chosen]),
        name="train.tsv",
        long=Long.CUT,
    )
    assert ours.num_long == (3 if is_pair else 2)
    assert ours.rows.labels.tolist() == [0, 1, 0, 1]
    for number, (ids, types) in enumerate(zip(found["input_ids"], found["token_type_ids"], strict=True)):
        row = ours.rows.row(number)
        assert ours.rows.ids[row].tolist() == ids
        assert ours.rows.types[row].tolist() == types


def test_a_decoder_reads_the_end_of_text_last(bytes_pairs: Path) -> None:
    from tokenizers import Tokenizer

    encoder = encoder_of(bytes_pairs, is_causal=True, begin=7)
    rows = encode_texts(encoder, examples(PAIRS[:2]), name="train.tsv", long=Long.CUT).rows
    inner = Tokenizer.from_file(str(bytes_pairs))
    first = rows.ids[rows.row(0)].tolist()
    assert (first[0], first[-1]) == (7, 0)
    assert inner.decode(first[1:-1]) == "the quick brown fox\na dog sleeps"
    second = rows.ids[rows.row(1)].tolist()
    assert (len(second), second[-1]) == (32, 0), "the end of text is never cut"


def test_the_names_of_special_tokens_are_plain_text(wordpiece: Path) -> None:
    rows = encode_texts(encoder_of(wordpiece), examples(PAIRS[4:]), name="train.tsv", long=Long.CUT).rows
    separator = 3
    assert (rows.ids == separator).sum() == 2


def test_long_examples_are_cut_dropped_or_refused(wordpiece: Path) -> None:
    encoder = encoder_of(wordpiece, length=16)
    dropped = encode_texts(encoder, examples(PAIRS), name="train.tsv", long=Long.DROP)
    assert (dropped.num_long, dropped.rows.sources.tolist(), dropped.rows.labels.tolist()) == (3, [0, 4], [0, 0])
    assert refusal(DataError, encode_texts, encoder, examples(PAIRS), name="train.tsv", long=Long.REFUSE) == (
        "Every example of `train.tsv` must fit into `training.sequence_length` (16 tokens), but 3 of 5 do not. Raise "
        "`training.sequence_length`, or pass --long cut or --long drop."
    )
    with pytest.raises(DataError, match="must hold at least one example of at most 16 tokens, but all are longer"):
        encode_texts(encoder, examples(PAIRS[1:4]), name="train.tsv", long=Long.DROP)
    with pytest.raises(DataError, match="but there are no examples"):
        encode_texts(encoder, [], name="train.tsv", long=Long.CUT)


def test_a_tokenizer_of_another_model_is_refused(wordpiece: Path) -> None:
    model = model_of(is_causal=False, vocab_size=20)
    encoder = TextEncoder(wordpiece, model, Special(None, 0), length=16)
    with pytest.raises(ConfigError, match=r"must be the tokenizer of the model, with ids below 20, but has the id \d+"):
        encode_texts(encoder, examples(PAIRS), name="train.tsv", long=Long.CUT)


def test_an_encoder_needs_special_tokens(bytes_pairs: Path) -> None:
    with pytest.raises(ConfigError, match="must put special tokens around a text, such as"):
        encoder_of(bytes_pairs)
