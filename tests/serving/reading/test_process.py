"""Requests are read in a process of its own, which a request cannot keep."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crosscut.serving.protocol.fields import RequestKind, parse
from crosscut.serving.protocol.refusals import Refusal
from crosscut.serving.reading.messages import num_id_bytes, read_request
from crosscut.serving.reading.process import ReadingProcess
from tests.pretrained.encoders import V
from tests.serving.conftest import NAME, WINDOW
from tests.serving.protocol.test_requests import encoder, says, served
from tests.timing import quickest

SEEDED = {"model": NAME, "seed": -5}
REQUESTS = [
    (RequestKind.COMPLETION, SEEDED | {"prompt": "Fellow"}),
    (RequestKind.COMPLETION, SEEDED | {"prompt": ["We \u20ac", "<|im_end|>"], "echo": True, "logprobs": 3, "n": 2}),
    (
        RequestKind.COMPLETION,
        SEEDED | {"prompt": [[5], [6] * WINDOW], "echo": True, "max_tokens": 0, "stop": ["a", "b"]},
    ),
    (
        RequestKind.COMPLETION,
        SEEDED | {"logit_bias": {"7": 1.5}, "stream": True, "stream_options": {"include_usage": True}},
    ),
    (RequestKind.CHAT, says("Hello") | {"seed": 1 << 62, "top_p": 0.1 + 0.2}),
]


@pytest.fixture(scope="module")
def process(model_folder: Path) -> Iterator[ReadingProcess]:
    process = ReadingProcess(served(model_folder, slide=False), [RequestKind.COMPLETION], niceness=1)
    yield process
    process.start().kill()


@pytest.mark.parametrize(("kind", "body"), REQUESTS)
def test_a_request_is_the_one_that_is_read_in_this_process(process, model_folder, kind, body):
    content = json.dumps(body).encode()
    assert process.read(kind, content) == read_request(kind, parse(content), served(model_folder, slide=False))


def test_texts_to_embed_are_those_that_are_read_in_this_process(encoder_folder):
    known = encoder(encoder_folder)
    process = ReadingProcess(known, [RequestKind.EMBEDDING])
    for texts in ("the fox", ["dog", "", " fox "], [[1, 2], [V - 1]]):
        content = json.dumps({"model": known.name, "input": texts, "encoding_format": "base64"}).encode()
        kind = RequestKind.EMBEDDING
        assert process.read(kind, content) == read_request(kind, parse(content), known)


def test_a_refusal_keeps_its_fields(process):
    with pytest.raises(Refusal) as caught:
        process.read(RequestKind.COMPLETION, b'{"model": "other"}')
    refusal = caught.value
    assert (refusal.status, refusal.field, refusal.code) == (404, "model", "model_not_found")
    assert refusal.message == f'`model` must be the model that is served (`{NAME}`), but is "other".'


def test_an_ended_process_is_replaced_and_leaves_no_open_files(process):
    ended = process.start()
    ended.send_signal(signal.SIGKILL)
    ended.wait()
    assert process.read(RequestKind.COMPLETION, json.dumps(SEEDED).encode()).num_choices == 1
    assert ended.stdin.closed
    assert ended.stdout.closed


def test_ids_that_are_cut_off_are_not_a_request(process, monkeypatch):
    def killed_first(table):
        process.start().kill()
        process.start().wait()
        return num_id_bytes(table)

    monkeypatch.setattr("crosscut.serving.reading.process.num_id_bytes", killed_first)
    content = json.dumps(SEEDED | {"prompt": [[5] * WINDOW] * 100, "echo": True, "max_tokens": 0}).encode()
    with pytest.raises(RuntimeError, match="ended with the status -9"):
        process.read(RequestKind.COMPLETION, content)


def test_a_failure_of_the_process_is_a_failure_of_its_request(process):
    with pytest.raises(RuntimeError, match="KeyError: 'unknown'"):
        process.read("unknown", b"{}")
    assert process.read(RequestKind.COMPLETION, json.dumps(SEEDED).encode()).num_choices == 1


@pytest.mark.one_in(3)  # only what the process reads differs
@pytest.mark.parametrize("piece", [b'["",0.5],', b"[],", b"{},"])
def test_a_request_that_takes_too_long_ends_and_the_next_one_is_read(model_folder, piece):
    hasty = ReadingProcess(served(model_folder, slide=False), [RequestKind.COMPLETION], patience=0.005)
    told = r"The request must be read within 0\.039 seconds of processor time, but was not. Send a smaller request\."
    with pytest.raises(Refusal, match=told):
        hasty.read(RequestKind.COMPLETION, b'{"x": [' + piece * (3_000_000 // len(piece)) + b"0]}")
    assert hasty.read(RequestKind.COMPLETION, json.dumps(SEEDED).encode()).num_choices == 1


@pytest.mark.one_in(3)  # only the encoding, which is not this process's, differs
@pytest.mark.parametrize(
    ("prompt", "num_tokens"),
    [(["\N{GRINNING FACE}"] * 125_000, 500_000), (["a"] * 500_000, 500_000), (["a "] * 64_000, 64_001)],
    ids=["characters of four bytes", "no blanks", "words"],
)
def test_a_long_prompt_that_is_allowed_takes_this_process_little_time(model_folder, prompt, num_tokens):
    """Encoding it here would hold the interpreter for a large part of a second."""
    process = ReadingProcess(served(model_folder, slide=False, window=1 << 19), [RequestKind.COMPLETION])
    process.start()
    content = json.dumps(SEEDED | {"prompt": "".join(prompt), "max_tokens": 1}).encode()
    requests = []

    def read() -> None:
        requests.append(process.read(RequestKind.COMPLETION, content))

    assert quickest(read, limit=0.15, clock=time.thread_time) < 0.15
    assert len(requests[-1].prompts[0]) == num_tokens
