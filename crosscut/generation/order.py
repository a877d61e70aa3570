"""`crosscut generate`: from a place where a model is and an order to texts on the screen."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import click
import torch

from crosscut.config import ConfigError, Layout
from crosscut.config.checks import require_at_least
from crosscut.config.model import require_tensor_axis
from crosscut.data import Tokenizer
from crosscut.generation.decoder import Decoder
from crosscut.generation.display import Silent, Written, display_for
from crosscut.generation.prompts import ask
from crosscut.generation.sampling import Sampling
from crosscut.launch import Ranks, in_ranks
from crosscut.model.packing import pack_weights
from crosscut.parallel import ParallelMesh, make_mesh
from crosscut.parallel.collectives import share_from_first
from crosscut.pretrained import ModelSource, find_model

USUAL_TOKENS = 200
"""Longest continuation where none is asked for, or what the window has room for."""

_MOST_ROWS = 16
"""Texts that are written at a time; the others wait."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Request of one `crosscut generate`: the texts to write and the ranks to write them on."""

    prompts: tuple[str, ...]
    """Empty to ask for one after the other at the terminal."""
    samples: int
    """Texts for each prompt."""
    sampling: Sampling
    """Sampling options of every text, except its length."""
    num_tokens: int | None
    """Longest continuation; None takes `USUAL_TOKENS`, or as many as the window has room for."""
    slide: bool
    """Whether texts may outgrow the model's window."""
    as_json: bool
    tensor: int
    """Ranks to cut the model over."""
    device: str
    precision: str

    def __post_init__(self) -> None:
        require_at_least("--samples", self.samples, 1)
        if self.num_tokens is not None:
            require_at_least("--tokens", self.num_tokens, 1)

    @property
    def layout(self) -> Layout:
        """Layout of the ranks."""
        return Layout(tensor=self.tensor)


def write_order(place: str, order: Order) -> None:
    """Write with the model at `place`, cut over the ranks that are asked for or that torchrun started.

    Raises `ConfigError`, `LayoutError`, `DataError` or `CheckpointError` before a rank starts.
    """
    ranks = Ranks(layout=order.layout, device=order.device)
    # Only one process looks for the model: a run in progress may write another checkpoint in the meantime.
    in_ranks(ranks, partial(_write, order), prepare=lambda: _checked(place, order))


def _checked(place: str, order: Order) -> ModelSource:
    source = find_model(place)
    require_tensor_axis(source.model, order.tensor)
    tokenizer = source.load_tokenizer()
    for prompt in order.prompts:
        _request(prompt, tokenizer, source, order)
    return source


def _write(order: Order, source: ModelSource, device: torch.device) -> None:
    mesh = make_mesh(order.layout, device)
    model = source.load(mesh, precision=order.precision)
    num_rows = min(_MOST_ROWS, max(len(order.prompts), 1) * order.samples)
    pack_weights(model, mesh, num_texts=num_rows)
    tokenizer = source.load_tokenizer()
    decoder = Decoder(model, tokenizer, num_rows=num_rows, stops=source.stops, slide=order.slide)
    for prompts in _rounds(order, mesh):
        try:
            requests = [_request(prompt, tokenizer, source, order) for prompt in prompts]
        except ConfigError as error:  # of a prompt that was just typed; the others have been checked
            if mesh.is_first_rank:
                click.echo(f"crosscut: {error}", err=True)
            continue
        _write_round(decoder, prompts, requests, order, show=mesh.is_first_rank)


def _rounds(order: Order, mesh: ParallelMesh) -> Iterator[tuple[str, ...]]:
    """Prompts that are written together: all that there are, or each as it is typed."""
    if order.prompts:
        yield order.prompts
        return
    while (prompt := share_from_first(ask() if mesh.is_first_rank else None)) is not None:
        yield (prompt,)


def _request(prompt: str, tokenizer: Tokenizer, source: ModelSource, order: Order) -> tuple[list[int], Sampling]:
    """The ids of a prompt and how to go on. Raises `ConfigError` where that does not fit the window."""
    ids = tokenizer.encode_prompt(prompt, begin=source.begin_of_text) or [source.end_of_text]
    most = USUAL_TOKENS if order.num_tokens is None else order.num_tokens
    window = source.model.max_sequence_length
    room = window - len(ids) + 1  # the last token need not be read
    start = f"{prompt[:40]}..." if len(prompt) > 40 else prompt
    if room < 1 and not order.slide:
        raise ConfigError(
            f"The prompt {start!r} must fit the model's window of {window} tokens, but has {len(ids)}. Shorten it, or "
            "pass --slide."
        )
    if order.num_tokens is not None and most > room and not order.slide:
        raise ConfigError(
            f"`--tokens` must be at most {room} after the prompt {start!r} of {len(ids)} tokens in the model's window "
            f"of {window}, but is {most}. Ask for fewer, or pass --slide."
        )
    return ids, replace(order.sampling, num_tokens=most if order.slide else min(most, room))


def _write_round(
    decoder: Decoder, prompts: tuple[str, ...], requests: list[tuple[list[int], Sampling]], order: Order, *, show: bool
) -> None:
    texts, of_number = [], {}
    for prompt, (ids, sampling) in zip(prompts, requests, strict=True):
        for sample in range(order.samples):
            texts.append(Written(prompt, sample))
            of_number[decoder.add(ids, sampling, sample=sample)] = texts[-1]
    with display_for(texts, as_json=order.as_json) if show else Silent(texts) as display:
        for piece in decoder.run():
            text = of_number[piece.number]
            text.add(piece)
            display.show(text, piece)
