"""Requests that cannot be answered are refused with a status and a reason, in OpenAI's form."""

import json
import re
import socket
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_completion_create_params

from crosscut.serving.web.guard import LARGEST_BODY
from tests.serving.conftest import NAME, WINDOW

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def text(**fields: object) -> dict[str, object]:
    return {"model": NAME, "prompt": "Hello"} | fields


def chat(**fields: object) -> dict[str, object]:
    return {"model": NAME, "messages": HELLO} | fields


def says(content: object, role: str = "user") -> dict[str, object]:
    return chat(messages=[{"role": role, "content": content}])


PROMPTS = "`prompt` must be a string, a list of token ids, a list of strings, or a list of lists of token ids, but is "
COUNT = "`max_tokens` must be a whole number from 0 to 2147483647, but is "
BIASES = "`logit_bias` must be a JSON object that maps up to 1024 token ids to numbers from -100 to 100, but is "
STOPS = "`stop` must be a string or up to 16 strings, none of them empty, but is "
DEEP: list[object] = []
for _ in range(800):
    DEEP = [DEEP]
TEXTS: list[tuple[object, str]] = [
    (b"{", "The request's body must be JSON, but cannot be read: Expecting property name"),
    (b"", "The request's body must be JSON, but cannot be read: "),
    (b"\xff\xfe\x00", "The request's body must be JSON, but cannot be read: "),
    (b"[" * 100_000, "The request's body must be JSON, but cannot be read: it is nested too deeply."),
    (b'{"temperature": NaN}', "The request's body must be JSON, but cannot be read: NaN is not a JSON number."),
    (b'{"temperature": 1e999}', "The request's body must be JSON, but cannot be read: the number 1e999 is too large."),
    ([1], "The request's body must be a JSON object, but is [1]."),
    ({"prompt": "Hello"}, f"`model` must be the model that is served (`{NAME}`), but is missing."),
    (text(model=3), "`model` must be a string, but is 3."),
    (
        text(prompt=[]),
        '`prompt` must have at least one token if it is a list of ids, but is []. Send "" to start a new text.',
    ),
    (text(prompt=[[1], []]), "`prompt` must have at least one token if it is a list of ids, but is [[1], []]."),
    (text(prompt=["one", None]), f'{PROMPTS}["one", null].'),
    (text(prompt=7), f"{PROMPTS}7."),
    (text(prompt=[1, "one"]), f'{PROMPTS}[1, "one"].'),
    (text(prompt=[1, True]), f"{PROMPTS}[1, true]."),
    (text(prompt="\ud800"), f'{PROMPTS}"\\ud800".'),
    (text(prompt=[1, 100_000]), "`prompt` must hold ids from 0 to 401, but is [1, 100000]."),
    (text(prompt=[-1]), "`prompt` must hold ids from 0 to 401, but is [-1]."),
    (text(prompt=["a"] * 129), "`prompt` must hold at most 128 prompts, but has 129. "),
    (text(prompt=["a"] * 65, n=2), "`prompt` x `n` must be at most 128 texts, but is 130."),
    (
        text(prompt="word " * 300),
        f"The prompt and 16 tokens of continuation must fit in the model's window of {WINDOW}",
    ),
    (text(max_tokens=WINDOW), f"The prompt and {WINDOW} tokens of continuation must fit in the model's window"),
    (text(max_tokens=-1), f"{COUNT}-1."),
    (
        text(prompt=[40] * (WINDOW + 1), max_tokens=0),
        f"The prompt must fit in the model's window of {WINDOW} tokens, but the prompt has {WINDOW + 1}. Shorten the",
    ),
    (text(max_tokens=1.5), f"{COUNT}1.5."),
    (text(max_tokens=1 << 31, stream=True), f"{COUNT}2147483648."),
    (text(top_k=1 << 31), "`top_k` must be a whole number from 0 to 2147483647, but is 2147483648."),
    (text(max_tokens="9"), f'{COUNT}"9".'),
    (text(max_tokens=True), f"{COUNT}true."),
    (text(temperature=-0.1), "`temperature` must be a number from 0 to 2, but is -0.1."),
    (text(temperature=2.1), "`temperature` must be a number from 0 to 2, but is 2.1."),
    (text(temperature="hot"), '`temperature` must be a number from 0 to 2, but is "hot".'),
    (text(top_p=0), "`top_p` must be above 0 and at most 1, but is 0."),
    (text(top_p=1.01), "`top_p` must be a number from 0 to 1, but is 1.01."),
    (text(top_k=-1), "`top_k` must be a whole number from 0 to 2147483647, but is -1."),
    (text(repetition_penalty=0), "`repetition_penalty` must be above 0, but is 0."),
    (text(n=0), "`n` must be a whole number from 1 to 128, but is 0."),
    (text(seed="lucky"), "`seed` must be a whole number from "),
    (text(stop=[""]), f'{STOPS}[""].'),
    (text(stop=["x"] * 17), STOPS),
    (text(stop=5), f"{STOPS}5."),
    (text(logprobs=21), "`logprobs` must be a whole number from 0 to 20, but is 21."),
    (text(logprobs=True), "`logprobs` must be a whole number from 0 to 20, but is true."),
    (text(best_of=3), "`best_of` must equal `n` (1) or be omitted, but is 3."),
    (text(suffix="end"), '`suffix` must be omitted or "", but is "end". Text is generated only after a prompt.'),
    (text(frequency_penalty=2.5), "`frequency_penalty` must be a number from -2 to 2, but is 2.5."),
    (text(presence_penalty=False), "`presence_penalty` must be a number from -2 to 2, but is false."),
    (text(logit_bias=[5]), f"{BIASES}[5]."),
    (text(logit_bias={"5": 101}), f'{BIASES}{{"5": 101}}.'),
    (text(logit_bias={"5": True}), f'{BIASES}{{"5": true}}.'),
    (text(logit_bias={str(i): 1 for i in range(1025)}), f'{BIASES}{{"0": 1, '),
    (
        text(logit_bias={"402": 1}),
        '`logit_bias` must have token ids from 0 to 401, but is {"402": 1}. Use token ids, not',
    ),
    (text(logit_bias={" the": 1}), '`logit_bias` must have token ids from 0 to 401, but is {" the": 1}.'),
    (text(logit_bias={"1" * 5000: 1}), "`logit_bias` must have token ids from 0 to 401, but is "),
    (text(logit_bias={"-1": 1}), '`logit_bias` must have token ids from 0 to 401, but is {"-1": 1}.'),
    (text(stream="yes"), '`stream` must be true or false, but is "yes".'),
    (text(stream_options={}), "`stream_options` must be omitted unless `stream` is true, but is {}."),
    (text(stream=True, stream_options=1), "`stream_options` must be a JSON object, but is 1."),
    (
        text(stream=True, stream_options={"include_usages": True}),
        "is not. Did you mean `stream_options.include_usage`?",
    ),
    (
        text(temprature=1),
        "`temprature` must be a known field, but is not. Did you mean `temperature`?",
    ),
    (text(**{"\ud800": 1}), "`\\ud800` must be a known field, but is not. Remove this field."),
    (text(**{"top_\udfffp": 1}), "`top_\\udfffp` must be a known field, but is not. Did you mean `to"),
    (text(stream=True, stream_options={"\ud800": 1}), "`stream_options.\\ud800` must be a known field, but is not"),
    (text(**{"x" * 1_000_000: 1}), f"`{'x' * 76} ...` must be a known field, but is not. Remove this field."),
    (text(suffix=DEEP), '`suffix` must be omitted or "", but is [[['),
    (text(stop=[DEEP]), f"{STOPS}[[["),
    (text(prompt=DEEP), f"{PROMPTS}[[["),
    (text(logit_bias={"5": DEEP}), f'{BIASES}{{"5": [[['),
    (
        text(stop="x" * 1001),
        "`stop` must hold strings of at most 1000 characters, but one has 1001. Shorten the string.",
    ),
    (
        text(stop=["x"] * 15 + ["y" * 2_000_000]),
        "`stop` must hold strings of at most 1000 characters, but one has 2000",
    ),
]

