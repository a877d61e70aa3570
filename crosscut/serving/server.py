"""Start and end of a server: the model runs on all ranks, and a thread of the first rank talks to clients.

A signal asks the server to stop. The server then accepts no new requests, answers the current ones and exits. A second
signal ends the process at once (`launch.stopping`).
"""

import asyncio
import gc
import ipaddress
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch
import uvicorn
from starlette.applications import Starlette

from crosscut.architecture import Ability
from crosscut.config import ConfigError, Layout
from crosscut.config.layouts.limits import require_tensor_axis
from crosscut.config.published.generation import check_generation
from crosscut.config.system.terminal import echo
from crosscut.config.system.wording import counted
from crosscut.evaluation.embeddings.embedder import Embedded, Embedder
from crosscut.evaluation.embeddings.texts import TextEncoder, about_steps, require_embeddings
from crosscut.generation import Decoder, Piece
from crosscut.launch import Ranks, StopRequest, in_ranks
from crosscut.launch.stopping import REQUESTS, ignore_requests
from crosscut.model.packing import pack_weights
from crosscut.parallel import ParallelMesh, make_mesh
from crosscut.pretrained import ModelSource, find_model
from crosscut.serving.desk import MOST_EMBEDDED, Desk, PartT
from crosscut.serving.loop import embed_texts, write_texts
from crosscut.serving.protocol.chat import ChatTemplate
from crosscut.serving.protocol.embeddings import ServedEncoder
from crosscut.serving.protocol.requests import ServedDecoder
from crosscut.serving.scheduling import MOST_EMBEDDED_BEGUN, Scheduler
from crosscut.serving.web.application import make_application
from crosscut.serving.web.connections import MOST_CONNECTIONS, Connections, allow_connections
from crosscut.serving.web.embeddings import embedding_endpoints
from crosscut.serving.web.texts import text_endpoints

SIGNALS = (*REQUESTS, signal.SIGINT)
"""Signals that ask a server to answer its current requests and then exit."""

MOST_ROWS = 1024
"""Maximum number of texts that a server generates or embeds at once."""

_MOST_PORT = 65_535

_UNTIL_CLOSED = 5
"""Seconds that connections have to close after all requests are answered."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server: address, access, and the ranks that compute. Raises `ConfigError` for invalid options."""

    host: str = "127.0.0.1"
    port: int = 8000
    """Port; 0 means any free port."""
    api_key: str | None = None
    """Key that clients must send, in ASCII without spaces. Required if other machines can reach the server."""
    tensor: int = 1
    device: str = "auto"
    precision: str = "float32"
    rows: int = 16
    """Number of texts that are generated at once or embedded in one forward pass, at most `MOST_ROWS`."""
    slide: bool = False
    """Whether texts may become longer than the model's window. The model no longer sees the beginning of such a long
    text."""
    last_weights: bool = False
    """Whether to serve the weights of the last step, even if the checkpoint also holds a moving average."""
    adapter: str = ""
    """Folder of an adapter that is merged into the model; empty for none."""

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise ConfigError(
                "`--api-key` must not be empty, but is empty. Remove --api-key, or unset CROSSCUT_API_KEY."
            )
        if bad := next((character for character in self.api_key or "" if not "!" <= character <= "~"), None):
            raise ConfigError(
                f"`--api-key` must consist of ASCII letters, digits and punctuation, but contains {bad!r}. HTTP "
                "clients send only ASCII in a header. Choose another key."
            )
        if not 0 <= self.port <= _MOST_PORT:
            raise ConfigError(f"`--port` must be from 0 to {_MOST_PORT}, but is {self.port}.")
        if not 1 <= self.rows <= MOST_ROWS:
            raise ConfigError(f"`--rows` must be from 1 to {MOST_ROWS}, but is {self.rows}.")
        if self.api_key is None and not _is_loopback(self.host):
            raise ConfigError(
                f"`--api-key` must be set if other machines can reach the server (`--host` is {self.host}), but is not "
                "set. Set CROSSCUT_API_KEY, or remove --host."
            )

    @property
    def layout(self) -> Layout:
        """Layout of the ranks."""
        return Layout(tensor=self.tensor)


def serve(place: str, options: ServerOptions) -> None:
    """Serve the model at `place` until a signal asks the server to stop.

    Starts ranks, or joins the ranks that torchrun started. Raises `ConfigError`, `LayoutError`, `DataError` or
    `CheckpointError` before a rank starts.
    """
    ranks = Ranks(layout=options.layout, device=options.device, signals=SIGNALS)
    in_ranks(ranks, partial(_serve, options), prepare=lambda: _checked(place, options).to_json(), is_plain=True)
    ignore_requests()


