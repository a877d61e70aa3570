"""Maximum length of a text, with and without a sliding window."""

from pathlib import Path

import pytest

from crosscut.config.checks import MOST
from crosscut.serving.protocol.fields import parse
from crosscut.serving.protocol.refusals import Refusal
from crosscut.serving.protocol.requests import MOST_SLIDING, Served, read_chat, read_completion
from tests.serving.conftest import NAME, WINDOW


def served(folder: Path, *, slide: bool, begin: int | None = None) -> Served:
    file = folder / "tokenizer.json"
    return Served(
        name=NAME,
        window=WINDOW,
        slide=slide,
        tokenizer=file,
        vocab_size=402,
        begin=begin,
        end_of_text=0,
        stops=frozenset({0, 401}),
        can_chat=True,
        created=0,
    )


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
