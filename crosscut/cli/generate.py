"""`crosscut generate`."""

from pathlib import Path

import click
from click.core import ParameterSource

from crosscut.cli.arguments import LocalPath, OptionValue, model_options, naming_options

_CHOICES = (
    "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop",
)  # fmt: skip
_ONLY_FOR_TEXTS = {*_CHOICES, "samples", "num_tokens", "seed", "slide"} - {"top_k"}
_USUAL_TOP_K = 50


@click.command()
@click.argument("place")
@click.option("--prompt", help="Start of the text. An empty prompt starts a new document.")
@click.option(
    "--prompts",
    "file",
    type=LocalPath(path_type=Path),
    help="File with one prompt per line, or a .jsonl file with the key `prompt` in each line.",
)
@click.option("--samples", default=1, show_default=True, help="Number of texts per prompt.")
@click.option(
    "--tokens",
    "num_tokens",
    type=int,
    help="Maximum number of tokens to generate per text.  [default: 200, or as many as fit into the model's window]",
)
@click.option(
    "--temperature", default=0.8, show_default=True, help="Sampling temperature; 0 always takes the likeliest token."
)
@click.option(
    "--top-k",
    type=int,
    help="Sample from the k likeliest tokens; 0 means no limit. With a BERT: number of words to print per mask.  "
    "[default: 50; with a BERT: 5]",
)
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    help="Nucleus sampling: sample from the smallest set of likeliest tokens whose probabilities reach this total.",
)
@click.option(
    "--repetition-penalty",
    default=1.0,
    show_default=True,
    help="Repetition penalty. A value above 1 makes tokens that are already in the prompt or the text less likely.",
)
@click.option(
    "--presence-penalty",
    default=0.0,
    show_default=True,
    help="Subtract this number, from -2 to 2, from the logit of every token that was already generated.",
)
@click.option(
    "--frequency-penalty",
    default=0.0,
    show_default=True,
    help="Subtract this number, from -2 to 2, from a token's logit once for each time the token was generated.",
)
@click.option("--stop", multiple=True, help="End the text before this string; repeatable.")
@click.option("--seed", default=0, show_default=True, help="Random seed.")
@click.option("--slide", is_flag=True, help="Let a text grow longer than the model's window by dropping its beginning.")
@model_options
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print each text as a line of JSON: prompt, sample, text, token ids, and the reason why the text ends. With a "
    "BERT: prompt, filled text, token ids, and the words of each mask.",
)
@naming_options({"layout.tensor": "--tensor", **{name: f"--{name.replace('_', '-')}" for name in _CHOICES}})
def generate(place: str, prompt: str | None, file: Path | None, **options: OptionValue) -> None:
    """Generate text with the model at PLACE.

    PLACE is a run's folder (its newest checkpoint is used, even while the run is training), one of its checkpoints, or
    a Hugging Face folder. A single text is printed as it is generated. Several samples appear side by side.

    A BERT with a head for masked tokens fills in masked words instead: the command prints the likeliest words in place
    of each [MASK] of the prompt, with their probabilities.

    With neither --prompt nor --prompts, the command asks for prompts until Ctrl-D. If there is no terminal, or with
    --json, the command generates a new document instead.
    """
    from crosscut.generation import Sampling
    from crosscut.generation.order import Order, write_order
    from crosscut.generation.prompts import can_ask, read_prompts

    if prompt is not None and file is not None:
        raise click.UsageError("Give either --prompt or --prompts, not both.")
    prompts = read_prompts(file) if file is not None else (prompt or "",)
    if prompt is None and file is None and can_ask() and not options["as_json"]:
        prompts = ()
    top_k = options["top_k"]
    options["top_k"] = _USUAL_TOP_K if top_k is None else top_k
    words = {} if top_k is None else {"num_words": top_k}
    sampling = Sampling(seed=options.pop("seed"), **{name: options.pop(name) for name in _CHOICES})
    write_order(place, Order(prompts=prompts, sampling=sampling, only_for_texts=_given(), **words, **options))


def _given() -> tuple[str, ...]:
    """Names of the options on the command line that have an effect only for a model that generates text."""
    context = click.get_current_context()
    return tuple(
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in _ONLY_FOR_TEXTS
        and context.get_parameter_source(parameter.name) is not ParameterSource.DEFAULT
    )
