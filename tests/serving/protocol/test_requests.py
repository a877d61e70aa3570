"""Maximum length of a text, with and without a sliding window."""

from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from crosscut.config.checks import MOST
from crosscut.config.data import Objective
from crosscut.data import Tokenizer
from crosscut.serving.protocol.embeddings import ServedEncoder, read_embedding
from crosscut.serving.protocol.fields import parse
from crosscut.serving.protocol.refusals import Refusal
from crosscut.serving.protocol.requests import MOST_SLIDING, ServedDecoder, read_chat, read_completion
from tests.pretrained.encoders import V
from tests.serving.conftest import NAME, WINDOW


def served(folder: Path, *, slide: bool, begin: int | None = None, window: int = WINDOW) -> ServedDecoder:
    return ServedDecoder(
        name=NAME,
        window=window,
        slide=slide,
        tokenizer=folder / "tokenizer.json",
        vocab_size=402,
        begin=begin,
        end_of_text=0,
        stops=frozenset({0, 401}),
        can_chat=True,
        created=0,
    )


def encoder(folder: Path) -> ServedEncoder:
    return ServedEncoder(name=NAME, window=16, size=32, tokenizer=folder / "tokenizer.json", vocab_size=V, created=0)


def says(text: str) -> dict[str, object]:
    return {"model": NAME, "messages": [{"role": "user", "content": text}]}


def test_a_chat_has_what_the_window_has_room_for(model_folder):
    request = read_chat(says("Hello"), served(model_folder, slide=False))
    assert request.sampling.num_tokens == WINDOW - len(request.prompts[0]) + 1
    with pytest.raises(Refusal, match="The prompt and an answer must fit in the model's window"):
        read_chat(says("Hello " * 200), served(model_folder, slide=False))


def test_a_chat_that_may_slide_has_at_least_half_a_window(model_folder):
    long, short = (read_chat(says(text), served(model_folder, slide=True)) for text in ("Hello " * 200, "Hello"))
    assert len(long.prompts[0]) > WINDOW
    assert long.sampling.num_tokens == WINDOW // 2
    assert short.sampling.num_tokens == WINDOW - len(short.prompts[0]) + 1


@pytest.mark.parametrize(("length", "num_tokens"), [(5, 9 * WINDOW), (2 * WINDOW, 7), (2 * WINDOW, 0)])
def test_a_text_that_may_slide_is_as_long_as_asked(model_folder, length, num_tokens):
    body = {"model": NAME, "prompt": [40] * length, "max_tokens": num_tokens}
    assert read_completion(body, served(model_folder, slide=True)).sampling.num_tokens == num_tokens
    with pytest.raises(
        Refusal, match=f"must fit in the model's window of {WINDOW} tokens, but the prompt has {length}"
    ):
        read_completion(body, served(model_folder, slide=False))


def test_a_scored_prompt_does_not_slide(model_folder):
    body = {"model": NAME, "echo": True, "logprobs": 1, "max_tokens": 9}
    request = read_completion(body | {"prompt": [40] * WINDOW}, served(model_folder, slide=True))
    assert (request.sampling.num_tokens, request.sampling.tell_prompt) == (9, True)
    with pytest.raises(Refusal, match=r"The prompt with requested probabilities must fit in .* omit `echo`"):
        read_completion(body | {"prompt": [40] * (WINDOW + 1)}, served(model_folder, slide=True))


@pytest.mark.parametrize(("begin", "first"), [(None, 0), (7, 7)])
def test_a_text_without_a_prompt_begins_as_the_model_expects(model_folder, begin, first):
    for body in ({}, {"prompt": ""}, {"prompt": None}, {"prompt": [""]}):
        request = read_completion({"model": NAME} | body, served(model_folder, slide=False, begin=begin))
        assert request.prompts == ((first,),)


