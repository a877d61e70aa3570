"""The life of a server: starting, giving up what nobody waits for, stopping."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing
from http.client import HTTPConnection
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from crosscut.cli.serve import serve as command
from crosscut.config import ConfigError, LayoutError
from crosscut.data import read_documents
from crosscut.serving import server as server_module
from crosscut.serving.desk import Desk
from crosscut.serving.server import ServerOptions, serve
from tests.cli.conftest import TINY
from tests.refusals import refusal
from tests.serving.conftest import NAME, WINDOW, Server, start

KEY = {"Authorization": "Bearer secret"}

LONG = {"model": NAME, "prompt": "We", "max_tokens": WINDOW - 10, "temperature": 2.0, "n": 4}
"""A request that keeps four rows busy for hundreds of steps, unless the model ends a text by chance."""


def post(server: Server, body: object, headers: Mapping[str, str] = MappingProxyType({})) -> HTTPConnection:
    """Send a request and do not wait for the answer."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = HTTPConnection(host, int(port), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", **headers})
    return connection


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole answer"])
@pytest.mark.parametrize(
    "name",
    ["whole", pytest.param("cut", marks=pytest.mark.slow)],  # starts two ranks; test_news.py cancels texts on two ranks
)
def test_a_client_that_goes_away_frees_its_rows(name, stream, request):
    server: Server = request.getfixturevalue(name)
    connections = [post(server, LONG | {"stream": stream, "n": 128}) for _ in range(3)]
    deadline = time.monotonic() + 60
    while not server.ask("/health")[1]["waiting"]:
        assert time.monotonic() < deadline
    for connection in connections:
        connection.close()
    server.wait_for(running=0, waiting=0)
    began = time.monotonic()
    assert server.ask("/v1/completions", LONG | {"n": 1, "max_tokens": 1})[0] == 200
    assert time.monotonic() - began < 5  # 384 texts of 246 tokens would keep it waiting for longer


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_stopped_server_answers_what_it_has(model_folder, tensor, number):
    server = start(model_folder, "--tensor", str(tensor))
    with closing(post(server, LONG)) as connection:
        server.wait_for(running=4)
        assert server.stop(number) == (0, "")
        assert_whole(connection)


def assert_whole(connection: HTTPConnection) -> None:
    """The answer is there, and complete."""
    with connection.getresponse() as response:
        choices = json.loads(response.read())["choices"]
    assert [choice["finish_reason"] in ("length", "stop") for choice in choices] == [True] * 4


@pytest.mark.slow
def test_a_key_is_asked_for_and_an_interrupt_ends_it_well(model_folder):
    """One server for both, since starting one takes seconds."""
    server = start(model_folder, "--host", "0.0.0.0", CROSSCUT_API_KEY="secret")
    server.url = server.url.replace("0.0.0.0", "127.0.0.1")
    for headers, what in (({}, "is missing"), ({"Authorization": "Bearer wrong"}, "has a different value")):
        status, content = server.ask("/v1/models", headers=headers)
        assert (status, content["error"]["code"]) == (401, "invalid_api_key")
        assert (
            f"`Authorization` must be `Bearer` followed by the server's key, but {what}." in content["error"]["message"]
        )
    assert server.ask("/v1/models", headers=KEY | {"Host": "model.example"})[0] == 200
    with closing(post(server, LONG, headers=KEY)) as connection:
        server.wait_for(running=4)  # without a key
        assert server.stop(signal.SIGINT) == (0, "")
        assert_whole(connection)


def trained(folder: Path, *overrides: str) -> Path:
    """Folder of a run that was trained for a few steps."""
    text = next(iter(read_documents(["builtin:state-of-the-union"], text_key="text"))).text
    (folder / "book.txt").write_text("\n\n".join(text[i : i + 500] for i in range(0, len(text), 500)) * 20)
    run = folder / "run"
    options = (*TINY, f"data.text={folder / 'book.txt'}", f"output.folder={run}", "training.device=cpu", *overrides)
    subprocess.run([sys.executable, "-m", "crosscut", "train", *options], check=True, capture_output=True)
    return run


@pytest.mark.slow  # tests/model/test_cache.py continues states beside others
def test_texts_of_a_model_with_states_do_not_depend_on_the_texts_before_and_beside_them(tmp_path):
    layers = ("model.layers=['mamba2 gelu', 'attention']", "model.mamba2.head_size=8", "model.mamba2.chunk_size=8")
    server = start(trained(tmp_path, *layers), "--rows", "2")
    (model,) = server.ask("/v1/models")[1]["data"]
    prompts = ["We", "The state of our union is strong, and", "My fellow Americans", "Tonight"]

    def text_of(prompt: str) -> str:
        body = {"model": model["id"], "prompt": prompt, "max_tokens": 20, "temperature": 0}
        return str(server.ask("/v1/completions", body)[1]["choices"][0]["text"])

    alone = [text_of(prompt) for prompt in prompts]
    assert len(set(alone)) > 1
    with ThreadPoolExecutor(8) as pool:  # rows are used again and again
        assert list(pool.map(text_of, prompts * 4)) == alone * 4
    assert server.stop() == (0, "")


@pytest.mark.slow
def test_a_run_is_served_at_its_newest_checkpoint(tmp_path):
    """It has no chat template, so it completes text only."""
    server = start(trained(tmp_path))
    (model,) = server.ask("/v1/models")[1]["data"]
    assert model["id"].startswith("run/step-")
    assert model["chat"] is False
    assert server.ask(f"/v1/models/{model['id']}") == (200, model)
    status, content = server.ask("/v1/completions", {"model": model["id"], "prompt": "We", "max_tokens": 5})
    assert status == 200
    assert content["model"] == model["id"]
    chat = {"model": model["id"], "messages": [{"role": "user", "content": "Hello"}]}
    status, content = server.ask("/v1/chat/completions", chat)
    assert (status, content["error"]["code"]) == (400, "no_chat_template")
    assert content["error"]["message"].endswith("must have a chat template to chat, but has none. Use /v1/completions.")
    assert server.stop() == (0, "")


