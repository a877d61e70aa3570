"""`crosscut embed`."""

import json
from pathlib import Path

import click

from crosscut.cli.arguments import (
    LocalPath,
    OptionValue,
    device_option,
    last_weights_option,
    machinery,
    naming_options,
    precision_option,
    tensor_option,
)
from crosscut.config.system.terminal import echo


@click.command()
@click.argument("place")
@click.argument("file", type=LocalPath(path_type=Path), required=False)
@click.option("--text", "texts", multiple=True, help="Text to embed instead of the lines of a file; repeatable.")
@click.option("--batch-size", default=32, show_default=True, help="Texts per forward pass.")
@click.option(
    "--max-tokens",
    default=0,
    help="Cut texts after this number of tokens.  [default: the length in the model's sentence_bert_config.json or "
    "tokenizer_config.json, or the model's maximum sequence length]",
)
@click.option(
    "--prompt-name",
    help="Name of the model's prompt that precedes every text, such as query.  [default: the model's default prompt, "
    "or none]",
)
@tensor_option
@device_option
@precision_option
@last_weights_option
@naming_options(
    {
        "layout.tensor": "--tensor",
        "batch_size": "--batch-size",
        "max_tokens": "--max-tokens",
        "prompt_name": "--prompt-name",
    }
)
def embed(
    place: str,
    file: Path | None,
    texts: tuple[str, ...],
    batch_size: int,
    max_tokens: int,
    prompt_name: str | None,
    **options: OptionValue,
) -> None:
    """Print an embedding of each line of FILE, from the encoder at PLACE.

    PLACE is a Hugging Face folder that holds a BERT model, such as all-MiniLM-L6-v2, or the folder of a run or a
    checkpoint that trained an encoder. With neither FILE nor --text, the command reads lines from standard input.
    Each embedding is a line of JSON: a list of numbers. It is computed as sentence-transformers computes it from the
    model's modules.json. Without this file, it is the mean of the last hidden states, scaled to length 1, so the dot
    product of two embeddings is the cosine similarity of their texts.
    """
    from crosscut.evaluation.embeddings.texts import TextOptions, read_lines
    from crosscut.evaluation.embeddings.vectors import embed as embed_texts
    from crosscut.launch.processes import is_first_started

    if texts and file is not None:
        raise click.UsageError("Give either FILE or --text, not both.")
    vectors = embed_texts(
        place,
        lambda: texts or read_lines(file),
        machinery(**options),
        batch_size=batch_size,
        options=TextOptions(max_tokens=max_tokens, prompt_name=prompt_name),
        tell=lambda text: echo(f"crosscut: {text}", err=True),
    )
    if is_first_started():
        for vector in vectors:
            echo(json.dumps(vector))