def test_an_answer_that_is_kept_whole_has_a_longest_length(model_folder):
    """Whatever its window and its choices, an answer that is not streamed is no longer than without `--slide`."""
    body, most = {"model": NAME, "prompt": [40]}, 128 * WINDOW
    for fields, longest in (({}, most), ({"n": 128}, WINDOW), ({"prompt": [[40], [41]], "n": 2}, most // 4)):
        read_completion(body | fields | {"max_tokens": longest}, served(model_folder, slide=True))
        read_completion(body | fields | {"max_tokens": MOST, "stream": True}, served(model_folder, slide=True))
        with pytest.raises(Refusal, match=f"`max_tokens` must be at most {longest} unless `stream` is true, but is"):
            read_completion(body | fields | {"max_tokens": longest + 1}, served(model_folder, slide=True))


def test_a_prompt_that_slides_has_a_longest_length(model_folder):
    body = {"model": NAME, "max_tokens": 1}
    read_completion(body | {"prompt": [40] * MOST_SLIDING}, served(model_folder, slide=True))
    for prompt in ([40] * (MOST_SLIDING + 1), [[41], [40] * (MOST_SLIDING + 1)], "a b " * MOST_SLIDING):
        with pytest.raises(Refusal, match=f"The prompt must have at most {MOST_SLIDING} tokens, but has"):
            read_completion(body | {"prompt": prompt}, served(model_folder, slide=True))


@pytest.mark.parametrize(
    ("start", "end"), [("[", "]"), ('{"a": ', "}"), ('[{"a": ', "}]")], ids=["lists", "objects", "both"]
)
def test_a_field_may_be_nested_at_any_depth_and_is_refused(model_folder, start, end):
    """At some depths Python can read a value and cannot write it again."""
    known = served(model_folder, slide=False)
    for depth in (1, 10, 800 // len(end), *range(900 // len(end), 1100 // len(end))):
        body = f'{{"model": "{NAME}", "suffix": {start * depth}1{end * depth}}}'.encode()
        with pytest.raises(Refusal, match=r"`suffix` must be omitted or|it is nested too deeply"):
            read_completion(parse(body), known)


def with_byte_level(folder: Path) -> None:
    Tokenizer.train(["the state of the union " * 99], vocab_size=300).save(folder / "tokenizer.json")


def with_word_piece(folder: Path) -> None:
    Tokenizer.train(["the state of the union " * 99], vocab_size=300, objective=Objective.MASKED).save(
        folder / "tokenizer.json"
    )


def with_unigram(folder: Path) -> None:
    """A Unigram that takes many blanks for one, drops accents, and takes unknown characters together."""
    words = [("<unk>", 0.0), ("</s>", 0.0), ("\u2581", -2.0), ("e", -2.0), ("\u2581the", -3.0), ("\u2581state", -4.0)]
    inner = tokenizers.Tokenizer(tokenizers.models.Unigram(words, unk_id=0))
    inner.normalizer = tokenizers.normalizers.Sequence(
        [
            tokenizers.normalizers.NFKD(),
            tokenizers.normalizers.StripAccents(),
            tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    inner.decoder = tokenizers.decoders.Metaspace()
    inner.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("write", [with_byte_level, with_word_piece, with_unigram])
@pytest.mark.parametrize("text", [" ", "\u0301", "\x00", "a", "\N{GRINNING FACE}", "\u00e9"], ids=ascii)
def test_a_prompt_of_too_many_bytes_is_refused_before_it_is_encoded(tmp_path, write, text):
    """Also if the tokenizer would drop most of it, or take it for one token."""
    write(tmp_path)
    known = served(tmp_path, slide=False)
    size = len(text.encode())
    prompt = text * (WINDOW * known.spell.longest // size + 1)
    message = f"must have at most {WINDOW * known.spell.longest:,} bytes"
    for one in (prompt, ["a", prompt]):
        known = served(tmp_path, slide=False)
        with pytest.raises(Refusal, match=message) as caught:
            read_completion({"model": NAME, "prompt": one}, known)
        assert (caught.value.code, caught.value.field) == ("context_length_exceeded", "prompt")
        assert one is not prompt or "encoder" not in vars(known)


def test_a_prompt_of_the_longest_tokens_fills_the_window(model_folder):
    known = served(model_folder, slide=False)
    assert known.spell(0) == b"<|endoftext|>"
    prompt = "<|endoftext|>" * WINDOW
    assert len(prompt) == WINDOW * known.spell.longest
    body = {"model": NAME, "prompt": prompt, "max_tokens": 1}
    assert read_completion(body, known).prompts == ((0,) * WINDOW,)
    with pytest.raises(Refusal, match="must have at most 3,328 bytes"):
        read_completion(body | {"prompt": prompt + "a"}, known)


def test_a_text_to_embed_of_too_many_bytes_is_refused_before_it_is_encoded(encoder_folder):
    for text in ("\x00", "\u0301", "a"):
        known = encoder(encoder_folder)
        most = known.window * known.longest
        with pytest.raises(Refusal, match=rf"`input\[1\]` must have at most {most} bytes \(16 tokens, times"):
            read_embedding({"model": NAME, "input": ["fox", text * (most + 1)]}, known)


def test_prompt_precedes_texts_but_not_ids(encoder_folder):
    plain = encoder(encoder_folder)
    known = replace(plain, prompt="the quick ", num_skipped=3)
    whole, text = (read_embedding({"model": NAME, "input": one}, plain).prompts for one in ("the quick fox", "fox"))
    assert read_embedding({"model": NAME, "input": "fox"}, known).prompts == whole != text
    assert read_embedding({"model": NAME, "input": list(whole[0])}, known).prompts == whole
    with pytest.raises(
        Refusal, match=r"^`input` must have at least one token after the model's prompt, but has none\."
    ):
        read_embedding({"model": NAME, "input": [2, 3]}, known)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "none"},
        {"modalities": ["text"], "store": False},
        {"verbosity": "medium", "reasoning_effort": "none"},
        {"response_format": None, "audio": None},
    ],
)
def test_fields_of_a_chat_that_request_nothing_are_accepted_in_a_completion(model_folder, fields):
    known = served(model_folder, slide=False)
    body = {"model": NAME, "prompt": [40], "seed": 1}
    assert read_completion(body | fields, known) == read_completion(body, known)
    assert read_chat(says("a") | {"seed": 1} | fields, known) == read_chat(says("a") | {"seed": 1}, known)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"response_format": {"type": "json_object"}},
            '`response_format` must be omitted or {"type": "text"}, but is {"type": "json_object"}. Output formats',
        ),
        ({"tools": [{}]}, "`tools` must be omitted or [], but is [{}]. Tools are not supported. Describe them in the"),
        ({"store": True}, "`store` must be omitted or false, but is true. The server stores nothing."),
    ],
)
def test_fields_of_a_chat_that_request_something_are_refused_in_a_completion(model_folder, fields, message):
    with pytest.raises(Refusal) as caught:
        read_completion({"model": NAME, "prompt": [40]} | fields, served(model_folder, slide=False))
    assert caught.value.message.startswith(message)
