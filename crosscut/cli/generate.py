"""`crosscut generate`."""

from pathlib import Path
from typing import Any

import click

from crosscut.cli.arguments import device_option, naming_options, precision_option

_CHOICES = (
    "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop",
)  # fmt: skip


@click.command()
@click.argument("place")
@click.option("--prompt", help="Start of the text. An empty prompt starts a new document.")
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path),
    help="A file with one prompt per line, or a .jsonl file with a key `prompt` in each line.",
)
@click.option("--samples", default=1, show_default=True, help="Number of texts per prompt.")
@click.option("--tokens", "num_tokens", type=int, help="Maximum tokens per text.  [default: 200, or as many as fit]")
@click.option(
    "--temperature", default=0.8, show_default=True, help="Sampling temperature; 0 takes the likeliest token."
)
@click.option("--top-k", default=50, show_default=True, help="Sample from the k likeliest tokens; 0 is no limit.")
@click.option("--top-p", default=1.0, show_default=True, help="Nucleus sampling: total probability of the candidates.")
@click.option(
    "--repetition-penalty", default=1.0, show_default=True, help="Above 1, make tokens in the text less likely."
)
@click.option(
    "--presence-penalty", default=0.0, show_default=True, help="Penalty on every token written so far, -2 to 2."
)
@click.option("--frequency-penalty", default=0.0, show_default=True, help="Penalty per earlier occurrence, -2 to 2.")
@click.option("--stop", multiple=True, help="End the text before this string; repeatable.")
@click.option("--seed", default=0, show_default=True, help="Random seed.")
@click.option("--slide", is_flag=True, help="Let a text grow longer than the model's window by dropping its beginning.")
@click.option("--tensor", default=1, show_default=True, help="Number of tensor ranks that share the model.")
@device_option
@precision_option
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print a line of JSON per text: prompt, text, token ids, reason for the end.",
)
@naming_options({"layout.tensor": "--tensor", **{name: f"--{name.replace('_', '-')}" for name in _CHOICES}})
def generate(place: str, prompt: str | None, file: Path | None, **options: Any) -> None:
    """Generate text with the model at PLACE: a run's folder, one of its checkpoints, or a Hugging Face folder.

    For a run's folder, the newest checkpoint is used, even while the run is training. A single text appears while it is
    being generated; several samples appear side by side. Without a prompt, the command asks for prompts in a loop until
    Ctrl-D. If there is no terminal, it generates one new document instead.
    """
    from crosscut.generation import Sampling
    from crosscut.generation.order import Order, write_order
    from crosscut.generation.prompts import can_ask, read_prompts

    if prompt is not None and file is not None:
        raise click.UsageError("Give either --prompt or --prompts, not both.")
    prompts = read_prompts(file) if file is not None else (prompt or "",)
    if prompt is None and file is None and can_ask() and not options["as_json"]:
        prompts = ()
    sampling = Sampling(seed=options.pop("seed"), **{name: options.pop(name) for name in _CHOICES})
    write_order(place, Order(prompts=prompts, sampling=sampling, **options))
