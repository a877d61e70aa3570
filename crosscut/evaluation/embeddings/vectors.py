"""Embeddings of texts by an encoder, with the steps in the model's files (`pooling`). A model without such files has
the normalised mean: m / |m|, where m is the mean of the last hidden states of all tokens.

This is the method of Sentence-BERT (Reimers and Gurevych 2019, arXiv 1908.10084, section 3). The tokens include those
that the tokenizer puts around a text, such as `[CLS]` and `[SEP]`.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from crosscut.config.checks import require_at_least
from crosscut.evaluation.embeddings.pooling import SentencePooling
from crosscut.evaluation.embeddings.texts import TextEncoder, TextOptions, encode_texts
from crosscut.evaluation.ranks import Machinery, with_model
from crosscut.model import GPT, Batch
from crosscut.pretrained import ModelSource


def embed(
    place: str,
    read: Callable[[], Sequence[str]],
    on: Machinery,
    *,
    batch_size: int = 32,
    options: TextOptions | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> list[list[float]]:
    """Call `read` for the texts, and embed them with the encoder at `place` on the ranks of `on`. Returns one embedding
    per text, as sentence-transformers computes it from the model's files.

    Texts of similar length share a batch of `batch_size` texts. `tell` is called with messages about heads that are not
    loaded, keys that are ignored, and texts that are cut. Before a rank starts, raises `ConfigError` for a model that
    is not an encoder or whose embeddings have a step that Crosscut does not compute, `DataError` for a text without
    tokens, and the errors of `read` and of `find_model`.
    """
    require_at_least("batch_size", batch_size, 1)
    prepare = partial(encode_texts, place, read, on, options or TextOptions(), tell)
    return with_model(on, prepare, partial(_embed, batch_size))[1]


def _embed(
    batch_size: int, model: GPT, _source: ModelSource, texts: tuple[TextEncoder, list[list[int]]]
) -> list[list[float]]:
    encoder, ids = texts
    return embeddings(model, ids, pooling=encoder.pooling(), batch_size=batch_size).tolist()


@torch.no_grad()
def embeddings(
    model: GPT, ids: Sequence[Sequence[int]], *, pooling: SentencePooling | None = None, batch_size: int = 32
) -> Tensor:
    """Embed N texts, each given by at least one token id. Returns the embeddings [N, D] on the CPU. Every rank of the
    model's layout must call this function, and gets all embeddings. `pooling` is by default the normalised mean.
    """
    pooling = SentencePooling() if pooling is None else pooling
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    device = model.embedding.weight.device
    parts = []
    for start in range(0, len(order), batch_size):
        chosen = [torch.tensor(ids[i], device=device) for i in order[start : start + batch_size]]
        tokens = pad_sequence(chosen, batch_first=True)
        lengths = torch.tensor([len(one) for one in chosen], device=device)
        mask = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
        parts.append(pooling(model.hidden_states(Batch(tokens=tokens, mask=mask)), lengths).cpu())
    if not parts:
        return torch.zeros(0, pooling.steps.size(model.config.hidden_size))
    places = torch.tensor(order).argsort()
    return torch.cat(parts)[places]
