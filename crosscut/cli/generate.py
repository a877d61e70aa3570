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
@click.option("--prompt", help="Start of the text; empty starts at an end of text.")
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path),
    help="A file of prompts, one a line, or .jsonl with a `prompt` in each line.",
)
@click.option("--samples", default=1, show_default=True, help="Texts for each prompt.")
@click.option("--tokens", "num_tokens", type=int, help="Longest continuation in tokens.  [default: 200, if they fit]")
@click.option("--temperature", default=0.8, show_default=True, help="Spread of the choices; 0 takes the likeliest.")
@click.option("--top-k", default=50, show_default=True, help="Choose among this many likeliest tokens; 0 among all.")
@click.option("--top-p", default=1.0, show_default=True, help="... among the fewest with this probability in all.")
@click.option("--repetition-penalty", default=1.0, show_default=True, help="Above 1 disfavours tokens already there.")
@click.option("--presence-penalty", default=0.0, show_default=True, help="Disfavours what has been written, -2 to 2.")
@click.option("--frequency-penalty", default=0.0, show_default=True, help="... once for each time, -2 to 2.")
@click.option("--stop", multiple=True, help="The text ends before this; may be given several times.")
@click.option("--seed", default=0, show_default=True, help="Seed of the choices.")
@click.option("--slide", is_flag=True, help="Let a text outgrow the model's window, which forgets its beginning then.")
@click.option("--tensor", default=1, show_default=True, help="Tensor ranks to cut the model over, whatever trained it.")
@device_option
@precision_option
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each text: prompt, text, token ids, finish.")
@naming_options({"layout.tensor": "--tensor", **{name: f"--{name.replace('_', '-')}" for name in _CHOICES}})
def generate(place: str, prompt: str | None, file: Path | None, **options: Any) -> None:
    """Write text with the model at PLACE: a run's folder, one of its checkpoints, or a Hugging Face folder.

    Of a run, also one in progress, it is the newest checkpoint. A single text is shown as it is written, several
    samples side by side. Without a prompt it asks for one after the other at a terminal, until Ctrl-D; elsewhere it
    starts at an end of text.
    """
    from crosscut.generation import Sampling
    from crosscut.generation.order import Order, write_order
    from crosscut.generation.prompts import can_ask, read_prompts

    if prompt is not None and file is not None:
        raise click.UsageError("Give --prompt or --prompts, not both.")
    prompts = read_prompts(file) if file is not None else (prompt or "",)
    if prompt is None and file is None and can_ask() and not options["as_json"]:
        prompts = ()
    sampling = Sampling(seed=options.pop("seed"), **{name: options.pop(name) for name in _CHOICES})
    write_order(place, Order(prompts=prompts, sampling=sampling, **options))
