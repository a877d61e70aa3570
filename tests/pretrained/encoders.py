"""Tiny random encoders made by `transformers`, and their hidden states by `transformers`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crosscut.config.data import Objective
from crosscut.data import Tokenizer
from crosscut.model.documents import Context

B, S, V = 3, 11, 300
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


def _roberta(**sizes: Any) -> Any:
    from transformers import RobertaConfig, RobertaModel

    config = RobertaConfig(**{**_SIZES, "type_vocab_size": 1, "pad_token_id": PADDING, **sizes})
    return RobertaModel(config, add_pooling_layer=False)


def _bert(**sizes: Any) -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**{**_SIZES, **sizes}), add_pooling_layer=False)


def _with_heads(**sizes: Any) -> Any:
    from transformers import BertConfig, BertForPreTraining

    return BertForPreTraining(BertConfig(**{**_SIZES, **sizes}))


def _for_masked_tokens(**sizes: Any) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**{**_SIZES, **sizes}))


def _for_classes(**sizes: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**{**_SIZES, **sizes}))


def _roberta_with_head(**sizes: Any) -> Any:
    from transformers import RobertaConfig, RobertaForMaskedLM

    return RobertaForMaskedLM(RobertaConfig(**{**_SIZES, "type_vocab_size": 1, "pad_token_id": PADDING, **sizes}))


ENCODERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "bert": (_bert, {}),
    "bert with heads": (_with_heads, {}),
    "bert for masked tokens": (_for_masked_tokens, {}),
    "bert for classes": (_for_classes, {}),
    "bert for a number": (_for_classes, {"num_labels": 1}),
    "bert with its own sizes": (_bert, {"type_vocab_size": 3, "layer_norm_eps": 1e-6}),
    "roberta": (_roberta, {}),
    "roberta with a head": (_roberta_with_head, {}),
    "roberta with a head that is not tied": (_roberta_with_head, {"tie_word_embeddings": False}),
}
IN_THREES = {f"{name} in threes": (make, {**sizes, **_THREES}) for name, (make, sizes) in ENCODERS.items()}
"""The same encoders, with heads that three ranks can share."""


def context_of(name: str) -> Context:
    """The padding of `TOKENS`, and the segments if the encoder has more than one type of tokens."""
    return Context(segments=None if "roberta" in name else SEGMENTS, mask=MASK)


def make_encoder(folder: Path, name: str, *, wordpiece: bool = False) -> Path:
    """Write an encoder of `ENCODERS` or `IN_THREES` with random weights, and a tokenizer: a byte-level BPE, or a
    WordPiece as real encoders have. No norm is the identity and no bias is zero.
    """
    make, sizes = (ENCODERS | IN_THREES)[name]
    torch.manual_seed(3)
    model = make(**sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2).add_(1.0 if parameter.dim() == 1 else 0.0)
    model.save_pretrained(folder)
    text = "the quick brown fox jumps over the lazy dog " * 50
    objective = Objective.MASKED if wordpiece else Objective.CAUSAL
    Tokenizer.train([text], vocab_size=V, objective=objective).save(folder / "tokenizer.json")
    return folder


@torch.no_grad()
def their_hidden_states(folder: Path, dtype: torch.dtype, tokens: Tensor, context: Context) -> Tensor:
    """The last hidden states [B, S, H] by `transformers`."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=dtype).eval()
    mask = None if context.mask is None else context.mask.long()
    hidden: Tensor = model(tokens, attention_mask=mask, token_type_ids=context.segments).last_hidden_state
    return hidden
