"""Embeddings of texts by an encoder: the mean of the last hidden states of a text's tokens, scaled to length 1.

    embedding = m / |m|,    m = mean of the hidden states of the tokens that are not padding

This is the method of Sentence-BERT (Reimers and Gurevych 2019, arXiv 1908.10084, section 3) with its default pooling.
The tokens include those that the tokenizer puts around a text, such as `[CLS]` and `[SEP]`.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from crosscut.config.checks import require_at_least
from crosscut.evaluation.embeddings.texts import encode_texts
from crosscut.evaluation.ranks import Machinery, with_model
from crosscut.model import GPT
from crosscut.model.documents import Context
from crosscut.pretrained import ModelSource


def embed(
    place: str,
    read: Callable[[], Sequence[str]],
    on: Machinery,
    *,
    batch_size: int = 32,
    max_tokens: int = 0,
    tell: Callable[[str], None] = lambda _: None,
) -> list[list[float]]:
    """Call `read` for the texts, and embed them with the encoder at `place` on the ranks of `on`. Returns one embedding
    per text.

    Texts of similar length share a batch of `batch_size` texts. A text is cut after `max_tokens` tokens; 0 means the
    length in the model's `sentence_bert_config.json` or, without this file, the model's maximum sequence length. `tell`
    is called with messages about heads that are not loaded and texts that are cut. Before a rank starts, raises
    `ConfigError` for a model that is not an encoder or whose embeddings are computed differently, `DataError` for a
    text without tokens, and the errors of `read` and of `find_model`.
    """
    require_at_least("batch_size", batch_size, 1)
    prepare = partial(encode_texts, place, read, on, max_tokens, tell)
    return with_model(on, prepare, partial(_embed, batch_size))[1]


def _embed(batch_size: int, model: GPT, _source: ModelSource, ids: list[list[int]]) -> list[list[float]]:
    return embeddings(model, ids, batch_size=batch_size).tolist()


@torch.no_grad()
def embeddings(model: GPT, ids: Sequence[Sequence[int]], *, batch_size: int = 32) -> Tensor:
    """Embed N texts, each given by at least one token id. Returns the embeddings [N, H] on the CPU. Every rank of the
    model's layout must call this function, and gets all embeddings.
    """
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    device = model.token_weight.device
    parts = []
    for start in range(0, len(order), batch_size):
        chosen = [torch.tensor(ids[i], device=device) for i in order[start : start + batch_size]]
        tokens = pad_sequence(chosen, batch_first=True)
        lengths = torch.tensor([len(one) for one in chosen], device=device)
        mask = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
        parts.append(_pooled(model.hidden_states(tokens, Context(mask=mask)), mask).cpu())
    if not parts:
        return torch.zeros(0, model.config.hidden_size)
    places = torch.tensor(order).argsort()
    return torch.cat(parts)[places]


def _pooled(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean [B, H] of the hidden states [B, S, H] at the tokens where `mask` [B, S] is true, scaled to length
    1. The result is in float32 or wider.
    """
    weights = mask.unsqueeze(2)
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32)).where(weights, 0.0)
    return F.normalize(hidden.sum(1) / weights.sum(1), dim=1)
