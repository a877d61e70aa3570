"""A large request takes the server's own process little time, whichever field is large, and delays no other client.

Times are processor times, which other programs on the machine hardly change.
"""

import contextlib
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.serving.conftest import NAME, WINDOW, Server, start
from tests.serving.protocol.test_refusals import CHAT, TEXT
from tests.serving.test_endurance import events_of
from tests.timing import quickest

LARGE = 8_000_000
MOST = 13 * WINDOW
"""Bytes of the longest prompt: the tokenizer's longest token has 13."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux' times of other processes")


def of_bytes(field: str, size: int) -> str:
    return (
        f"`{field}` must have at most {MOST:,} bytes ({WINDOW} tokens, times 13 bytes of the longest token), but has "
        f"{size:,}. Shorten the text."
    )


def deep(field: str, piece: str) -> bytes:
    """A request whose `field` holds a list of millions of values."""
    return f'{{"model": "{NAME}", "prompt": "a", "{field}": [{piece * (LARGE // len(piece))}0]}}'.encode()


def text(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, **fields}


def chat(*contents: str) -> dict[str, Any]:
    return text(messages=[{"role": "user", "content": content} for content in contents])


REQUESTS = {
    "a prompt": (TEXT, text(prompt="word " * (LARGE // 5)), of_bytes("prompt", LARGE)),
    "a prompt of one word": (TEXT, text(prompt="a" * LARGE), of_bytes("prompt", LARGE)),
    "many prompts": (TEXT, text(prompt=["a", *["word " * 12_000] * 127]), of_bytes("prompt", 60_000)),
    "ids": (TEXT, text(prompt=[5] * (LARGE // 3)), f"tokens, but the prompt has {LARGE // 3}. Shorten the prompt"),
    "a message": (CHAT, chat("word " * 400_000), of_bytes("messages", 2_000_050)),
    "messages": (CHAT, chat(*["a"] * 150_000), "the template cannot render them: it renders more than 2,097,152"),
    "an unknown field": (TEXT, deep("x", "[],"), "`x` must be a known field, but is not. Remove this field."),
    "stop": (TEXT, deep("stop", "[],"), "`stop` must be a string or up to 16 strings, none of them empty, but is [[],"),
    "user": (TEXT, deep("user", "{},")[:-1] + b', "n": 0}', "`n` must be a whole number from 1 to 128, but is 0."),
}


QUICK = ("a prompt", "messages", "an unknown field", "stop")
"""The requests that are read in different ways. What is read takes the server's own process the same time."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in REQUESTS]
)
def test_a_large_request_takes_the_server_little_time(whole, name):
    path, body, message = REQUESTS[name]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    def ask() -> None:
        status, answer = whole.ask(path, content)
        assert (status, message in answer["error"]["message"]) == (400, True), answer

    assert quickest(ask, limit=0.4, clock=lambda: processor_seconds(whole)) < 0.4


@pytest.fixture(scope="module")
def started(model_folder):
    """A server with all objects that its own process has imported, among which the garbage collector may search."""
    server = start(model_folder)
    yield server
    assert server.stop() == (0, "")


IDS = [[40 + number % 300] * (WINDOW - 1) for number in range(128)]
"""As many prompts as a request may have, each as long as it may be."""
BESIDE = {
    "prompts of 8 MB": (32, TEXT, text(prompt="word " * (LARGE // 5)), 400),
    "a few prompts of 8 MB": (6, TEXT, text(prompt="word " * (LARGE // 5)), 400),
    "lists of ids": (8, TEXT, text(prompt=[5] * (LARGE // 3)), 400),
    "128 prompts": (8, TEXT, text(prompt=["word " * 80] * 128, max_tokens=1), 200),
    "200,000 messages": (4, CHAT, chat(*["a"] * 200_000), 400),
    "echo with probabilities": (2, TEXT, text(prompt=IDS, echo=True, logprobs=5, max_tokens=0), 200),
    "streamed echo": (2, TEXT, text(prompt=IDS, echo=True, logprobs=5, max_tokens=0, stream=True), 200),
    "chat with probabilities": (2, CHAT, chat("We") | {"n": 128, "logprobs": True, "top_logprobs": 20}, 200),
}
"""Requests that are sent at the same time: their number, path and body, and the status of the answers."""


@pytest.mark.parametrize(
    "name",
    [name if name.startswith("a few") else pytest.param(name, marks=pytest.mark.slow) for name in BESIDE],
)
def test_streams_and_health_go_on_beside_large_requests(request, name):
    """The wait for an answer on an idle machine is at most the processor time of the server meanwhile."""
    number, path, body, status = BESIDE[name]
    whole = request.getfixturevalue("whole" if name.startswith("a few") else "started")
    content, waits = json.dumps(body).encode(), []
    short = text(prompt="We", max_tokens=5, stream=True, logit_bias={"0": -100, "401": -100})
    with ThreadPoolExecutor(number) as pool:
        others = [pool.submit(status_of, whole, path, content) for _ in range(number)]
        while not (all(other.done() for other in others) and waits):
            began, before = time.monotonic(), processor_seconds(whole)
            assert whole.ask("/health")[0] == 200
            waits.append(min(time.monotonic() - began, processor_seconds(whole) - before))
            assert events_of(whole, short)[-1] == "[DONE]"
    assert {other.result() for other in others} == {status}
    assert max(waits) < 0.2


def test_an_echo_with_probabilities_is_told_without_stopping_the_server(whole):
    """All prompts are spelled token by token, and the answer has 22 numbers for each token."""
    prompt = [[40 + number % 300] * (WINDOW - 1) for number in range(64)]
    status, answer = whole.ask(TEXT, text(prompt=prompt, echo=True, logprobs=0, max_tokens=0))
    assert status == 200
    tokens = [choice["logprobs"]["tokens"] for choice in answer["choices"]]
    assert [len(one) for one in tokens] == [WINDOW - 1] * 64
    assert ["".join(one) for one in tokens[100:]] == [choice["text"] for choice in answer["choices"]][100:]


def status_of(server: Server, path: str, content: bytes) -> int:
    """Status of the answer to a request. The answer is read to its end."""
    request = urllib.request.Request(server.url + path, content, {"Content-Type": "application/json"})
    with contextlib.suppress(urllib.error.HTTPError), urllib.request.urlopen(request, timeout=200) as response:
        response.read()
        return response.status
    return 400


def processor_seconds(server: Server) -> float:
    """Processor time of all threads of the server's own process, in seconds."""
    threads = Path(f"/proc/{server.process.pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
