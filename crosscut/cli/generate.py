"""`crosscut generate`."""

from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="Start of the text; empty starts at an end of text.")
@click.option("--tokens", "num_tokens", default=200, show_default=True, help="Longest continuation, in tokens.")
@click.option("--temperature", default=0.8, show_default=True, help="Spread of the choices; 0 takes the likeliest.")
@click.option("--top-k", default=50, show_default=True, help="Choose among this many likeliest tokens.")
@click.option("--seed", default=0, show_default=True, help="Seed of the choices.")
@click.option("--tensor", default=1, show_default=True, help="Tensor ranks to cut the model over, whatever trained it.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def generate(folder: Path, prompt: str, tensor: int, device: str, **choice: Any) -> None:
    """Write a text with the newest checkpoint of the run in FOLDER."""
    from crosscut.generation import Sampling, generate_text

    generate_text(folder, prompt, Sampling(**choice), tensor=tensor, device=device)
