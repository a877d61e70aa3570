"""Run `crosscut generate`: load the model on all ranks, and print the generated texts or the predicted words for
masks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from crosscut.architecture import Ability
from crosscut.config import ConfigError, Layout
from crosscut.config.checks import require_at_least
from crosscut.config.generation.sampling import Sampling
from crosscut.config.layouts.limits import require_tensor_axis
from crosscut.config.published.generation import check_generation
from crosscut.config.system.terminal import echo
from crosscut.data import Tokenizer
from crosscut.generation.decoder import Decoder
from crosscut.generation.display import Silent, Written, display_for
from crosscut.generation.filling import USUAL_WORDS, Filler, print_filled
from crosscut.generation.prompts import ask
from crosscut.launch import Ranks, in_ranks
from crosscut.model import GPT
from crosscut.model.packing import pack_weights
from crosscut.parallel import ParallelMesh, make_mesh
from crosscut.parallel.collectives import share_json_from_first
from crosscut.pretrained import ModelSource, find_model

USUAL_TOKENS = 200
"""Default maximum number of generated tokens. The model's window may allow fewer."""

_MOST_ROWS = 16
"""Maximum number of texts that are generated at the same time. Further texts wait."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Arguments of one `crosscut generate` command: the texts to generate and the ranks to use."""

    prompts: tuple[str, ...]
    """Prompts to continue; if empty, the user is asked for prompts at the terminal."""
    samples: int
    """Number of texts for each prompt."""
    sampling: Sampling
    """Sampling options of every text. The maximum length comes from `Order.num_tokens`, not from `sampling`."""
    num_tokens: int | None
    """Maximum number of generated tokens; None means `USUAL_TOKENS`, or fewer if the window has less room."""
    slide: bool
    """Whether texts may become longer than the model's window."""
    as_json: bool
    tensor: int
    """Tensor-parallel size."""
    device: str
    precision: str
    last_weights: bool = False
    """Whether to use the weights of the last step, even if the checkpoint also holds a moving average."""
    adapter: str = ""
    """Folder of an adapter that is merged into the model; empty for none."""
    num_words: int = USUAL_WORDS
    """Number of predictions per mask if the model predicts masked tokens."""
    only_for_texts: tuple[str, ...] = ()
    """Options that the user gave and that do not apply to a model that predicts masked tokens."""

    def __post_init__(self) -> None:
        require_at_least("--samples", self.samples, 1)
        if self.num_tokens is not None:
            require_at_least("--tokens", self.num_tokens, 1)

    @property
    def layout(self) -> Layout:
        """Layout with one data rank and the tensor-parallel size `tensor`."""
        return Layout(tensor=self.tensor)


def write_order(place: str, order: Order) -> None:
    """Generate texts with the model at `place`, on new ranks or on the ranks that torchrun started.

    Raises `ConfigError`, `LayoutError`, `DataError` or `CheckpointError` before a rank starts.
    """
    ranks = Ranks(layout=order.layout, device=order.device)
    # Only one process looks for the model, because a training run may write another checkpoint in the meantime.
    in_ranks(ranks, partial(_write, order), prepare=lambda: _checked(place, order).to_json(), is_plain=True)


def _checked(place: str, order: Order) -> ModelSource:
    source = find_model(place, last_weights=order.last_weights, adapter=order.adapter)
    if source.abilities.isdisjoint(_WAYS):
        source.require_decoder(place)
    require_tensor_axis(source.model, order.tensor)
    _way(source).check(place, source, order)
    return source


def _check_texts(_place: str, source: ModelSource, order: Order) -> None:
    """Raise `ConfigError` if an option or a prompt does not suit a model that continues texts."""
    remedy = "The options of the command decide: `--temperature`, `--top-k`, `--top-p` and so on."
    for notice in check_generation(source.settings_folders, order.sampling, remedy):
        echo(f"crosscut: {notice}", err=True)
    tokenizer = source.load_tokenizer()
    for prompt in order.prompts:
        _request(prompt, tokenizer, source, order)


