"""Tokens of answers, for every pre-tokenizer and normalizer of the tokenizers library."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from crosscut.config import IGNORED, DataError
from crosscut.data.tokenization.decoder_rows import Special
from crosscut.finetuning.encoding.answer_tokens import AnswerCounts
from crosscut.finetuning.encoding.answers import best_answers
from crosscut.finetuning.encoding.questions import EncodedQuestions, encode_questions
from crosscut.finetuning.encoding.tokens import TextEncoder
from crosscut.finetuning.tasks import SpanExample
from tests.finetuning.encoding.conftest import model_of

TEXT = (
    "The Normans gave their name to Normandy, a region in France. In 1066 café naïve ﬁne Straße 日本語 (see U.S.A.) "
    'x=3.14!  double  space\nline two\u00a0nbsp e\u0301te\u0301 \u1112\u1161\u11ab "quoted" İstanbul 👩\u200d👧 end '
)
PREFIXED = pre_tokenizers.ByteLevel(add_prefix_space=True)
PRE_TOKENIZERS: dict[str, Any] = {
    "none": None,
    "BertPreTokenizer": pre_tokenizers.BertPreTokenizer(),
    "ByteLevel": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "ByteLevel, prefix": PREFIXED,
    "CharDelimiterSplit": pre_tokenizers.CharDelimiterSplit(" "),
    "Digits": pre_tokenizers.Digits(individual_digits=True),
    "FixedLength": pre_tokenizers.FixedLength(length=4),
    "Metaspace": pre_tokenizers.Metaspace(),
    "Metaspace, another mark": pre_tokenizers.Metaspace(replacement="~", prepend_scheme="first"),
    "Punctuation": pre_tokenizers.Punctuation(),
    "Split, removed": pre_tokenizers.Split(" ", "removed"),
    "Split, merged": pre_tokenizers.Split(" ", "merged_with_next"),
    "UnicodeScripts": pre_tokenizers.UnicodeScripts(),
    "Whitespace": pre_tokenizers.Whitespace(),
    "WhitespaceSplit": pre_tokenizers.WhitespaceSplit(),
    "Whitespace, ByteLevel": pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), PREFIXED]),
    "WhitespaceSplit, Metaspace": pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    ),
}
NORMALIZERS: dict[str, Any] = {
    "none": None,
    "NFC": normalizers.NFC(),
    "NFKD": normalizers.NFKD(),
    "NFKC, Lowercase": normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    "NFD, StripAccents": normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "BertNormalizer": normalizers.BertNormalizer(),
    "ByteLevel": normalizers.ByteLevel(),
    "Nmt": normalizers.Nmt(),
    "Strip": normalizers.Strip(),
    "Prepend, Replace": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
}
UNKNOWN = "[UNK]"
MODELS: dict[str, Any] = {
    "BPE": lambda: (models.BPE(), trainers.BpeTrainer),
    "BPE of bytes": lambda: (models.BPE(byte_fallback=True), trainers.BpeTrainer),
    "Unigram": lambda: (models.Unigram(), trainers.UnigramTrainer),
    "WordLevel": lambda: (models.WordLevel(unk_token=UNKNOWN), trainers.WordLevelTrainer),
    "WordPiece": lambda: (models.WordPiece(unk_token=UNKNOWN), trainers.WordPieceTrainer),
}
QUESTION = "Who gave it?"


def test_every_pre_tokenizer_of_the_library_is_a_case() -> None:
    kinds = {name for name, value in vars(pre_tokenizers).items() if isinstance(value, type)}
    named = {name.partition(",")[0] for name in PRE_TOKENIZERS}
    assert kinds - {"PreTokenizer", "Sequence"} <= named


def words() -> list[SpanExample]:
    """A question for every word, and for every two words that follow each other."""
    places = [found.span() for found in re.finditer(r"[\w\u0301]+", TEXT)]
    return [
        SpanExample(id=str(start), context=TEXT, question=QUESTION, answers=(TEXT[start:end],), starts=(start,))
        for (start, own), (_, following) in zip(places, [*places[1:], places[-1]], strict=True)
        for end in (own, following)
    ]


def train(path: Path, pre_tokenizer: Any, normalizer: Any, model: str, *, text: str = TEXT) -> TextEncoder:
    """Train a tokenizer whose post-processor trims offsets."""
    made, trainer = MODELS[model]()
    inner = tokenizers.Tokenizer(made)
    if pre_tokenizer:
        inner.pre_tokenizer = pre_tokenizer
    if normalizer:
        inner.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    more = {"BpeTrainer": {"initial_alphabet": alphabet}, "UnigramTrainer": {"unk_token": UNKNOWN}}
    inner.train_from_iterator(
        [f"{text} {QUESTION}"] * 3,
        trainer(vocab_size=320, special_tokens=[UNKNOWN], show_progress=False, **more.get(trainer.__name__, {})),
    )
    inner.add_special_tokens(["<s>", "</s>"])
    begin, end = inner.token_to_id("<s>"), inner.token_to_id("</s>")
    inner.post_processor = processors.RobertaProcessing(("</s>", end), ("<s>", begin), trim_offsets=True)
    inner.save(str(path))
    is_causal = model == "BPE"
    return TextEncoder(path, model_of(is_causal=is_causal, vocab_size=2000), Special(None, end), length=96)


def predicted(found: EncodedQuestions, encoder: TextEncoder, examples: list[SpanExample]) -> list[str]:
    """Answers of a model that gives the labels the highest scores."""
    rows, scores = found.rows, []
    for window, (first, last) in enumerate(rows.labels.tolist()):
        offsets = rows.offsets[rows.row(window)]
        own = np.zeros((len(offsets), 2))
        if first >= 0 and offsets[first, 0] >= 0:
            own[first, 0] = own[last, 1] = 1.0
        scores.append(own)
    contexts = {number: example.context for number, example in enumerate(examples)}
    best = best_answers(rows, scores, contexts, is_causal=encoder.model.is_causal, number=1)
    return [best[number].chosen(may_be_empty=False).text for number in range(len(examples))]


def cases() -> list[Any]:
    """Every pre-tokenizer with every normalizer, each with one of the models in turn."""
    pairs = [(pre, normalizer) for pre in PRE_TOKENIZERS for normalizer in NORMALIZERS]
    kinds = list(MODELS)
    found = [
        (pre, normalizer, kinds[(number + number // 10) % len(kinds)]) for number, (pre, normalizer) in enumerate(pairs)
    ]
    return [pytest.param(*case, id="; ".join(case)) for case in found]


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("pre_tokenizer", "normalizer", "model"), cases())
def test_perfect_predictions_are_the_answers_that_end_with_tokens(
    tmp_path: Path, pre_tokenizer: str, normalizer: str, model: str
) -> None:
    encoder = train(tmp_path / "tokenizer.json", PRE_TOKENIZERS[pre_tokenizer], NORMALIZERS[normalizer], model)
    examples = words()
    found = encode_questions(encoder, examples, name="dev.json", stride=24)
    right = [each.answers[0] == text for each, text in zip(examples, predicted(found, encoder, examples), strict=True)]
    counts = found.counts
    assert (counts.lost, counts.garbled, sum(counts)) == (0, 0, len(examples))
    assert sum(right) == counts.exact
    assert counts.exact >= at_borders(tmp_path / "tokenizer.json", examples)


def at_borders(path: Path, examples: list[SpanExample]) -> int:
    """Number of answers that begin and end with tokens, counted from the library's offsets for the text alone, without
    those whose first or last character is also in a token that reaches beyond the answer.
    """
    inner = tokenizers.Tokenizer.from_file(str(path))
    inner.post_processor = processors.ByteLevel(trim_offsets=False)
    given = inner.encode(TEXT).offsets
    places = [(end - len(TEXT[start:end].lstrip()), start + len(TEXT[start:end].rstrip())) for start, end in given]
    number = 0
    for example in examples:
        first, stop = example.starts[0], example.starts[0] + len(example.answers[0])
        own = [(start, end) for start, end in places if start < stop and end > first]
        number += bool(own) and min(own)[0] == first and max(end for _, end in own) == stop
    return number


def test_a_token_that_is_one_character_late_is_mended(tmp_path: Path) -> None:
    """The case of published models."""
    pre_tokenizer = PRE_TOKENIZERS["Whitespace, ByteLevel"]
    encoder, examples = train(tmp_path / "tokenizer.json", pre_tokenizer, None, "BPE of bytes"), words()
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    given = inner.encode(TEXT)
    start, end = given.offsets[given.tokens.index("Ġgave")]
    assert TEXT[start:end] == "ave", "the library's own offsets lack the first letter"
    found = encode_questions(encoder, examples, name="dev.json", stride=24)
    assert found.counts == AnswerCounts(exact=len(examples))
    assert predicted(found, encoder, examples) == [each.answers[0] for each in examples]


def of(answer: str, *, start: int | None = None, context: str = TEXT) -> SpanExample:
    place = context.index(answer) if start is None else start
    return SpanExample(id=answer, context=context, question=QUESTION, answers=(answer,), starts=(place,))


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    """An encoder whose tokenizer drops every comma."""
    path = tmp_path_factory.mktemp("dropping") / "tokenizer.json"
    return train(path, pre_tokenizers.Split(",", "removed"), None, "BPE of bytes")


def test_answers_that_no_prediction_can_equal_are_counted(dropping: TextEncoder) -> None:
    long = " ".join(str(number) for number in range(100, 112))
    context = f"one,twenty {long} three,"
    examples = [
        of("went", context=context),
        of(long, context=context),
        of("three,", context=context),
        of(" ", context=context),
    ]
    rows, counts = encode_questions(dropping, examples, name="train.json", stride=10)
    assert counts == AnswerCounts(exact=1, long=1, lost=2)
    refused = np.isin(rows.sources, [2, 3])
    assert (rows.labels[refused] == IGNORED).all()
    assert (rows.labels[~refused] >= 0).all()
    kept, again = encode_questions(dropping, examples, name="train.json", stride=10, is_trained=True)
    assert set(kept.sources.tolist()) == {0, 1}
    assert again == counts


def test_a_notice_names_the_numbers() -> None:
    assert AnswerCounts(exact=5).notice("dev.json", is_trained=True) == ""
    counts = AnswerCounts(exact=1990, inside=4, long=3, lost=2, garbled=1)
    told = (
        "The first answer of 10 of 2,000 questions in `dev.json` is not a span of at most 30 tokens: 4 do not begin "
        "and end at borders of tokens, 3 are longer, 2 have a beginning or an end that no token of their row holds, 1 "
        "differ from the text of their tokens."
    )
    assert counts.notice("dev.json", is_trained=False) == told
    assert counts.notice("dev.json", is_trained=True) == f"{told} 3 of these questions are left out."


def test_training_needs_an_answer_in_the_tokens(dropping: TextEncoder) -> None:
    with pytest.raises(DataError, match=r"`train.json` must have a question whose answer is in the tokens of its text"):
        encode_questions(dropping, [of(",")], name="train.json", stride=10, is_trained=True)


def test_offsets_of_another_text_are_found_out(tmp_path: Path) -> None:
    encoder = train(tmp_path / "tokenizer.json", pre_tokenizers.Whitespace(), None, "BPE of bytes")
    spelling, found = encoder.spelling(), tokenizers.Tokenizer.from_file(str(encoder.path)).encode("The Normans", TEXT)
    places = np.where(np.array(found.sequence_ids)[:, None] == 1, np.array(found.offsets), -1).astype(np.int32)
    span = next((i, i) for i, token in enumerate(found.tokens) if token == "gave" and found.sequence_ids[i] == 1)
    assert spelling.agrees(TEXT, found.ids, places, span)
    late = np.where(places < 0, -1, np.minimum(places + np.array([1, 0]), places[:, 1:])).astype(np.int32)
    assert not spelling.agrees(TEXT, found.ids, late, span)


def test_blanks_that_a_normalizer_puts_around_characters_are_not_the_answer(tmp_path: Path) -> None:
    encoder = train(tmp_path / "tokenizer.json", pre_tokenizers.Digits(), normalizers.BertNormalizer(), "BPE of bytes")
    examples = [of("日本語"), of("日")]
    found = encode_questions(encoder, examples, name="dev.json", stride=24)
    assert found.counts == AnswerCounts(exact=2)
    assert predicted(found, encoder, examples) == ["日本語", "日"]


def test_characters_that_the_normalizer_removes_or_composes_do_not_lose_an_answer(tmp_path: Path) -> None:
    """BERT's normalizer removes the mark of a byte order, and NFKC composes marks of half width."""
    context = "one \ufeffjumps ｶﾞ ﾊﾟｽ \uffbe\uffc2 \u314e\u314f two"
    expected = {"BertNormalizer": AnswerCounts(exact=4, inside=1), "NFKC, Lowercase": AnswerCounts(exact=5)}
    for name, counts in expected.items():
        encoder = train(
            tmp_path / name, pre_tokenizers.WhitespaceSplit(), NORMALIZERS[name], "BPE of bytes", text=context
        )
        examples = [of(answer, context=context) for answer in context.split()[1:-1]]
        found = encode_questions(encoder, examples, name="train.json", stride=10, is_trained=True)
        assert found.counts == counts, name
        texts = [each.answers[0] for each in examples]
        if counts.inside:
            texts[0] = texts[0].strip("\ufeff")
        assert predicted(found, encoder, examples) == texts, name


def test_the_parts_of_a_character_belong_to_its_answer(tmp_path: Path) -> None:
    encoder = train(tmp_path / "tokenizer.json", PREFIXED, None, "BPE of bytes")
    context = "one 龍龜 two"  # characters of three tokens each
    rows, counts = encode_questions(encoder, [of("龜", context=context)], name="dev.json", stride=10)
    assert counts == AnswerCounts(exact=1)
    ((first, last),) = rows.labels.tolist()
    assert last - first == 2
    inner = tokenizers.Tokenizer.from_file(str(encoder.path))
    inner.decoder = tokenizers.decoders.ByteLevel()
    assert inner.decode(rows.ids[first : last + 1].tolist()) == "龜"