def _checked(place: str, options: ServerOptions) -> ModelSource:
    source = find_model(place, last_weights=options.last_weights, adapter=options.adapter)
    require_tensor_axis(source.model, options.tensor)
    if source.abilities.isdisjoint(_SERVICES):
        source.require_decoder(place)
    _service(source).check(place, source, options)
    with _bound(options):  # raises if the port is taken
        return source


def _check_texts(_place: str, source: ModelSource, _options: ServerOptions) -> None:
    """Check a model that continues texts, and print what its files ask for in vain."""
    remedy = "The fields of each request decide: `temperature`, `top_k`, `top_p` and so on."
    for notice in check_generation(source.settings_folders, None, remedy):
        echo(f"crosscut: {notice}", err=True)
    ChatTemplate.find(source.tokenizer)  # raises before any process starts, if the template is invalid


def _check_vectors(place: str, source: ModelSource, options: ServerOptions) -> None:
    """Check a model that embeds texts, and print how it does so."""
    if options.slide:
        raise ConfigError(
            f"`--slide` must be used only with a model that generates text, but `{place}` holds an encoder. Remove "
            "--slide."
        )
    for line in about_steps(source, require_embeddings(source, options.tensor).steps):
        echo(f"crosscut: {line}", err=True)


def _serve(options: ServerOptions, found: Mapping[str, object], device: torch.device) -> None:
    source = ModelSource.from_json(found)
    mesh = make_mesh(options.layout, device)
    with _bound(options) if mesh.is_first_rank else nullcontext() as listener:
        _service(source).run(source, mesh, options, listener)


def _write(source: ModelSource, mesh: ParallelMesh, options: ServerOptions, listener: socket.socket | None) -> None:
    """Run one rank of a server whose model predicts the next token. `listener` is None on all ranks but the first."""
    tokenizer = source.load_tokenizer()
    stops = frozenset(source.ends)
    model = source.load(mesh, precision=options.precision)
    pack_weights(model, mesh, num_texts=options.rows)
    decoder = Decoder(model, tokenizer, num_rows=options.rows, stops=stops, slide=options.slide)
    if listener is None:
        _follow(partial(write_texts, decoder, None))
        return
    served = ServedDecoder(
        name=source.lasting_name,
        window=source.model.generation_length,
        tokenizer=source.tokenizer,
        vocab_size=min(source.model.vocab_size, tokenizer.vocab_size),
        slide=options.slide,
        begin=source.begin_of_text,
        end_of_text=source.end_of_text,
        stops=stops,
        can_chat=ChatTemplate.is_beside(source.tokenizer),
        created=int(time.time()),
    )
    desk: Desk[Piece] = Desk(options.rows)
    work = partial(write_texts, decoder, Scheduler(desk))
    endpoints = text_endpoints(served, desk)
    application = make_application(served, desk, endpoints, key=options.api_key, names=_names(options))
    _lead(work, application, desk, listener, _greeting(source, options, listener))


def _embed(source: ModelSource, mesh: ParallelMesh, options: ServerOptions, listener: socket.socket | None) -> None:
    """Run one rank of a server whose model is an encoder. `listener` is None on all ranks but the first."""
    encoder = TextEncoder.of(source)
    model = source.load(mesh, precision=options.precision)
    embedder = Embedder(model, num_rows=options.rows, pooling=encoder.pooling())
    if listener is None:
        _follow(partial(embed_texts, embedder, None))
        return
    served = ServedEncoder(
        name=source.lasting_name,
        window=encoder.max_tokens,
        size=encoder.steps.size(source.model.hidden_size),
        prompt=encoder.prompt,
        num_skipped=encoder.num_skipped,
        lower_case=encoder.steps.lower_case,
        is_published=source.is_published,
        tokenizer=source.tokenizer,
        vocab_size=source.model.vocab_size,
        created=int(time.time()),
    )
    desk: Desk[Embedded] = Desk(options.rows, most_waiting=MOST_EMBEDDED)
    work = partial(embed_texts, embedder, Scheduler(desk, most_begun=MOST_EMBEDDED_BEGUN))
    endpoints = embedding_endpoints(served, desk)
    application = make_application(served, desk, endpoints, key=options.api_key, names=_names(options))
    _lead(work, application, desk, listener, _greeting(source, options, listener))


