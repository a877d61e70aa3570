"""Generate one text with a model that is already in memory, such as a model during training."""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from crosscut.config.generation.sampling import Sampling
from crosscut.data import Tokens
from crosscut.generation.decoder import Decoder
from crosscut.generation.running import Piece
from crosscut.model import GPT
from crosscut.parallel import reshard

Around = Callable[[Iterable[Piece]], Iterable[Piece]]
"""Function that passes on the pieces of a text, and may note progress or raise an exception before each of them."""


class SpecialIds(NamedTuple):
    """Special token ids of a model."""

    begin_of_text: int | None = None
    """Id with which a text starts."""
    stops: Collection[int] = ()
    """Ids that end a text, besides the end of text."""


def continue_text(
    model: GPT,
    tokens: Tokens,
    prompt: str,
    sampling: Sampling,
    *,
    special: SpecialIds | None = None,
    around: Around = iter,
) -> str:
    """Return the prompt and its continuation. Every rank must call this function.

    Without an id that begins a text, an empty prompt starts with the end-of-text id. The text ends at the end-of-text
    id and at each id in `special.stops`. If the text grows longer than the
    window, the window slides. The model's mode (training or evaluation) is restored at the end.
    """
    tokenizer = tokens.tokenizer()
    begin, stops = special or SpecialIds()
    was_training = model.training
    try:
        decoder = Decoder(model, tokenizer, num_rows=1, stops=stops, slide=True)
        decoder.add(tokenizer.encode_prompt(prompt, begin=begin) or [tokens.end_of_text], sampling)
        new = "".join(piece.text for piece in around(decoder.run()))
    finally:
        reshard(model)
        model.train(was_training)
    return (prompt + new).strip()
