"""Questions with several options."""

from pathlib import Path

import pytest

from crosscut.config import DataError
from crosscut.finetuning.encoding.options import encode_options
from crosscut.finetuning.encoding.rows import EncodedRows
from crosscut.finetuning.encoding.texts import Long
from crosscut.finetuning.tasks import ChoiceExample
from tests.finetuning.encoding.conftest import TEXT, encoder_of

OPTIONS = ("dog", "fox", "region", "name")


def ask(question: str, *, options: tuple[str, ...] = OPTIONS, passage: str = TEXT) -> ChoiceExample:
    return ChoiceExample(passage=passage, question=question, options=options, label=1)


def texts_of(path: Path, rows: EncodedRows) -> list[str]:
    from tokenizers import Tokenizer

    inner = Tokenizer.from_file(str(path))
    return [inner.decode(rows.ids[rows.row(i)].tolist(), skip_special_tokens=False) for i in range(len(rows.ends))]


def test_each_option_has_a_row_and_only_the_passage_is_cut(wordpiece: Path) -> None:
    examples = [ask("Who sleeps?", passage="A dog sleeps."), ask("The quick brown _ jumps")]
    rows, num_long, _ = encode_options(encoder_of(wordpiece, length=24), examples, name="train", long=Long.CUT)
    assert (rows.num_examples, rows.width, num_long, rows.labels.tolist()) == (2, 4, 1, [1, 1])
    texts = texts_of(wordpiece, rows)
    assert texts[1] == "[CLS] a dog sleeps. [SEP] who sleeps? fox [SEP]"
    assert all(
        text.endswith(f"[SEP] the quick brown {o} jumps [SEP]") for text, o in zip(texts[4:], OPTIONS, strict=True)
    )
    assert rows.types[rows.row(1)].tolist() == [0] * 6 + [1] * (len(rows.ids[rows.row(1)]) - 6)
    kept = encode_options(encoder_of(wordpiece, length=24), examples, name="train", long=Long.DROP)
    assert (kept.rows.sources.tolist(), kept.num_long) == ([0], 1)


def test_options_must_be_as_many_and_fit(wordpiece: Path) -> None:
    encoder = encoder_of(wordpiece, length=24)
    mixed = [ask("Who?"), ask("Who?", options=OPTIONS[:3])]
    with pytest.raises(DataError, match="must have the same number of options, but have 3 or 4 options"):
        encode_options(encoder, mixed, name="train", long=Long.CUT)
    with pytest.raises(DataError, match="but there are no questions"):
        encode_options(encoder, [], name="train", long=Long.CUT)
    with pytest.raises(DataError, match=r"must leave room for the passage in .*\(24 tokens\), but 4 of 4 do not"):
        encode_options(encoder, [ask(TEXT)], name="train", long=Long.CUT)
