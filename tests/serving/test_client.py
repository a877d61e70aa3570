"""The official OpenAI client, unchanged, against real servers."""

import asyncio
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.serving.conftest import NAME, Server

PROMPT = "Fellow citizens of the Senate"
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(whole: Server):
    with client_of(whole) as client:
        yield client


def test_models_are_listed(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "crosscut")
    assert client.models.retrieve(NAME).id == NAME


def test_a_text_is_completed(client):
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0)
    (choice,) = answer.choices
    assert answer.object == "text_completion"
    assert choice.text
    assert choice.finish_reason in ("length", "stop")
    assert answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_line_for_curl_in_the_page_is_answered(whole: Server):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^curl .*?}'$", page, re.DOTALL | re.MULTILINE)
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    command = line.replace("http://127.0.0.1:8000", whole.url).replace("NAME", NAME)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert "text" in json.loads(done.stdout)["choices"][0]


def test_a_stream_tells_the_same_text(client):
    wish = {"model": NAME, "prompt": PROMPT, "max_tokens": 24, "temperature": 0.9, "seed": 5}
    whole = client.completions.create(**wish)
    chunks = list(client.completions.create(**wish, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == [whole.choices[0].finish_reason]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_chat_is_answered(client):
    answer = client.chat.completions.create(model=NAME, messages=QUESTION, max_completion_tokens=10, seed=1)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert answer.usage.completion_tokens <= 10


def test_a_chat_is_streamed(client):
    wish = {"model": NAME, "messages": QUESTION, "max_tokens": 24, "seed": 2}
    whole = client.chat.completions.create(**wish)
    chunks = list(client.chat.completions.create(**wish, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.7, "logit_bias": {"70": 4, "71": -100}}


@pytest.mark.parametrize("penalties", [PENALTIES, pytest.param({}, marks=pytest.mark.slow)], ids=["penalties", "plain"])
def test_the_layout_makes_no_difference(whole, cut, penalties):
    """The other tests of this file need no second layout."""
    wish = {"model": NAME, "prompt": [PROMPT, "We"], "n": 2, "max_tokens": 30, "temperature": 1.0, "seed": 11}
    wish |= penalties
    texts = []
    for server in (whole, cut):
        with client_of(server) as client:
            texts.append([choice.text for choice in client.completions.create(**wish).choices])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 4


def test_choices_come_in_the_order_of_prompts(client):
    wish = {"model": NAME, "max_tokens": 8, "temperature": 0.7, "seed": 3}
    both = client.completions.create(**wish, prompt=["One", "Two"], n=2).choices
    assert [choice.index for choice in both] == [0, 1, 2, 3]
    alone = client.completions.create(**wish, prompt="Two", n=2).choices
    assert [choice.text for choice in both[2:]] == [choice.text for choice in alone]
    streamed = [""] * 4
    for chunk in client.completions.create(**wish, prompt=["One", "Two"], n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in both]


def test_ids_are_a_prompt(client):
    wish = {"model": NAME, "max_tokens": 6, "temperature": 0}
    assert client.completions.create(**wish, prompt=[40, 41, 42]).usage.prompt_tokens == 3
    two = client.completions.create(**wish, prompt=[[40, 41], [42, 43, 44]])
    assert (two.usage.prompt_tokens, len(two.choices)) == (5, 2)


@pytest.mark.parametrize("prompt", ["", None, [""], [0], [[0]]], ids=str)
def test_a_text_without_a_prompt_begins_after_an_end_of_text(whole, prompt):
    wish = {"model": NAME, "max_tokens": 9, "temperature": 0}
    _, expected = whole.ask("/v1/completions", wish | {"prompt": "<|endoftext|>"})
    status, found = whole.ask("/v1/completions", wish | ({} if prompt is None else {"prompt": prompt}))
    assert (status, found["usage"]["prompt_tokens"]) == (200, 1)
    assert [choice["text"] for choice in found["choices"]] == [choice["text"] for choice in expected["choices"]]


def test_tokens_are_favoured_and_disfavoured(client):
    wish = {"model": NAME, "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "logprobs": 0}

    def tokens(**fields: object) -> list[str]:
        return client.completions.create(**wish, **fields).choices[0].logprobs.tokens

    assert set(tokens(logit_bias={"65": 100})) == {"a"}
    assert "a" not in tokens(logit_bias={"65": -100, "0": -100, "401": -100})
    favoured = tokens(presence_penalty=-2, frequency_penalty=-2, logit_bias={"0": -100, "401": -100})
    disfavoured = tokens(presence_penalty=2, frequency_penalty=2, logit_bias={"0": -100, "401": -100})
    assert len(set(favoured)) < len(set(disfavoured))
    answer = client.chat.completions.create(
        model=NAME, messages=QUESTION, max_tokens=5, temperature=0, logit_bias={"65": 100}
    )
    assert answer.choices[0].message.content == "a" * 5


def test_an_echo_begins_with_the_prompt(client):
    wish = {"model": NAME, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    plain = client.completions.create(**wish).choices[0].text
    assert client.completions.create(**wish, echo=True).choices[0].text == PROMPT + plain
    chunks = client.completions.create(**wish, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + plain


def test_special_tokens_in_a_prompt_are_read_and_told_again(client):
    prompt = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
    wish = {"model": NAME, "max_tokens": 6, "temperature": 0}
    completed = client.completions.create(**wish, prompt=prompt, echo=True)
    answered = client.chat.completions.create(**wish, messages=QUESTION[1:])
    assert completed.usage.prompt_tokens == answered.usage.prompt_tokens
    assert completed.choices[0].text == prompt + answered.choices[0].message.content


def test_a_stop_string_ends_the_text_before_it(client):
    wish = {"model": NAME, "prompt": PROMPT, "max_tokens": 40, "temperature": 0.9, "seed": 8}
    text = client.completions.create(**wish).choices[0].text
    stop = text[9:12]
    choice = client.completions.create(**wish, stop=[stop]).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_probabilities_of_a_completion(client):
    wish = {"model": NAME, "prompt": PROMPT, "max_tokens": 10, "temperature": 0, "logprobs": 3}
    choice = client.completions.create(**wish).choices[0]
    told = choice.logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset)
    assert "".join(token for token in told.tokens if not token.startswith("bytes:")) in choice.text or any(
        token.startswith("bytes:") for token in told.tokens
    )
    for token, logprob, likeliest in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert logprob < 0
        assert max(likeliest, key=likeliest.__getitem__) == token  # temperature 0 takes the likeliest
        assert math.isclose(likeliest[token], logprob)
    assert told.text_offset[0] == 0
    chunks = list(client.completions.create(**wish, stream=True))
    assert [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens] == told.tokens
    assert [at for chunk in chunks for at in chunk.choices[0].logprobs.text_offset] == told.text_offset


def test_probabilities_of_a_chat(client):
    wish = {"model": NAME, "messages": QUESTION, "max_tokens": 10, "seed": 4, "logprobs": True, "top_logprobs": 5}
    choice = client.chat.completions.create(**wish).choices[0]
    content = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    assert content.decode(errors="replace") == choice.message.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 5
        assert token.logprob <= token.top_logprobs[0].logprob < 0
    chunks = list(client.chat.completions.create(**wish, stream=True))
    streamed = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert streamed == choice.logprobs.content


def test_without_a_seed_texts_differ(client):
    wish = {"model": NAME, "prompt": PROMPT, "max_tokens": 30}
    texts = {client.completions.create(**wish).choices[0].text for _ in range(3)}
    assert len(texts) == 3


def test_mistakes_are_the_clients_own_errors(client):
    with pytest.raises(openai.NotFoundError, match="`model` must be the model that is served"):
        client.completions.create(model="gpt-5", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="`presence_penalty` must be a number from -2 to 2") as caught:
        client.completions.create(model=NAME, prompt=PROMPT, presence_penalty=3)
    assert (caught.value.param, caught.value.type) == ("presence_penalty", "invalid_request_error")


@pytest.mark.parametrize(
    ("name", "count"),
    # The ranks of the cut model see the same rows; test_the_layout_makes_no_difference compares their texts.
    [
        ("whole", 60),
        pytest.param("whole", 200, marks=pytest.mark.slow),
        pytest.param("cut", 50, marks=pytest.mark.slow),
    ],
)
def test_many_requests_at_once_are_all_answered(name, count, request):
    server = request.getfixturevalue(name)

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:

            async def ask(number: int) -> str:
                if number % 2:
                    answer = await client.completions.create(
                        model=NAME, prompt=f"Number {number}", max_tokens=12, seed=number
                    )
                    return answer.choices[0].text
                stream = await client.chat.completions.create(
                    model=NAME, messages=QUESTION, max_tokens=12, seed=number, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(ask(number) for number in range(count)))

    assert len(asyncio.run(ask_all())) == count
    server.wait_for(running=0, waiting=0)
