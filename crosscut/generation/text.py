"""Generate one text with a model that is already in memory, such as a model during training."""

from collections.abc import Callable, Collection, Iterable

from crosscut.config.generation.sampling import Sampling
from crosscut.data import Tokens
from crosscut.generation.decoder import Decoder
from crosscut.generation.running import Piece
from crosscut.model import GPT
from crosscut.parallel import reshard

Around = Callable[[Iterable[Piece]], Iterable[Piece]]
"""Function that passes on the pieces of a text, and may note progress or raise an exception before each of them."""


def continue_text(
    model: GPT,
    tokens: Tokens,
    prompt: str,
    sampling: Sampling,
    *,
    begin_of_text: int | None = None,
    stops: Collection[int] = (),
    around: Around = iter,
) -> str:
    """Return the prompt and its continuation. Every rank must call this function.

    The text starts with the token id `begin_of_text`. If `begin_of_text` is None, an empty prompt starts with the
    end-of-text id. The text ends at the end-of-text id and at each id in `stops`. If the text grows longer than the
    window, the window slides. The model's mode (training or evaluation) is restored at the end.
    """
    tokenizer = tokens.tokenizer()
    was_training = model.training
    try:
        decoder = Decoder(model, tokenizer, num_rows=1, stops=stops, slide=True)
        decoder.add(tokenizer.encode_prompt(prompt, begin=begin_of_text) or [tokens.end_of_text], sampling)
        new = "".join(piece.text for piece in around(decoder.run()))
    finally:
        reshard(model)
        model.train(was_training)
    return (prompt + new).strip()
