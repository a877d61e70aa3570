"""A tiny model folder with a chat template, and real servers of it."""

import asyncio
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from crosscut.cli import main
from crosscut.config.system.machine import leave_with_parent
from crosscut.data import Tokenizer, read_documents
from crosscut.launch.server import PassedStream
from tests.nursery import forked
from tests.pretrained.encoders import make_encoder

TEMPLATE = """\
{% for message in messages %}
{% if message['role'] == 'assistant' and loop.first %}
{{ raise_exception('a chat must not begin with an answer') }}
{% endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{% endfor %}
{% if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' -}}
{% endif %}
"""

WINDOW = 256
NAME = "tiny-llama"
ENCODER = "tiny-bert"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with random weights, in Hugging Face's form."""
    folder = tmp_path_factory.mktemp("models") / NAME
    folder.mkdir()
    vocab_size = write_tokenizer(folder)
    write_weights(folder, vocab_size)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_tokenizer(folder: Path) -> int:
    """Write a byte-level BPE with the tokens of a chat. Returns the size of the vocabulary."""
    text = next(iter(read_documents(["builtin:state-of-the-union"], text_key="text"))).text
    file = folder / "tokenizer.json"
    Tokenizer.train([text], vocab_size=400).save(file)
    content = json.loads(file.read_text())
    size = len(content["model"]["vocab"])
    plain = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    marks = [{"id": size + i, "content": f"<|im_{name}|>"} | plain for i, name in enumerate(("start", "end"))]
    content["added_tokens"] += marks
    file.write_text(json.dumps(content))
    config = {"bos_token": None, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, size + 1]}))
    return size + 2


def write_weights(folder: Path, vocab_size: int) -> None:
    hidden, mlp, layers, heads, key_value_heads = 32, 64, 2, 4, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "max_position_embeddings": WINDOW,
        "vocab_size": vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    narrow = hidden * key_value_heads // heads
    shapes = {"model.embed_tokens": (vocab_size, hidden), "model.norm": (hidden,)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.input_layernorm": (hidden,), f"{name}.post_attention_layernorm": (hidden,)}
        shapes |= {f"{name}.self_attn.{one}_proj": (hidden, hidden) for one in "qo"}
        shapes |= {f"{name}.self_attn.{one}_proj": (narrow, hidden) for one in "kv"}
        shapes |= {f"{name}.mlp.{one}_proj": (mlp, hidden) for one in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj": (hidden, mlp)}
    draw = torch.Generator().manual_seed(1)
    weights = {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=draw) * 0.25
        for name, shape in shapes.items()
    }
    weights["model.embed_tokens.weight"][[0, vocab_size - 1]] = 0.0  # those that end a text are never the likeliest
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test, such as the clients' side of a server, in an event loop."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@dataclass
class Server:
    """A running `crosscut serve`."""

    process: "subprocess.Popen[str] | Forks"
    url: str

    def ask(self, path: str, body: object = None, **options: Any) -> tuple[int, Any]:
        """Send a request, and return the status and the JSON of the answer. A body of bytes is sent unchanged."""
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, **options)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def wait_for(self, **figures: int) -> None:
        """Wait until /health reports these figures."""
        deadline = time.monotonic() + 60
        while not figures.items() <= (told := self.ask("/health")[1]).items():
            assert time.monotonic() < deadline, told
            time.sleep(0.01)

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send the server a signal to stop. Returns the exit status and the text of the error stream."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


def start(folder: Path, *arguments: str, **environment: str) -> Server:
    """Start a server at a free port, and wait until the model is loaded."""
    command = [sys.executable, "-m", "crosscut", "serve", str(folder), "--port", "0", "--device", "cpu", *arguments]
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    variables["OMP_NUM_THREADS"] = "1"  # threads that wait for each other make a tiny model slower
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables | environment
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return _server_that_greets(process, line)


def _server_that_greets(process: "subprocess.Popen[str] | Forks", greeting: str) -> Server:
    found = re.search(r"http://\S+", greeting)
    if found is None:
        process.kill()
        raise AssertionError(greeting + process.communicate()[1])
    return Server(process, found.group())


@dataclass
class Forks:
    """Ranks of a server that are forks of the nursery, with the methods of `Popen` that the tests use."""

    ranks: list[BaseProcess]
    errors: IO[str]
    """The error streams of all ranks."""
    store: dist.Store | None

    @property
    def pid(self) -> int | None:
        return self.ranks[0].pid

    @property
    def returncode(self) -> int | None:
        return self.ranks[0].exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)  # the first rank tells the others

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        for rank in self.ranks:
            rank.join(timeout)
        assert len({rank.exitcode for rank in self.ranks}) == 1
        with self.errors:
            self.errors.seek(0)
            return "", self.errors.read()


def fork(folder: Path, *arguments: str, num_ranks: int = 1) -> Server:
    """Start a server as `start` does, but on forks of the nursery, which have imported torch. Several ranks are joined
    as under torchrun.
    """
    words = ("crosscut", "serve", str(folder), "--port", "0", "--device", "cpu", "--tensor", str(num_ranks), *arguments)
    store, environment = None, {"LOCAL_WORLD_SIZE": str(num_ranks)}
    if num_ranks > 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(num_ranks)}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    reader, writer = os.pipe()
    forks = Forks([], tempfile.TemporaryFile("w+"), store)  # noqa: SIM115 - closed with the server
    with os.fdopen(reader) as printed:
        with (
            os.fdopen(writer, "w") as output,
            PassedStream(output.fileno()) as ours,
            PassedStream(forks.errors.fileno()) as theirs,
        ):
            for rank in range(num_ranks):
                more = {"RANK": str(rank)} if num_ranks > 1 else {}
                process = forked().Process(target=_serve, args=(words, environment | more, ours, theirs), daemon=True)
                process.start()
                forks.ranks.append(process)
        return _server_that_greets(forks, printed.readline())


def _serve(words: tuple[str, ...], environment: Mapping[str, str], output: int, errors: int) -> None:
    """In a fork: run the command of a server."""
    leave_with_parent()
    os.environ.update(environment)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    torch.set_num_threads(1)
    sys.argv = [*words]
    main()


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers with random weights and a WordPiece, for at most 16 tokens. The last position is so large
    that the hidden states of a text of 16 tokens are not finite.
    """
    folder = make_encoder(tmp_path_factory.mktemp("models") / ENCODER, "bert for classes", wordpiece=True)
    weights = load_file(folder / "model.safetensors")
    weights["bert.embeddings.position_embeddings.weight"][15] = 3e38
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def whole(model_folder: Path) -> Iterator[Server]:
    """A server of the uncut model."""
    server = fork(model_folder)
    yield server
    assert server.stop() == (0, "")


@pytest.fixture(scope="session")
def cut(model_folder: Path) -> Iterator[Server]:
    """A server of the model cut over two ranks."""
    server = fork(model_folder, "--rows", "4", num_ranks=2)
    yield server
    assert server.stop() == (0, "")


@pytest.fixture(scope="session")
def encoder(encoder_folder: Path) -> Iterator[Server]:
    """A server of the encoder, cut over two ranks. The tests that use it make it log failures."""
    server = fork(encoder_folder, num_ranks=2)
    yield server
    status, errors = server.stop()
    assert (status, "Traceback" in errors) == (0, False)
