"""Tiny random models for tasks made by `transformers`, with their losses, gradients and logits by `transformers`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import normalizers, pre_tokenizers
from torch import Tensor

from crosscut.config import IGNORED
from crosscut.config.published.tokenizer_classes import QWEN2_SPLIT
from crosscut.model import Batch
from tests.pretrained.encoders import MASK, PADDING, SEGMENTS, TOKENS
from tests.pretrained.models import V, write_random

NUM_CHOICES = 3
"""Number of options of the question: all three sequences are options of one question."""
LABELS = {
    "classes": torch.tensor([2, IGNORED, 0]),
    "number": torch.tensor([2.5, 0.25, -1.0], dtype=torch.float64),
    "spans": torch.tensor([[1, 4], [0, 0], [2, 6]]),
    "choice": torch.tensor([1]),
}
_SIZES = {"num_hidden_layers": 2, "hidden_size": 48, "num_attention_heads": 6, "vocab_size": V}
_OF_BERT = {**_SIZES, "intermediate_size": 48, "max_position_embeddings": 24, "pad_token_id": PADDING}
_UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_OF_GPT2 = {
    "n_layer": 2, "n_embd": 48, "n_head": 6, "n_positions": 24, "vocab_size": V, "pad_token_id": PADDING,
    "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_OF_LLAMA = {**_OF_BERT, "num_key_value_heads": 6, "tie_word_embeddings": False}
_THREE, _ONE = {"num_labels": 3}, {"num_labels": 1}
_NAMED = {"id2label": {0: "no", 1: "perhaps", 2: "yes"}}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertForSequenceClassification": ("classes", {**_OF_BERT, **_UNDROPPED, **_NAMED}),
    "BertForQuestionAnswering": ("spans", {**_OF_BERT, **_UNDROPPED}),
    "BertForMultipleChoice": ("choice", {**_OF_BERT, **_UNDROPPED}),
    "RobertaForSequenceClassification": ("classes", {**_OF_BERT, **_UNDROPPED, **_THREE}),
    "RobertaForMultipleChoice": ("choice", {**_OF_BERT, **_UNDROPPED, "type_vocab_size": 1}),
    "GPT2ForSequenceClassification": ("classes", {**_OF_GPT2, **_THREE}),
    "GPT2ForQuestionAnswering": ("spans", _OF_GPT2),
    "LlamaForSequenceClassification": ("classes", {**_OF_LLAMA, **_THREE}),
    "Qwen3ForQuestionAnswering": ("spans", {**_OF_LLAMA, "head_dim": 8}),
    "BertForSequenceClassification, number": ("number", {**_OF_BERT, **_UNDROPPED, **_ONE}),
    "RobertaForSequenceClassification, number": ("number", {**_OF_BERT, **_UNDROPPED, **_ONE}),
    "GPT2ForSequenceClassification, number": ("number", {**_OF_GPT2, **_ONE, "problem_type": "regression"}),
    "LlamaForSequenceClassification, number": ("number", {**_OF_LLAMA, **_ONE}),
}
"""Head and sizes of each model, by the name of its architecture in `transformers`, and its head if there are two."""


def make_model(folder: Path, architecture: str, **changes: Any) -> Path:
    """Write a model with random weights and a tokenizer."""
    import transformers

    _, sizes = MODELS.get(architecture, ("", {**_OF_BERT, **_UNDROPPED}))
    make = getattr(transformers, architecture.partition(",")[0])
    torch.manual_seed(5)
    write_random(make(make.config_class(**{**sizes, **changes})), folder)
    return folder


def as_qwen2(folder: Path) -> None:
    """Make the tokenizer in a folder split texts as Qwen2 does."""
    path = str(folder / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(path)
    inner.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(tokenizers.Regex(QWEN2_SPLIT), "isolated")
    inner.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    inner.save(path)


def batch_for(architecture: str) -> Batch:
    """Three sequences with padding, and segments for BERT."""
    head, sizes = MODELS[architecture]
    has_types = "Bert" in architecture or sizes.get("type_vocab_size", 1) > 1
    return Batch(tokens=TOKENS, labels=LABELS[head], mask=MASK, segments=SEGMENTS if has_types else None)


def theirs(folder: Path, architecture: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Mean loss, logits and gradients by `transformers` in float64."""
    import transformers

    make: Callable[..., Any] = getattr(transformers, architecture.partition(",")[0]).from_pretrained
    model = make(folder, dtype=torch.float64).train()  # without dropout
    head, _ = MODELS[architecture]
    batch = batch_for(architecture)
    given = {"input_ids": batch.tokens, "attention_mask": MASK.long()}
    if batch.segments is not None:
        given["token_type_ids"] = batch.segments
    if head == "choice":
        given = {name: tensor.unsqueeze(0) for name, tensor in given.items()}
    labels = LABELS[head].where(LABELS[head] != IGNORED, -100)  # numbers stay as they are
    if head == "spans":
        given |= {"start_positions": labels[:, 0], "end_positions": labels[:, 1]}
    else:
        given["labels"] = labels
    told = model(**given)
    told.loss.backward()
    logits = torch.stack([told.start_logits, told.end_logits], -1) if head == "spans" else told.logits
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return told.loss.detach(), logits.detach(), gradients
