"""Text to ids and back, and which id ends a text."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.config import ConfigError, DataError
from crosscut.config.data import Objective
from crosscut.data import Tokenizer
from crosscut.data.tokenization import tokenizer
from crosscut.data.tokenization.document_encoder import token_dtype
from tests.data.conftest import write_sentencepiece
from tests.refusals import refusal

TEXTS = ["the cut model is the uncut one"] * 50


def write_tokenizer(path: Path, vocabulary: dict[str, int], **fields: object) -> Path:
    table = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"},
    }
    path.write_text(json.dumps({**table, **fields}))
    return path


@settings(max_examples=50)
@given(text=st.text())
def test_any_text_survives_the_round_trip(tokenizer_file: Path, text: str) -> None:
    inner = Tokenizer.load(tokenizer_file)
    assert inner.decode(inner.encode(text)) == text


def test_training_makes_the_entries_asked_for_and_the_same_ones_each_time() -> None:
    first, second = (Tokenizer.train(TEXTS, vocab_size=270) for _ in range(2))
    assert first.vocab_size == 270
    assert first.encode("the uncut model") == second.encode("the uncut model")
    assert len(first.encode("the uncut model")) < len("the uncut model")


def test_training_stops_when_no_pair_is_left() -> None:
    assert Tokenizer.train(["ab"], vocab_size=1000).vocab_size == 257


def test_training_reads_only_the_first_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "MAX_TRAINING_CHARACTERS", 300)
    read = []

    def texts():
        for text in TEXTS:
            read.append(text)
            yield text

    Tokenizer.train(texts(), vocab_size=257)
    assert len(read) == 10  # of 30 characters each


def test_end_of_text_is_never_read_from_text() -> None:
    inner = Tokenizer.train(TEXTS, vocab_size=300)
    text = "a <|endoftext|> b"
    assert inner.end_of_text not in inner.encode(text)
    assert inner.decode(inner.encode(text)) == text
    tokens, lengths = inner.documents.encode([text, "", "b"])
    assert np.flatnonzero(tokens == inner.end_of_text).tolist() == (lengths.cumsum() - 1).tolist()


@pytest.fixture
def with_turns(tmp_path: Path) -> Path:
    """The file of a tokenizer with the special tokens of turns, and one that it puts before every text."""
    import tokenizers

    path = tmp_path / "turns.json"
    Tokenizer.train(TEXTS, vocab_size=300).save(path)
    made = tokenizers.Tokenizer.from_file(str(path))
    made.add_special_tokens(["<s>", "<|turn|>", tokenizers.AddedToken("<|end|>", lstrip=True, rstrip=True)])
    made.add_tokens(["<tool>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    made.save(str(path))
    return path


SPECIAL = (
    "<|turn|>the model\n<|end|> \n<|turn|>",
    "<s>the cut <tool>",
    "<|endoftext|><|endoftext|>",
    "<|tur n|> <|turn|",
    "plain \u2602",
    "",
)


@pytest.mark.parametrize("text", SPECIAL)
def test_a_prompt_is_read_as_transformers_reads_it(with_turns: Path, text: str) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_file=str(with_turns))
    assert Tokenizer.load(with_turns).encode_prompt(text) == theirs(text, add_special_tokens=False).input_ids


def test_a_prompt_is_plain_text_if_the_settings_say_so(with_turns: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    path = with_turns.rename(with_turns.with_name("tokenizer.json"))
    path.with_name("tokenizer_config.json").write_text('{"split_special_tokens": true, "eos_token": "<|endoftext|>"}')
    theirs, loaded = PreTrainedTokenizerFast.from_pretrained(path.parent), Tokenizer.load(path)
    for text in SPECIAL:
        assert loaded.encode_prompt(text) == theirs(text, add_special_tokens=False).input_ids == loaded.encode(text)
    assert loaded.settings()["split_special_tokens"] is True
    path.with_name("tokenizer_config.json").write_text('{"split_special_tokens": 1}')
    with pytest.raises(ConfigError, match=r"^`split_special_tokens` in `.*` must be true or false, but is 1\."):
        Tokenizer.load(path)


def test_what_begins_a_prompt_stands_there_once(with_turns: Path) -> None:
    inner = Tokenizer.load(with_turns)
    (begin,) = inner.encode_prompt("<s>")
    plain = inner.encode_prompt("the cut")
    assert begin not in plain
    assert inner.encode_prompt("the cut", begin=begin) == [begin, *plain]
    assert inner.encode_prompt("<s>the cut", begin=begin) == [begin, *plain]
    assert inner.encode_prompt("", begin=begin) == [begin]


def test_documents_beside_prompts_still_smuggle_no_special_token_in(with_turns: Path) -> None:
    inner = Tokenizer.load(with_turns)
    before = [inner.encode(text) for text in SPECIAL]
    first = inner.encode_prompt("<|endoftext|>")[0]
    assert first == inner.end_of_text
    assert [inner.encode(text) for text in SPECIAL] == before
    special = {first, *(inner.encode_prompt(name)[0] for name in ("<s>", "<|turn|>", "<|end|>"))}
    assert not special.intersection(token for ids in before for token in ids)
    tokens, _ = inner.documents.encode(SPECIAL)
    assert tokens.tolist() == [token for ids in before for token in (*ids, inner.end_of_text)]


def test_documents_are_encoded_as_single_texts_are(tokenizer_file: Path) -> None:
    inner = Tokenizer.load(tokenizer_file)
    tokens, lengths = inner.documents.encode(["the cut", "", "every rank ☂"])
    expected = [[*inner.encode(text), inner.end_of_text] for text in ("the cut", "", "every rank ☂")]
    assert tokens.tolist() == [token for ids in expected for token in ids]
    assert lengths.tolist() == [len(ids) for ids in expected]
    assert tokens.dtype == np.uint16


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["</s>", "<|endoftext|>"], "<|endoftext|>"),
        (["<|end_of_text|>", "</s>"], "</s>"),
        (["<eos>", "<|end_of_text|>"], "<|end_of_text|>"),
        (["<eos>"], "<eos>"),
    ],
)
def test_end_of_text_is_found_by_its_names(tmp_path: Path, names: list[str], expected: str) -> None:
    vocabulary = {name: number for number, name in enumerate(["a", *names])}
    assert Tokenizer.load(write_tokenizer(tmp_path / "t.json", vocabulary)).end_of_text == vocabulary[expected]


def test_vocabulary_with_gaps_counts_to_its_highest_id(tmp_path: Path) -> None:
    inner = Tokenizer.load(write_tokenizer(tmp_path / "t.json", {"a": 0, "</s>": 70_000}))
    assert inner.vocab_size == 70_001
    assert inner.documents.encode(["a"])[0].dtype == np.uint32


def test_own_truncation_padding_and_special_tokens_of_a_file_are_not_used(tmp_path: Path) -> None:
    path = write_tokenizer(
        tmp_path / "t.json",
        {"a": 0, "</s>": 1, "b": 2},
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 1,
            "pad_type_id": 0,
            "pad_token": "</s>",
        },
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "</s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
    )
    inner = Tokenizer.load(path)
    assert inner.encode("b b b b") == [2, 2, 2, 2]
    assert inner.documents.encode(["b b b"])[0].tolist() == [2, 2, 2, 1]


@pytest.mark.parametrize(("vocab_size", "name"), [(257, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_two_bytes_hold_a_token_where_the_vocabulary_allows(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size).name == name


def check_message(path: Path, message: str, *, setting: str = "data.tokenizer") -> None:
    assert refusal(DataError, Tokenizer.load, path, setting=setting) == message


def test_folder_without_a_tokenizer_names_no_setting(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    start = f"`{path}` must exist, but is missing. The folder must hold the tokenizer of the model. "
    check_message(path, start + "Copy `tokenizer.json` from the place where the folder comes from.", setting="")
    (tmp_path / "vocab.json").touch()
    made = f'AutoTokenizer.from_pretrained("{tmp_path}").save_pretrained("{tmp_path}").'
    check_message(path, f"{start}Make the file from the folder's other files with transformers: {made}", setting="")
    path.write_bytes(b"\xff")
    told = f"`{path}` must be a readable `tokenizer.json`, but is not: it is not UTF-8. Copy the file again."
    check_message(path, told, setting="")
    gone = tmp_path / "vocab.txt"
    gone.write_bytes(b"\xff")
    told = f"`{gone}` must be a readable vocabulary, but is not: it is not UTF-8. Copy the file again."
    check_message(gone, told, setting="")


def test_tokenizer_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    start = f"`{path}` must be a readable `tokenizer.json`, but is not: "
    check_message(path, start + "No such file or directory. Check `data.tokenizer`.")
    path.write_bytes(b"\xff")
    check_message(path, start + "it is not UTF-8. Check `data.tokenizer`.")


def test_file_that_is_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("{}")
    assert refusal(DataError, Tokenizer.load, path).startswith(
        f"`{path}` must be a `tokenizer.json` of the tokenizers library, but is not: "
    )


def test_tokenizer_without_end_of_text_is_an_error(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "t.json", {"a": 0})
    check_message(
        path,
        f"`{path}` must have a token that ends a text (`<|endoftext|>`, `</s>`, `<|end_of_text|>`, `<eos>`, `[EOS]`, "
        f"`<end_of_text>` or `[SEP]`), but has none of these tokens, and no file beside the tokenizer names another "
        f"token. Name the token as `eos_token` in a `tokenizer_config.json` in the same folder.",
    )


def test_vocabulary_smaller_than_the_bytes_is_an_error() -> None:
    assert refusal(DataError, Tokenizer.train, TEXTS, vocab_size=256) == (
        "`data.vocab_size` must be at least 257 (256 bytes and the end-of-text token), but is 256. "
        "Set a larger `data.vocab_size`."
    )


def test_two_tokens_of_one_id_are_told(tmp_path: Path) -> None:
    """The library takes such a file, but cannot copy the tokenizer."""
    file = tmp_path / "tokenizer.json"
    content = json.loads(Tokenizer.train(["hello world " * 50], vocab_size=270)._inner.to_str())
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    vocabulary["".join(merges[-1])] = vocabulary["".join(merges[0])]
    file.write_text(json.dumps(content))
    tokenizer = Tokenizer.load(file)
    with pytest.raises(DataError, match=r"tokenizer.json` must be a consistent tokenizer, but is not: Token "):
        tokenizer.encode_prompt("hello")


@pytest.mark.parametrize("highest", [1 << 24, 10**9, 2**31, 2**32 - 1])
def test_a_huge_id_is_told_at_once(tmp_path: Path, highest: int) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", {"<eos>": 0, "a": 1, "b": highest})
    assert refusal(DataError, Tokenizer.load, path) == (
        f"`{path}` must have ids below 16,777,216, but the id of 'b' is {highest:,}. Correct the file, or download it "
        "again."
    )


@pytest.mark.parametrize("prefix", ["{% for %}" * 3, "##", "a" * 100])
def test_a_file_at_which_the_library_panics_is_told(tmp_path: Path, prefix: str) -> None:
    model = {"type": "BPE", "vocab": {"<eos>": 0, "a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]}
    path = write_tokenizer(
        tmp_path / "tokenizer.json", {}, model={**model, "continuing_subword_prefix": prefix, "unk_token": None}
    )
    with pytest.raises(DataError, match=r"must be a `tokenizer.json` of the tokenizers library, but is not: "):
        Tokenizer.load(path)


HELLO = "hello world  hello\n\N{EURO SIGN}\ufffd \N{HAPPY PERSON RAISING ONE HAND}!"


@settings(max_examples=50)
@given(text=st.text(), data=st.data())
def test_bytes_of_any_text_are_those_of_its_tokens(tokenizer_file: Path, text: str, data: st.DataObject) -> None:
    inner = Tokenizer.load(tokenizer_file)
    ids = inner.encode(text)
    assert inner.num_bytes([*ids, inner.end_of_text]) == len(text.encode())
    cut = data.draw(st.integers(0, len(ids)))
    assert inner.num_bytes(ids[:cut]) + inner.num_bytes(ids[cut:]) == len(text.encode()), "also inside a character"


def test_bytes_of_sentencepiece_leave_out_the_space_that_it_puts_before_a_text(tmp_path: Path) -> None:
    inner = Tokenizer.load(write_sentencepiece(tmp_path / "tokenizer.json"))
    ids = inner.encode(HELLO)
    assert inner.decode(ids) == HELLO
    assert inner.num_bytes([*ids, inner.end_of_text]) == len(HELLO.encode())
    counts = [inner.num_bytes(ids[:end]) for end in range(len(ids) + 1)]
    euro = HELLO.encode().index("\N{EURO SIGN}".encode())
    assert counts[:3] == [0, 5, 6], "`hello` and the space after it"
    assert {euro, euro + 1, euro + 2, euro + 3} <= set(counts), "also inside a character"
    assert counts == sorted(counts)


def test_special_tokens_have_no_bytes_and_other_added_tokens_have_those_of_their_names() -> None:
    import tokenizers

    inner = Tokenizer.train(TEXTS, vocab_size=300)
    inner._inner.add_special_tokens(["<|turn|>"])
    inner._inner.add_tokens([tokenizers.AddedToken("https://", normalized=False)])
    inner = Tokenizer(inner._inner)
    turn, link = (inner._inner.token_to_id(name) for name in ("<|turn|>", "https://"))
    assert [inner.num_bytes([token]) for token in (inner.end_of_text, turn, link)] == [0, 0, 8]


def test_bytes_of_words_are_those_of_the_decoded_text(tmp_path: Path) -> None:
    """A tokenizer without a decoder, whose words are joined by spaces."""
    inner = Tokenizer.load(write_tokenizer(tmp_path / "tokenizer.json", {"a": 0, "grüße": 1, "</s>": 2}))
    assert inner.num_bytes([0, 1, 0, 2]) == len(inner.decode([0, 1, 0]).encode()) == len("a grüße a".encode())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("piece", ["a", "7", "!", " ", "\n", "é", "e\u0301", "中", "a1"])
def test_training_takes_no_time_for_a_word_without_end(objective, piece):
    began = time.process_time()
    Tokenizer.train([piece * (100_000 // len(piece)), "some words"], vocab_size=300, objective=objective)
    assert time.process_time() - began < 1.5
