"""Tiny random encoders made by `transformers`, and their hidden states by `transformers`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crosscut.model import Batch
from tests.pretrained.models import V, write_random

B, S = 3, 11
PADDING = 1
"""Id of RoBERTa's padding, which `transformers` does not count in the positions."""
LENGTHS = torch.tensor([S, 4, 7])
MASK = torch.arange(S) < LENGTHS[:, None]
TOKENS = (2 + torch.arange(B * S).view(B, S) * 37 % (V - 2)).where(MASK, PADDING)
SEGMENTS = ((torch.arange(S) >= LENGTHS[:, None] // 2) & MASK).long()

_SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 16, "vocab_size": V,
}  # fmt: skip
_THREES = {"hidden_size": 48, "num_attention_heads": 6}
_OF_ROBERTA = {"type_vocab_size": 1, "pad_token_id": PADDING}

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "bert with heads": ("BertForPreTraining", {}),
    "bert for masked tokens": ("BertForMaskedLM", {}),
    "bert for classes": ("BertForSequenceClassification", {}),
    "bert for a number": ("BertForSequenceClassification", {"num_labels": 1}),
    "bert with its own sizes": ("BertModel", {"type_vocab_size": 3, "layer_norm_eps": 1e-6}),
    "roberta": ("RobertaModel", _OF_ROBERTA),
    "roberta with a head": ("RobertaForMaskedLM", _OF_ROBERTA),
    "roberta with a head that is not tied": ("RobertaForMaskedLM", {**_OF_ROBERTA, "tie_word_embeddings": False}),
}
"""Class in `transformers` and sizes of each encoder."""
IN_THREES = {f"{name} in threes": (kind, {**sizes, **_THREES}) for name, (kind, sizes) in ENCODERS.items()}
"""The same encoders, with heads that three ranks can share."""


def batch_of(name: str) -> Batch:
    """`TOKENS` with their padding, and the segments if the encoder has more than one type of tokens."""
    return Batch(tokens=TOKENS, segments=None if "roberta" in name else SEGMENTS, mask=MASK)


def make_encoder(folder: Path, name: str, *, wordpiece: bool = False) -> Path:
    """Write an encoder of `ENCODERS` or `IN_THREES` with random weights, and a tokenizer: a byte-level BPE, or a
    WordPiece as real encoders have. No norm is the identity and no bias is zero.
    """
    import transformers

    kind, sizes = (ENCODERS | IN_THREES)[name]
    make = getattr(transformers, kind)
    torch.manual_seed(3)
    options = {"add_pooling_layer": False} if kind.endswith("Model") else {}
    write_random(make(make.config_class(**{**_SIZES, **sizes}), **options), folder, wordpiece=wordpiece)
    return folder


@torch.no_grad()
def their_hidden_states(folder: Path, dtype: torch.dtype, batch: Batch) -> Tensor:
    """The last hidden states [B, S, H] by `transformers`."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=dtype).eval()
    mask = None if batch.mask is None else batch.mask.long()
    hidden: Tensor = model(batch.tokens, attention_mask=mask, token_type_ids=batch.segments).last_hidden_state
    return hidden
