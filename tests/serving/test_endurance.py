"""A server answers its other clients, whatever one request does. One server for all tests, since one takes seconds."""

import json
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from crosscut.config import ModelConfig
from crosscut.config.published.folders import published_table
from crosscut.launch.stopping import SAME_REQUEST
from crosscut.pretrained.families import published_shapes
from crosscut.serving.protocol.choices import MOST_STOP_CHARACTERS
from crosscut.serving.templates.program import JinjaLimits
from tests.serving.conftest import WINDOW, Server, fork, start

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
NAME, VOCABULARY = "odd", 402
PAD = "[PAD]"
"""A token that the tokenizer has and the model does not."""

BROKEN = WINDOW - 56
"""Position whose embedding is too large for float32: there a text's logits become NaN."""

LONG = {"prompt": [40] * (BROKEN - 2), "max_tokens": 9, "logit_bias": {"0": -100}}
"""A text that reaches the position, because it cannot end before."""

TEMPLATE = """\
{%- set last = messages[-1]['content'] -%}
{%- if last == 'loop' -%}
{%- for i in range(99999) -%}{%- for j in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif last == 'grow' -%}{{ last * 10000000000 }}
{%- elif last == 'swell' -%}{%- for i in range(99999) -%}{{ last * 1000 }}{%- endfor -%}
{%- elif last == 'surrogate' -%}{{ '\\ud800' }}
{%- elif last == 'divide' -%}{{ 1 // 0 }}
{%- else -%}{{ last }}{%- endif -%}
"""


@pytest.fixture(scope="module")
def folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 whose tokenizer has one token more than the model, and one of whose positions is broken."""
    folder = tmp_path_factory.mktemp("models") / NAME
    folder.mkdir()
    shutil.copy(model_folder / "tokenizer.json", folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append(content["added_tokens"][-1] | {"id": VOCABULARY, "content": PAD, "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    model = ModelConfig(
        num_layers=2, hidden_size=32, num_heads=4, vocab_size=VOCABULARY, max_sequence_length=WINDOW, dropout=0.1
    )
    (folder / "config.json").write_text(json.dumps(published_table(model, dtype="float32", begin=0, stops=(0,))))
    draw = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=draw) * 0.25 for name, shape in published_shapes(model).items()}
    weights["wte.weight" if "wte.weight" in weights else "transformer.wte.weight"][0] = 0.0
    weights["wpe.weight" if "wpe.weight" in weights else "transformer.wpe.weight"][BROKEN] = 3e38
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def odd(folder: Path) -> Iterator[Server]:
    server = fork(folder)
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.communicate()


def text(**fields: object) -> dict[str, object]:
    return {"model": NAME, "prompt": "Hello", "max_tokens": 4} | fields


def says(content: str) -> dict[str, object]:
    return {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 4}


def assert_answers(server: Server) -> None:
    status, content = server.ask(TEXT, text())
    assert (status, len(content["choices"])) == (200, 1), content


UNKNOWN = (
    f'must hold only tokens that the model has (ids from 0 to 401), but holds "{PAD}", which only the tokenizer has '
    "(id 402)"
)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (TEXT, text(prompt=f"hello {PAD}"), f"`prompt` {UNKNOWN}"),
        (TEXT, text(prompt=["fine", PAD], echo=True, logprobs=1, max_tokens=0), f"`prompt` {UNKNOWN}"),
        (TEXT, text(prompt=[402]), "`prompt` must hold ids from 0 to 401, but is [402]"),
        (TEXT, text(prompt=[[1], [2, 402]], n=2, stream=True), "`prompt` must hold ids from 0 to 401, but is "),
        (TEXT, text(logit_bias={"402": 1}), "`logit_bias` must have token ids from 0 to 401"),
        (CHAT, says(f"hello {PAD}"), f"`messages` {UNKNOWN}"),
    ],
)
def test_a_token_that_the_model_does_not_have_is_refused(odd, path, body, message):
    status, content = odd.ask(path, body)
    assert status == 400
    assert content["error"]["message"].startswith(message)
    assert_answers(odd)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the template renders an empty text from them. Send more text."),
        ("grow", "the template cannot render them: it needs more than 512 MiB of memory."),
        ("swell", "the template cannot render them: it renders more than 2,097,152 characters."),
        ("surrogate", "the template says: it renders characters that are not Unicode."),
        ("divide", "the template says: integer division or modulo by zero."),
    ],
)
def test_a_template_that_fails_refuses_the_messages_and_renders_the_next(odd, content, message):
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(odd.ask, CHAT, says(content))
        assert_answers(odd)
        status, answer = asked.result()
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert answer["error"]["message"] == f"`messages` must suit the model's chat template, but {message}"
    assert odd.ask(CHAT, says("Hello"))[0] == 200


def test_logits_that_are_not_finite_end_only_the_request_that_meets_them(odd):
    long, short = text(**LONG), text(max_tokens=40, logit_bias={"0": -100})
    told = "The model's logits must be finite, but are not: some are NaN at token 4 after the prompt. "
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(odd.ask, TEXT, short) for _ in range(8)]
        # A text that is read in the same padded pass as a damaged one meets the damage, too.
        wait_until(lambda: odd.ask("/health")[1]["running"] == 8 or all(other.done() for other in others))
        for body in (long, long | {"n": 3}, long | {"prompt": [[40], [40] * (BROKEN - 2)]}, long | {"logprobs": 5}):
            status, content = odd.ask(TEXT, body)
            assert (status, content["error"]["type"]) == (500, "server_error")
            assert content["error"]["message"].startswith(told)
        status, content = odd.ask(TEXT, text(prompt=[40] * (BROKEN + 2), echo=True, logprobs=1, max_tokens=0))
        assert status == 500
        assert "finite, but are not: some are NaN at the prompt. " in content["error"]["message"]
        assert all(other.result()[0] == 200 for other in others)
    odd.wait_for(running=0, waiting=0)


def test_a_stream_with_logits_that_are_not_finite_ends_with_an_error_in_json(odd):
    events = events_of(odd, text(**LONG, logprobs=3, stream=True))
    assert "NaN" not in "".join(events[:-1])
    assert [list(json.loads(event)) for event in events][-1] == ["error"]
    assert "logits must be finite" in events[-1]


def test_a_long_text_of_stops_does_not_delay_other_texts(odd):
    """Each of 16 stop strings holds back as much of the text as it may."""
    stops = ["a" * (MOST_STOP_CHARACTERS - one) for one in range(1, 17)]
    slow = text(max_tokens=WINDOW - 60, logit_bias={"65": 100}, stop=stops, n=2)
    with ThreadPoolExecutor() as pool:
        began = time.monotonic()
        answers = list(pool.map(lambda body: odd.ask(TEXT, body), [slow, *[text()] * 4]))
    assert [status for status, _ in answers] == [200] * 5
    assert {choice["text"] for choice in answers[0][1]["choices"]} == {"a" * (WINDOW - 60)}
    assert time.monotonic() - began < 20


@pytest.mark.slow  # the sockets hold thousands of tokens; test_desk.py covers the server's own bound
def test_a_client_that_never_reads_loses_its_request(odd):
    """Its rows go to others. What the sockets hold comes before the server's own bound."""
    body = text(n=128, max_tokens=WINDOW - 70, logprobs=20, stream=True, logit_bias={"0": -100})
    with closing(posted(odd, TEXT, body)) as connection:
        wait_until(lambda: odd.ask("/health")[1]["waiting"])
        odd.wait_for(running=0, waiting=0)
        assert_answers(odd)
        assert b"The client must read its stream as fast as the model writes" in read_all(connection)


