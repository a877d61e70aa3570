"""Names of published tensors, by the `model_type` of the family."""

from types import MappingProxyType

from crosscut.config import ModelConfig
from crosscut.pretrained.names.attention import (
    ARCEE,
    BERT,
    BERT_WITH_HEADS,
    BIGCODE,
    GPT2,
    LLAMA,
    NANOCHAT,
    OLMO2,
    STARCODER2,
)
from crosscut.pretrained.names.delta import OLMO_HYBRID, QWEN3_NEXT
from crosscut.pretrained.names.experts import GRANITE_MOE, MIXTRAL, QWEN2_MOE, QWEN3_MOE
from crosscut.pretrained.names.latent import deepseek
from crosscut.pretrained.names.source import OUTPUT, Source, TensorNames
from crosscut.pretrained.names.state_space import BAMBA, GRANITE, JAMBA, MAMBA, NEMOTRON_H

_NAMES = MappingProxyType(
    {
        "gpt2": GPT2,
        "gpt_bigcode": BIGCODE,
        **dict.fromkeys(("llama", "qwen2", "qwen3"), LLAMA),
        "olmo2": OLMO2,
        "starcoder2": STARCODER2,
        "arcee": ARCEE,
        "nanochat": NANOCHAT,
        "bert": BERT,
        "mixtral": MIXTRAL,
        "qwen2_moe": QWEN2_MOE,
        **dict.fromkeys(("qwen3_moe", "olmoe"), QWEN3_MOE),
        "granitemoe": GRANITE_MOE,
        "mamba": MAMBA,
        "mamba2": NEMOTRON_H,
        "nemotron_h": NEMOTRON_H,
        "bamba": BAMBA,
        "granitemoehybrid": GRANITE,
        "jamba": JAMBA,
        "qwen3_next": QWEN3_NEXT,
        "olmo_hybrid": OLMO_HYBRID,
    }
)


def names_of(model_type: str, config: ModelConfig) -> TensorNames:
    """Return the names of the tensors of a model without a head for masked tokens or a task."""
    return deepseek(config.latent_attention) if model_type.startswith("deepseek") else _NAMES[model_type]


__all__ = ["BERT_WITH_HEADS", "OUTPUT", "Source", "TensorNames", "names_of"]
