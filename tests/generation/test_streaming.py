import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosscut.data import Tokenizer
from crosscut.data.tokenization.token_bytes import byte_of_character
from crosscut.generation.streaming import TextStream, _Stops

TEXT = "naïve — 日本語 🙂🙃 café\n" * 3


@pytest.fixture(scope="module")
def by_bytes() -> Tokenizer:
    """A token for each byte: characters beyond ASCII come in two to four tokens."""
    return Tokenizer.train(["abc"], vocab_size=257)


@pytest.fixture(scope="module")
def with_spaces() -> Tokenizer:
    """Words as in Llama's tokenizer, whose decoder drops the space before the very first."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<|endoftext|>", "▁the", "▁end", "▁of", "▁it", "ing"])}
    inner = tokenizers.Tokenizer(models.WordLevel(words, unk_token="▁it"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens(["<|endoftext|>"])
    return Tokenizer(inner)


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, prompt: list[int] = (), stop: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(tokenizer, prompt, stop)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.has_stopped:
            return pieces
    return [*pieces, stream.finish()]


def test_characters_come_whole(by_bytes):
    pieces = pieces_of(by_bytes, by_bytes.encode(TEXT))
    assert "".join(pieces) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert pieces[:4] == ["n", "a", "", "ï"]


def test_a_character_that_never_gets_whole_comes_at_the_end(by_bytes):
    ids = by_bytes.encode("a🙂")[:-1]
    assert pieces_of(by_bytes, ids) == ["a", "", "", "", by_bytes.decode(ids)[1:]]


def test_bytes_that_are_no_character_do_not_hold_up_what_follows(by_bytes):
    ids = by_bytes.encode("é")[:1] + by_bytes.encode("bcd")
    pieces = pieces_of(by_bytes, ids)
    assert pieces == ["", "\N{REPLACEMENT CHARACTER}b", "c", "d", ""]


def test_the_space_after_the_prompt_is_not_lost(with_spaces):
    assert pieces_of(with_spaces, [2, 3, 5], prompt=[1]) == [" end", " of", "ing", ""]


def test_special_tokens_show_nothing_and_change_nothing(with_spaces):
    assert pieces_of(with_spaces, [2, 0, 0, 3], prompt=[1]) == [" end", "", "", " of", ""]


@settings(max_examples=50)
@given(st.lists(st.integers(0, 255), max_size=40), st.integers(0, 8))
def test_pieces_are_the_decoded_text_whatever_the_tokens(by_bytes, tokens, num_prompt):
    ids = [1 + token for token in tokens]
    whole, prompt = by_bytes.decode(ids), by_bytes.decode(ids[:num_prompt])
    joined = "".join(pieces_of(by_bytes, ids[num_prompt:], prompt=ids[:num_prompt]))
    broken = "\N{REPLACEMENT CHARACTER}"
    if not prompt.endswith(broken):
        assert prompt + joined == whole
    assert joined.endswith(whole[len(prompt.rstrip(broken)) :].lstrip(broken))


def test_stop_string_across_tokens_is_held_back_and_cut(by_bytes):
    pieces = pieces_of(by_bytes, by_bytes.encode("one END two"), stop=("END",))
    assert pieces == ["o", "n", "e", " ", "", "", ""]


def test_what_only_began_like_a_stop_string_is_shown(by_bytes):
    assert pieces_of(by_bytes, by_bytes.encode("ENE EN"), stop=("END",)) == ["", "", "EN", "E ", "", "", "EN"]


def test_stop_string_within_one_token(with_spaces):
    assert pieces_of(with_spaces, [1, 2, 3], prompt=[4], stop=("nd",)) == [" the", " e"]


def test_the_stop_string_that_is_complete_first_counts(by_bytes):
    assert "".join(pieces_of(by_bytes, by_bytes.encode("xabcd"), stop=("abcd", "bc"))) == "xa"
    assert "".join(pieces_of(by_bytes, by_bytes.encode("xabcd"), stop=("bc", "abc"))) == "x"


@settings(max_examples=50)
@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_how_text_is_cut_into_tokens_makes_no_difference(text, stops, data):
    def shown(pieces: list[str]) -> tuple[str, bool]:
        looking = _Stops(stops)
        out = "".join(looking.push(piece) for piece in pieces)
        return (out if looking.found else out + looking.finish()), looking.found

    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    borders = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    expected = text if not ends else min((text.find(s) + len(s), text[: text.find(s)]) for s in stops if s in text)[1]
    assert shown(pieces) == shown(list(text)) == (expected, bool(ends))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("aab" * 30_000 + "c", "aab" * 15_000),
        ("a" * 100_000, "a" * 50_000),
        ("ab" * 50_000, "ab" * 25_000),
        ("a" * 1000, ("a" * 999 + "b") * 50),
        ("é" * 99_999 + "🙂", "é" * 50_000),
    ],
    ids=["three", "one", "two", "often", "unicode"],
)
def test_a_long_stop_string_costs_no_more_per_character_than_a_short_one(stop, text):
    def seconds(stops: list[str]) -> float:
        looking, began = _Stops(stops), time.process_time()
        assert "".join([looking.push(character) for character in text]) + looking.finish() == text
        return time.process_time() - began

    assert seconds([stop] * 4) < 10 * seconds(["xyz"] * 4) + 0.5


@pytest.mark.parametrize("bytes_", [b"\x80", b"\xe2\x80", b"\xf0\x9f", b"\xff"], ids=repr)
def test_bytes_that_never_are_a_character_are_shown_at_last_and_kept_no_longer(by_bytes, bytes_):
    """Otherwise each token would decode all tokens before it."""
    characters = {value: character for character, value in byte_of_character().items()}
    ids = [by_bytes._inner.token_to_id(characters[bytes([byte])]) for byte in bytes_] * 3000
    stream = TextStream(by_bytes, by_bytes.encode("a"))
    shown = "".join(stream.push(token) for token in ids)
    assert len(stream._ids) < 80
    assert set(shown) == {"\N{REPLACEMENT CHARACTER}"}
    assert len(by_bytes.decode(ids)) == pytest.approx(len(shown + stream.finish()), rel=0.1)
    after = "".join(stream.push(token) for token in by_bytes.encode("bcd")) + stream.finish()
    assert after.endswith("bcd")