@pytest.mark.slow
def test_texts_outgrow_the_window_where_they_may(model_folder):
    """Beside others, and after a prompt that is longer than the window itself."""
    server = start(model_folder, "--slide", "--rows", "2")
    tokens = WINDOW + 50
    wish = {"model": NAME, "max_tokens": tokens, "logit_bias": {"0": -100, "401": -100}, "seed": 2}
    status, together = server.ask("/v1/completions", wish | {"prompt": [[40], [41] * tokens], "n": 2})
    assert status == 200
    assert together["usage"] == {
        "prompt_tokens": 1 + tokens,
        "completion_tokens": 4 * tokens,
        "total_tokens": 5 * tokens + 1,
    }
    alone = [
        server.ask("/v1/completions", wish | {"prompt": prompt})[1]["choices"][0] for prompt in ([40], [41] * tokens)
    ]
    assert [choice["text"] for choice in alone] == [choice["text"] for choice in together["choices"][::2]]
    assert server.stop() == (0, "")


@pytest.mark.parametrize(("rows", "is_packed"), [(2, False), (16, True)])
def test_weights_are_packed_where_some_texts_are_written_at_once(model_folder, monkeypatch, rows, is_packed):
    from crosscut.kernels.onednn import IS_THERE
    from crosscut.serving import server

    def stop(model: torch.nn.Module, *_arguments: object, **_options: object) -> None:
        raise InterruptedError(model.blocks[0].mlp.contract.weight._local_tensor.is_mkldnn)

    monkeypatch.setattr(server, "Decoder", stop)
    with pytest.raises(InterruptedError, match=f"^{is_packed and IS_THERE}$"):
        serve(str(model_folder), ServerOptions(port=0, rows=rows, device="cpu"))


def test_a_client_that_never_reads_is_told_in_one_line_at_the_end(monkeypatch, capfd):
    monkeypatch.setattr(server_module, "_UNTIL_CLOSED", 0.5)

    async def endless(_: object) -> StreamingResponse:
        async def chunks() -> AsyncIterator[bytes]:
            while not ended.is_set():  # a closed connection takes everything, so this thread would never rest
                yield bytes(1 << 16)

        return StreamingResponse(chunks())

    @asynccontextmanager
    async def opened(_: object) -> AsyncIterator[None]:
        desk.open()
        yield

    desk, ended = Desk(1), threading.Event()
    application = Starlette(routes=[Route("/", endless)], lifespan=opened)
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as clients:
        clients.callback(ended.set)
        with server_module._talking(application, listener, desk):
            for _ in range(2):
                client = clients.enter_context(socket.create_connection(listener.getsockname()))
                client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert client.recv(1)
        assert capfd.readouterr().err == (
            "crosscut: 2 clients had not read the whole answer when the server ended. The rest was not sent.\n"
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"port": port}, f"`--port` must be from 0 to 65535, but is {port}.") for port in (-1, 65_536, 99_999_999)),
        *(({"rows": rows}, f"`--rows` must be from 1 to 1024, but is {rows}") for rows in (0, -1, 1025, 10**11)),
        ({"host": "0.0.0.0"}, "`--api-key` must be set if other machines can reach the server"),
        ({"api_key": ""}, "`--api-key` must not be empty, but is"),
    ],
    ids=str,
)
def test_options_that_no_server_can_have_are_refused(options, message):
    assert refusal(ConfigError, ServerOptions, **options).startswith(message)


@pytest.mark.parametrize(
    ("key", "bad"), [("schlüssel", "ü"), ("two words", " "), ("line\n", "\n"), ("\udc80", "\udc80"), ("clé", "é")]
)
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(key, bad):
    assert refusal(ConfigError, ServerOptions, api_key=key) == (
        f"`--api-key` must consist of ASCII letters, digits and punctuation, but contains {bad!r}. HTTP clients send "
        "only ASCII in a header. Choose another key."
    )


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (0, "`layout.tensor` must be at least 1, but is 0"),
        (-1, "`layout.tensor` must be at least 1, but is -1"),
        (3, r"must divide `model.num_heads` \(4\), but is 3"),
    ],
)
def test_a_layout_that_the_model_does_not_allow_is_refused(model_folder, tensor, message):
    with pytest.raises(LayoutError if tensor > 0 else ConfigError, match=message):
        serve(str(model_folder), ServerOptions(tensor=tensor, device="cpu"))


@pytest.mark.parametrize("end", [-5, [1, -1], 1 << 31, 10**30])
def test_an_end_of_text_that_is_no_id_is_told(model_folder, tmp_path, end):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    no_id = r"`eos_token_id` in `.*generation_config.json` must be an id or a list of ids,"
    with pytest.raises(ConfigError, match=no_id):
        serve(str(folder), ServerOptions(device="cpu"))


def test_a_port_that_is_taken_is_told(model_folder):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"free address .*, but 127.0.0.1 with port {port} is not available: "):
            serve(str(model_folder), ServerOptions(port=port, device="cpu"))


def test_a_place_without_a_model_is_told(tmp_path):
    with pytest.raises(ConfigError, match="must be a run's folder, a checkpoint or a Hugging Face folder, but has no"):
        serve(str(tmp_path), ServerOptions())


def test_a_missing_package_is_told_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setattr("crosscut.cli.serve.find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(ConfigError, match=r"but uvicorn cannot be found. Run `.*\[serve\]"):
        command.callback(place=str(tmp_path))