def _check_masked(place: str, source: ModelSource, order: Order) -> None:
    """Raise `ConfigError` if an option or a prompt does not suit a model that predicts masked tokens."""
    if order.only_for_texts:
        names = ", ".join(f"`{name}`" for name in order.only_for_texts)
        raise ConfigError(
            f"Options for generating text must not be given with a model that fills in masked words (`{place}`), but "
            f"these are given: {names}. Remove these options."
        )
    require_at_least("--top-k", order.num_words, 1)
    filler = Filler(source)
    for prompt in order.prompts:
        filler.encode(prompt)


def _write(order: Order, found: Mapping[str, Any], device: torch.device) -> None:
    source = ModelSource.from_json(found)
    mesh = make_mesh(order.layout, device)
    _way(source).write(source.load(mesh, precision=order.precision), source, order, mesh)


def _continue(model: GPT, source: ModelSource, order: Order, mesh: ParallelMesh) -> None:
    """Continue all prompts, and print the texts on the first rank. Every rank must call this function."""
    num_rows = min(_MOST_ROWS, max(len(order.prompts), 1) * order.samples)
    pack_weights(model, mesh, num_texts=num_rows)
    tokenizer = source.load_tokenizer()
    decoder = Decoder(model, tokenizer, num_rows=num_rows, stops=source.stops, slide=order.slide)
    for prompts in _rounds(order, mesh):
        try:
            requests = [_request(prompt, tokenizer, source, order) for prompt in prompts]
        except ConfigError as error:  # only a typed prompt can be wrong here
            if mesh.is_first_rank:
                echo(f"crosscut: {error}", err=True)
            continue
        _write_round(decoder, prompts, requests, order, show=mesh.is_first_rank)


def _fill(model: GPT, source: ModelSource, order: Order, mesh: ParallelMesh) -> None:
    """Predict the masked words of all prompts, and print them on the first rank. Every rank must call this function."""
    filler = Filler(source, num_words=order.num_words)
    for prompts in _rounds(order, mesh):
        try:
            filled = filler.fill(model, prompts)
        except ConfigError as error:  # only a typed prompt can be wrong here
            if mesh.is_first_rank:
                echo(f"crosscut: {error}", err=True)
            continue
        if mesh.is_first_rank:
            print_filled(filled, as_json=order.as_json)


class _Way(NamedTuple):
    """Way in which a model generates."""

    check: Callable[[str, ModelSource, Order], None]
    """Function that raises `ConfigError` if an option or a prompt does not suit the model."""
    write: Callable[[GPT, ModelSource, Order, ParallelMesh], None]
    """Function that generates and prints. Every rank must call it."""


_WAYS = {Ability.WRITE: _Way(_check_texts, _continue), Ability.FILL: _Way(_check_masked, _fill)}
"""Ways to generate, by the ability that they need."""


def _way(source: ModelSource) -> _Way:
    return next(way for ability, way in _WAYS.items() if ability in source.abilities)


def _rounds(order: Order, mesh: ParallelMesh) -> Iterator[tuple[str, ...]]:
    """Yield groups of prompts to continue together: all prompts from the command line, or one group per typed
    prompt.
    """
    if order.prompts:
        yield order.prompts
        return
    while (prompt := share_json_from_first(ask() if mesh.is_first_rank else None)) is not None:
        yield (prompt,)


def _request(prompt: str, tokenizer: Tokenizer, source: ModelSource, order: Order) -> tuple[list[int], Sampling]:
    """Return a prompt's token ids and its sampling options. Raises `ConfigError` if the prompt and the requested tokens
    do not fit into the model's window.
    """
    ids = tokenizer.encode_prompt(prompt, begin=source.begin_of_text) or [source.end_of_text]
    most = USUAL_TOKENS if order.num_tokens is None else order.num_tokens
    window = source.model.generation_length
    room = window - len(ids) + 1  # the model never reads the last generated token
    start = f"{prompt[:40]}..." if len(prompt) > 40 else prompt
    if room < 1 and not order.slide:
        raise ConfigError(
            f"The prompt {start!r} must fit into the model's window of {window} tokens, but has {len(ids)}. Shorten "
            "the prompt, or pass --slide."
        )
    if order.num_tokens is not None and most > room and not order.slide:
        raise ConfigError(
            f"`--tokens` must be at most {room} after the prompt {start!r}, but is {most}. The model's window "
            f"has {window} tokens, and the prompt takes {len(ids)} of them. Ask for fewer tokens, or pass --slide."
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
