"""`crosscut serve`."""

import os
from importlib.util import find_spec

import click

from crosscut.cli.arguments import OptionValue, model_options, naming_options
from crosscut.config import ConfigError
from crosscut.config.system.extras import install_command

_PACKAGES = ("jinja2", "starlette", "uvicorn")
"""Packages of the extra `serve`."""


@click.command()
@click.argument("place")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. An address that other machines can reach needs --api-key.",
)
@click.option("--port", default=8000, show_default=True, help="Port to listen on; 0 chooses a free port.")
@model_options
@click.option(
    "--rows",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Maximum number of texts generated at the same time, or embedded in one forward pass. Further texts wait.",
)
@click.option(
    "--slide", is_flag=True, help="Let texts grow longer than the model's window by dropping their beginning."
)
@click.option(
    "--api-key",
    envvar="CROSSCUT_API_KEY",
    help="Key that clients must send. To keep the key secret, set the environment variable CROSSCUT_API_KEY instead.",
)
@naming_options({"layout.tensor": "--tensor"})
def serve(place: str, **options: OptionValue) -> None:
    """Serve the model at PLACE to OpenAI clients and browsers.

    PLACE is a run's folder (its newest checkpoint is served), one checkpoint, or a Hugging Face folder. A model that
    predicts the next token serves completions and chats. An encoder serves embeddings.
    """
    _require_packages()
    # OpenMP reads this variable when PyTorch is imported. By default, a thread that waits for another thread spins for
    # a millisecond. If a chat template keeps one of two cores busy, each token waits for spinning threads: the token of
    # a tiny model took 40 ms by default, 6 ms with 20,000 spins and 3 ms with 5,000. On an idle machine, fewer than
    # 20,000 spins are slower.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    from crosscut.serving.server import ServerOptions
    from crosscut.serving.server import serve as serve_model

    serve_model(place, ServerOptions(**options))


def _require_packages() -> None:
    """Raise `ConfigError` unless the packages of the extra `serve` are installed."""
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise ConfigError(
            f"`crosscut serve` needs the packages of the extra `serve`, but {' and '.join(missing)} cannot be found. "
            f"Run `{install_command('serve')}`."
        )