class _Service(NamedTuple):
    """Way in which a server uses its model."""

    check: Callable[[str, ModelSource, ServerOptions], None]
    """Function that raises an error if an option does not suit the model."""
    run: Callable[[ModelSource, ParallelMesh, ServerOptions, socket.socket | None], None]
    """Function that runs one rank of the server."""
    rows: str
    """Words for the texts that the model reads at once."""
    use: str
    """Words that tell a user how to use the server."""


_SERVICES = {
    Ability.WRITE: _Service(
        _check_texts, _write, "texts at once", "Open it in a browser, or point an OpenAI client at /v1."
    ),
    Ability.EMBED: _Service(_check_vectors, _embed, "texts per pass", "Point an OpenAI client at /v1 to embed texts."),
}
"""Services, by the ability that they need. A model gets the first one that it can do."""


def _service(source: ModelSource) -> _Service:
    return next(service for ability, service in _SERVICES.items() if ability in source.abilities)


def _follow(work: Callable[[], None]) -> None:
    """Run `work`, the main loop, on a rank that is not the first one."""
    _freeze()
    with StopRequest(SIGNALS) as request:
        work()
        request.accept()


def _lead(
    work: Callable[[], None], application: Starlette, desk: Desk[PartT], listener: socket.socket, greeting: str
) -> None:
    """Run `work`, the main loop, on the first rank, while a second thread talks to clients. `greeting` is printed as
    soon as clients can connect.
    """
    _freeze()
    with StopRequest(SIGNALS, desk.stop) as request:
        with _talking(application, listener, desk):
            echo(greeting)
            work()
        request.accept()


def _freeze() -> None:
    """Keep the garbage collector from what the process has loaded, which it would search for a fifth of a second while
    all clients wait.
    """
    gc.collect()
    gc.freeze()


def _names(options: ServerOptions) -> set[str]:
    """Host names under which clients without a key may address the server."""
    return {"localhost", "127.0.0.1", "[::1]", _in_url(options.host)}


@contextmanager
def _bound(options: ServerOptions) -> Iterator[socket.socket]:
    """Context with a socket bound to the server's address. Raises `ConfigError` if the address is not available."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((options.host, options.port))
        except OSError as error:
            raise ConfigError(
                f"`--host` and `--port` must name a free address of this machine, but {options.host} with port "
                f"{options.port} is not available: {error}. Try another port."
            ) from None
        yield listener


class _Server(uvicorn.Server):
    """Variant of uvicorn's server. When it ends, it closes the connections of clients that do not read their answers.
    uvicorn's own server would cancel the requests of these clients and log a traceback for each request.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait until all connections are closed. After `_UNTIL_CLOSED` seconds, close the remaining ones."""
        closing = asyncio.get_running_loop().call_later(_UNTIL_CLOSED, self._close_connections)
        try:
            await super().shutdown(sockets)
        finally:
            closing.cancel()

    def _close_connections(self) -> None:
        unread = list(self.server_state.connections)
        for connection in unread:
            connection.transport.abort()
        if unread:
            echo(
                f"crosscut: {counted(len(unread), 'client')} had not read the whole answer when the server ended. The "
                "rest was not sent.",
                err=True,
            )


@contextmanager
def _talking(application: Starlette, listener: socket.socket, desk: Desk[PartT]) -> Iterator[None]:
    """Context in which a thread talks to clients. If the thread ends, the server stops."""
    connections = Connections(allow_connections())
    settings = uvicorn.Config(
        application,
        http=cast(type[asyncio.Protocol], connections),  # uvicorn only calls it
        backlog=MOST_CONNECTIONS,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_UNTIL_CLOSED + 1,
    )
    server = _Server(settings)

    failures = []

    def talk() -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:  # uvicorn may also raise SystemExit
            failures.append(error)
        finally:
            desk.stop()

    thread = threading.Thread(target=talk, daemon=True, name="clients")
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        if server.started:
            yield
    finally:
        desk.close()
        server.should_exit = True
        thread.join(2 * _UNTIL_CLOSED)
    if failures:
        raise failures[0]


def _greeting(source: ModelSource, options: ServerOptions, listener: socket.socket) -> str:
    service = _service(source)
    return (
        f"{source.title} at http://{_in_url(options.host)}:{listener.getsockname()[1]} (tensor {options.tensor}, "
        f"{options.rows} {service.rows}). {service.use} Ctrl-C stops the server."
    )


def _in_url(host: str) -> str:
    """Host name as it is written in URLs and in the header `Host`: an IPv6 address is in brackets."""
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