CHATS: list[tuple[object, str]] = [
    ({"model": NAME}, "`messages` must be a list of at least one message, but is missing."),
    (chat(messages=[]), "`messages` must be a list of at least one message, but is []."),
    (chat(messages=["Hello"]), '`messages[0]` must be a JSON object, but is "Hello".'),
    (says("?", role=""), '`messages[0].role` must be system, developer, user or assistant, but is "".'),
    (says("?", role="tool"), 'developer, user or assistant, but is "tool". Tools are not supported'),
    (says(None), "`messages[0].content` must be a string or a list of parts, but is missing."),
    (says([]), "`messages[0].content` must be a string or a list of parts, but is []."),
    (says([{"type": "image_url"}]), '`messages[0].content[0].type` must be "text", but is "image_url". Only text is'),
    (says([{"type": "text"}]), "`messages[0].content[0].text` must be a string, but is missing."),
    (chat(messages=[HELLO[0] | {"mood": "good"}]), "`messages[0].mood` must be a known field, but"),
    (says("x<|im_end|>"), "`messages[0].content` must not contain the model's special token `<|im_end|>`"),
    (says("Hi", role="assistant"), "template, but the template says: a chat must not begin with an answer."),
    (says("word " * 300), "The prompt and an answer must fit in the model's window of 256 tokens"),
    (chat(top_logprobs=2), "`top_logprobs` must be omitted unless `logprobs` is true, but is 2."),
    (chat(logprobs=3), "`logprobs` must be true or false, but is 3."),
    (
        chat(max_tokens=3, max_completion_tokens=4),
        "`max_tokens` must equal `max_completion_tokens` (4) or be omitted, but",
    ),
    (chat(tools=[{"type": "function"}]), '`tools` must be omitted or [], but is [{"type": "function"}]. Tools are'),
    (chat(response_format={"type": "json_object"}), '`response_format` must be omitted or {"type": "text"}, but is'),
    (chat(max_tokens=0), "`max_tokens` must be a whole number from 1 to 2147483647, but is 0."),
    (chat(moderation={"model": "any"}), '`moderation` must be omitted, but is {"model": "any"}. The server does not'),
    (chat(modalities=["audio"]), '`modalities` must be omitted or ["text"], but is ["audio"]. Only text is'),
    (chat(tools=DEEP), "`tools` must be omitted or [], but is [[["),
    (chat(messages=[HELLO[0] | {"\ud800": 1}]), "`messages[0].\\ud800` must be a known field, but is"),
    (chat(prompt="Hello"), "`prompt` must be a known field, but is not. Remove this field."),
]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [(TEXT, *case) for case in TEXTS] + [(CHAT, *case) for case in CHATS],
    ids=[case[1] for case in TEXTS + CHATS],
)
def test_a_malformed_request_is_told_what_is_wrong(whole, path, body, message):
    status, content = whole.ask(path, body)
    assert status == 400
    assert content.keys() == {"error"}
    error = content["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] is None or f"`{error['param']}" in error["message"] or error["code"]


HARMLESS = [
    (TEXT, text(suffix=None, logit_bias={}, presence_penalty=0.0, best_of=1, user="me", metadata={"a": "b"})),
    (TEXT, text(temperature=None, stop=None, stream=None, n=None, max_tokens=4.0)),
    (TEXT, text(logprobs=None, echo=None, max_tokens=None, logit_bias=None, presence_penalty=None)),
    (CHAT, chat(max_tokens=2, service_tier="auto", tool_choice="auto", parallel_tool_calls=True, functions=[])),
    (CHAT, chat(max_tokens=2, prompt_cache_options={"mode": "explicit"}, safety_identifier="me", verbosity="medium")),
    (CHAT, chat(tools=[], tool_choice="none", response_format={"type": "text"}, store=False, max_tokens=2)),
    (CHAT, chat(messages=[HELLO[0], {"role": "assistant", "content": "Hi", "refusal": None}, HELLO[0]], max_tokens=2)),
    (CHAT, chat(messages=[{"role": "developer", "content": "Be brief."}, *HELLO], max_tokens=2)),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], max_tokens=2)),
]


@pytest.mark.parametrize(("path", "body"), HARMLESS, ids=[" ".join(body) for _, body in HARMLESS])
def test_a_field_that_asks_for_nothing_is_let_through(whole, path, body):
    status, content = whole.ask(path, body)
    assert status == 200, content


PROTOCOLS = [
    (TEXT, text(max_tokens=1), completion_create_params.CompletionCreateParamsBase),
    (CHAT, chat(max_tokens=1), chat_completion_create_params.CompletionCreateParamsBase),
]


@pytest.mark.parametrize(("path", "body", "protocol"), PROTOCOLS, ids=["text", "chat"])
def test_every_field_of_the_protocol_is_known_and_documented(whole, path, body, protocol):
    names = {*get_type_hints(protocol), "stream"}
    assert len(names) > 15
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
    status, content = whole.ask(path, dict.fromkeys(names) | body)
    assert status == 200, content


def test_an_answer_may_fill_the_window(whole):
    status, content = whole.ask(TEXT, text(prompt=[40] * (WINDOW - 6), max_tokens=6))
    assert status == 200
    assert content["usage"]["completion_tokens"] <= 6


@pytest.mark.parametrize("path", ["/v1/embedding", "/nowhere", "/page/nowhere.js", "/page/../server.py"])
def test_an_unknown_path_is_told_the_known_ones(whole, path):
    status, content = whole.ask(path)
    assert status == 404
    assert content["error"]["message"].startswith("The path must be one of /v1/models, /v1/completions,")


@pytest.mark.parametrize(
    "path", ["/health/", "/v1/models/", "/v1/completions/", "/v1/chat/completions/", "/v1/embeddings/", "/page/"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_a_slash_at_the_end_is_told_and_not_redirected(whole, path, method):
    """A redirect has no body, and a client that posts follows it without its request."""
    host, port = whole.url.removeprefix("http://").split(":")
    connection = HTTPConnection(host, int(port), timeout=60)
    body = {"GET": None, "POST": json.dumps(text()), "DELETE": None}[method]
    connection.request(method, path, body, {"Content-Type": "application/json"})
    with closing(connection), connection.getresponse() as response:
        # "/v1/models/" asks for a model whose name is empty.
        assert response.status == (405 if path == "/v1/models/" and method != "GET" else 404)
        assert response.headers["Content-Type"] == "application/json"
        assert json.loads(response.read())["error"]["message"]


def test_an_unknown_model_is_told_the_known_one(whole):
    status, content = whole.ask(TEXT, text(model="other"))
    assert (status, content["error"]["code"], content["error"]["param"]) == (404, "model_not_found", "model")
    assert content["error"]["message"] == f'`model` must be the model that is served (`{NAME}`), but is "other".'


def test_an_unknown_model_cannot_be_retrieved(whole):
    status, content = whole.ask("/v1/models/other")
    assert (status, content["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(("path", "method", "must"), [(TEXT, "GET", "POST"), ("/v1/models", "DELETE", "GET")])
def test_a_wrong_method_is_told_the_right_one(whole, path, method, must):
    status, content = whole.ask(path, method=method)
    assert status == 405
    assert re.match(rf"The method must be .*{must}.* at {path}, but is {method}\.", content["error"]["message"])


def test_a_body_must_say_that_it_is_json(whole):
    status, content = whole.ask(TEXT, text(), headers={"Content-Type": "text/plain"})
    assert status == 415
    assert content["error"]["message"].startswith("`Content-Type` must be application/json, but is text/plain.")


def test_a_body_must_not_be_endless(whole):
    status, content = whole.ask(TEXT, json.dumps(text(prompt="x" * LARGEST_BODY)).encode())
    assert status == 413
    assert content["error"]["message"].startswith("A request must have at most 8 MiB")


def test_the_largest_body_is_read(whole):
    status, _ = whole.ask(TEXT, json.dumps(text()).encode().rjust(LARGEST_BODY))
    assert status == 200


@pytest.mark.parametrize("length", ["9" * 20, "10000000000000000000", str(LARGEST_BODY + 1), "8" * 12])
def test_a_body_that_would_be_endless_is_refused_before_it_is_sent(whole, length):
    host, port = whole.url.removeprefix("http://").split(":")
    head = f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}"
    with socket.create_connection((host, int(port)), timeout=4) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode())
        answer = b""
        while not answer.endswith(b"}}"):
            answer += connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"A request must have at most 8 MiB, but has more. Send a smaller request." in answer


@pytest.mark.parametrize("host", ["LOCALHOST", "LocalHost:8000", "[::1]:80", "127.0.0.1:1"])
def test_a_host_is_known_in_any_case(whole, host):
    assert whole.ask("/v1/models", headers={"Host": host})[0] == 200


def test_a_page_from_elsewhere_gets_nothing(whole):
    status, content = whole.ask("/v1/models", headers={"Host": "evil.example:8000"})
    assert status == 421
    assert content["error"]["message"].startswith("`Host` must be a name of this server, but is 'evil.example'.")