def test_a_server_with_slow_templates_ends_and_its_log_has_the_number_of_a_failure(odd):
    """The server ends with this test, which reads its log. Clients of slow templates delay nobody, once they leave."""
    status, content = odd.ask(TEXT, text(**LONG))
    assert status == 500
    (number,) = re.findall(r"log describes the failure under the number ([0-9]{8})\.$", content["error"]["message"])
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(closing(posted(odd, CHAT, says("loop"))))
        time.sleep(0.2)
        assert_answers(odd)
    began = time.monotonic()
    status, errors = odd.stop()
    assert (status, time.monotonic() - began < JinjaLimits().seconds) == (0, True)
    assert f"Failure {number}: The model's logits must be finite" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.alone
def test_of_slow_chats_whose_clients_left_only_those_that_were_being_read_delay_the_next(folder):
    server = start(folder)
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(closing(posted(server, CHAT, says("loop"))))
        time.sleep(0.5)
    began = time.monotonic()
    assert server.ask(CHAT, says("Hello"))[0] == 200
    assert time.monotonic() - began < 3 * JinjaLimits().seconds
    assert server.stop()[0] == 0


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_second_signal_ends_the_server_at_once(folder, number):
    server = start(folder)
    with ExitStack() as stack:
        for content in ("loop", "loop", "Hello"):
            stack.enter_context(closing(posted(server, CHAT, says(content) | {"max_tokens": WINDOW - 60})))
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(SAME_REQUEST + 0.5)
        began = time.monotonic()
        status, _ = server.stop(number)
    assert (status, time.monotonic() - began < 1) == (128 + number, True)


def posted(server: Server, path: str, body: object) -> socket.socket:
    """A connection that has sent a request and reads nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    connection.sendall(f"{head}\r\nConnection: close\r\n\r\n".encode() + content)
    return connection


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def events_of(server: Server, body: object) -> list[str]:
    with closing(posted(server, TEXT, body)) as connection:
        return re.findall(r"^data: (.*)$", read_all(connection).decode(), re.MULTILINE)


def wait_until(true) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
