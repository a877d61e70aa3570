"""One text from a model in memory, such as one in training."""

from crosscut.data import TokenFolder
from crosscut.generation.decoder import Decoder
from crosscut.generation.sampling import Sampling
from crosscut.model import GPT
from crosscut.parallel import reshard


def continue_text(
    model: GPT, tokens: TokenFolder, prompt: str, sampling: Sampling, *, begin_of_text: int | None = None
) -> str:
    """The prompt and what the model makes of it; every rank calls it.

    What begins a text comes first; without it an empty prompt starts at an end of text. The window slides where the
    text outgrows it. The model is left as it was.
    """
    tokenizer = tokens.tokenizer()
    was_training = model.training
    try:
        decoder = Decoder(model, tokenizer, num_rows=1, slide=True)
        decoder.add(tokenizer.encode_prompt(prompt, begin=begin_of_text) or [tokens.end_of_text], sampling)
        new = "".join(piece.text for piece in decoder.run())
    finally:
        reshard(model)
        model.train(was_training)
    return (prompt + new).strip()
