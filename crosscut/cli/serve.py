"""`crosscut serve`."""

from importlib.util import find_spec
from typing import Any

import click

from crosscut.cli.arguments import device_option, naming_options, precision_option
from crosscut.config import ConfigError


@click.command()
@click.argument("place")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; others need a key.")
@click.option("--port", default=8000, show_default=True, help="Port to listen at; 0 takes any that is free.")
@click.option("--tensor", default=1, show_default=True, help="Tensor ranks to cut the model over, whatever trained it.")
@device_option
@precision_option
@click.option("--rows", type=click.IntRange(1), default=16, show_default=True, help="Texts to write at once.")
@click.option("--slide", is_flag=True, help="Let texts outgrow the model's window, which forgets their beginning then.")
@click.option("--api-key", envvar="CROSSCUT_API_KEY", help="Key that clients must show; better in CROSSCUT_API_KEY.")
@naming_options({"layout.tensor": "--tensor"})
def serve(place: str, **options: Any) -> None:
    """Serve the model at PLACE to OpenAI clients and browsers.

    PLACE is a run's folder, of which the newest checkpoint is taken, a checkpoint, or a Hugging Face folder.
    """
    if missing := [name for name in ("jinja2", "starlette", "uvicorn") if find_spec(name) is None]:
        raise ConfigError(
            f"`crosscut serve` must have the packages of its extra, but {' and '.join(missing)} cannot be found. "
            "Install them: pip install 'crosscut[serve]'."
        )
    from crosscut.serving import ServerOptions
    from crosscut.serving import serve as serve_model

    serve_model(place, ServerOptions(**options))
