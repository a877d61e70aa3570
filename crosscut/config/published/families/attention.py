"""Published families whose layers are attention and an MLP, with each family's keys for the fields of `ModelConfig`.

SmolLM is a Llama. GPT-BigCode is GPT-2 with multi-query attention, and StarCoder2 is GPT-2 with rotary positions. OLMo
2 is a Llama with norms on the outputs of the parts, and with norms of all queries and of all keys. Arcee is a Llama
whose MLP has no gate and uses squared ReLU. NanoChat is an Arcee with QK-norm, a norm of the embedding and a soft cap
on the logits, and its norms have no weights. RoBERTa is a BERT whose positions begin at `pad_token_id` + 1; MiniLM and
BGE are BERTs.
"""

import dataclasses
from collections.abc import Mapping

from crosscut.config.published.families.family import PLAIN, SOFT_CAP_FIELD, Family

_TASK_MODELS = {"classes": "SequenceClassification", "spans": "QuestionAnswering", "choice": "MultipleChoice"}
"""Ends of the names of architectures that solve a task, keyed by their head."""


def task_models(prefix: str, *heads: str) -> dict[str, Mapping[str, object]]:
    """Architectures with a head for a task, such as `GPT2ForSequenceClassification`."""
    return {f"{prefix}For{_TASK_MODELS[head]}": {"head": head} for head in heads}


LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "mlp_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_sequence_length": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
_LLAMA_FIXED = {
    "positions": "rotary",
    "norm": "rms",
    "layers": ("attention swiglu",),
    "biases": "none",
    "qk_norm": False,
    **PLAIN,
}
_LLAMA_DEFAULTS = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_heads": 32,
    "mlp_size": 11_008,
    "vocab_size": 32_000,
    "max_sequence_length": 2048,
    "norm_epsilon": 1e-6,
    "tied": False,
    "dropout": 0.0,
}
LLAMA_TIED = (("embed_tokens.weight", "lm_head.weight"),)
_QWEN_DEFAULTS = {
    **_LLAMA_DEFAULTS,
    "num_kv_heads": 32,
    "mlp_size": 22_016,
    "vocab_size": 151_936,
    "max_sequence_length": 32_768,
}
_LLAMA_REQUIRED = {"hidden_act": ("silu",)}

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    {
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_heads": "n_head",
        "mlp_size": "n_inner",
        "vocab_size": "vocab_size",
        "max_sequence_length": "n_positions",
        "norm_epsilon": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
        "dropout": "resid_pdrop",
    },
    {
        "positions": "learned",
        "norm": "layer",
        "layers": ("attention gelu",),
        "biases": "all",
        "qk_norm": False,
        **PLAIN,
    },
    {
        "num_layers": 12,
        "hidden_size": 768,
        "num_heads": 12,
        "vocab_size": 50_257,
        "max_sequence_length": 1024,
        "norm_epsilon": 1e-5,
        "tied": True,
        "dropout": 0.1,
    },
    {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    dropouts=("embd_pdrop", "attn_pdrop"),
    heads=task_models("GPT2", "classes", "spans"),
    tied_tensors=(("wte.weight", "lm_head.weight"),),
    aliases={
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
)
BIGCODE = dataclasses.replace(
    GPT2,
    model_type="gpt_bigcode",
    architecture="GPTBigCodeForCausalLM",
    fixed={**GPT2.fixed, "num_kv_heads": 1},
    required={
        "activation_function": ("gelu_pytorch_tanh", "gelu_new"),
        "multi_query": (True,),
        "scale_attn_weights": (True,),
        "add_cross_attention": (False,),
    },
    heads=task_models("GPTBigCode", "classes"),
)
LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    LLAMA_KEYS,
    _LLAMA_FIXED,
    _LLAMA_DEFAULTS,
    _LLAMA_REQUIRED,
    biases=("attention_bias", "mlp_bias"),
    heads=task_models("Llama", "classes", "spans"),
    tied_tensors=LLAMA_TIED,
)
_WINDOWED = dataclasses.replace(LLAMA, biases=(), window=4096)
MISTRAL = dataclasses.replace(
    _WINDOWED,
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={**_LLAMA_DEFAULTS, "num_kv_heads": 8, "mlp_size": 14_336, "max_sequence_length": 131_072},
    is_windowed=True,
    heads=task_models("Mistral", "classes"),
)
QWEN2 = dataclasses.replace(
    _WINDOWED,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed={**_LLAMA_FIXED, "biases": "qkv"},
    defaults=_QWEN_DEFAULTS,
    heads=task_models("Qwen2", "classes", "spans"),
)
QWEN3 = dataclasses.replace(
    _WINDOWED,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={**_LLAMA_FIXED, "qk_norm": True, "qk_norm_kind": "rms", "qk_norm_over": "head"},
    defaults={**_QWEN_DEFAULTS, "head_size": 128},
    required={**_LLAMA_REQUIRED, "attention_bias": (False,)},
    heads=task_models("Qwen3", "classes", "spans"),
)
OLMO2 = dataclasses.replace(
    LLAMA,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fixed={
        **_LLAMA_FIXED,
        "norm_place": "output",
        "qk_norm": True,
        "qk_norm_kind": "rms",
        "qk_norm_over": "all_heads",
    },
    defaults={**_LLAMA_DEFAULTS, "vocab_size": 50_304, "norm_epsilon": 1e-5},
    required={**_LLAMA_REQUIRED, "attention_bias": (False,)},
    biases=(),
    heads=task_models("Olmo2", "classes"),
)
STARCODER2 = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    {**LLAMA_KEYS, "norm_epsilon": "norm_epsilon", "dropout": "residual_dropout"},
    {
        "positions": "rotary",
        "norm": "layer",
        "layers": ("attention gelu",),
        "biases": "all",
        "qk_norm": False,
        **PLAIN,
    },
    {
        **_LLAMA_DEFAULTS,
        "num_layers": 30,
        "hidden_size": 3072,
        "num_heads": 24,
        "num_kv_heads": 2,
        "mlp_size": 12_288,
        "vocab_size": 49_152,
        "max_sequence_length": 4096,
        "norm_epsilon": 1e-5,
        "tied": True,
    },
    {"hidden_act": ("gelu_pytorch_tanh", "gelu_new")},
    biases=("use_bias",),
    dropouts=("embedding_dropout", "attention_dropout"),
    is_windowed=True,
    heads=task_models("Starcoder2", "classes"),
    tied_tensors=LLAMA_TIED,
)
ARCEE = dataclasses.replace(
    LLAMA,
    model_type="arcee",
    architecture="ArceeForCausalLM",
    fixed={**_LLAMA_FIXED, "layers": ("attention relu2",)},
    defaults={
        **_LLAMA_DEFAULTS,
        "hidden_size": 2560,
        "mlp_size": 18_432,
        "max_sequence_length": 4096,
        "norm_epsilon": 1e-5,
    },
    required={"hidden_act": ("relu2",)},
    heads=task_models("Arcee", "classes", "spans"),
)
NANOCHAT = dataclasses.replace(
    LLAMA,
    model_type="nanochat",
    architecture="NanoChatForCausalLM",
    keys={**LLAMA_KEYS, SOFT_CAP_FIELD: "final_logit_softcapping"},
    fixed={
        **{name: value for name, value in _LLAMA_FIXED.items() if name != SOFT_CAP_FIELD},
        "layers": ("attention relu2",),
        "qk_norm": True,
        "qk_norm_kind": "rms",
        "qk_norm_over": "head",
        "norm_affine": False,
        "embedding_norm": True,
    },
    defaults={
        **_LLAMA_DEFAULTS,
        "num_layers": 12,
        "hidden_size": 768,
        "num_heads": 6,
        "num_kv_heads": 6,
        "mlp_size": 8192,
        "vocab_size": 50_304,
        SOFT_CAP_FIELD: 15.0,
    },
    required={"hidden_act": ("relu2",), "attention_bias": (False,)},
    biases=(),
    heads={},
    rotates_before_norm=True,
)
BERT = Family(
    "bert",
    "BertModel",
    {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_heads": "num_attention_heads",
        "mlp_size": "intermediate_size",
        "vocab_size": "vocab_size",
        "max_sequence_length": "max_position_embeddings",
        "token_types": "type_vocab_size",
        "norm_epsilon": "layer_norm_eps",
        "dropout": "hidden_dropout_prob",
    },
    {
        "positions": "learned",
        "norm": "layer",
        "layers": ("attention gelu_exact",),
        "biases": "all",
        "qk_norm": False,
        "tied": True,
        **{name: value for name, value in PLAIN.items() if name not in ("token_types", "head", "sentence_order")},
        "attention": "bidirectional",
        "norm_place": "after",
    },
    {
        "num_layers": 12,
        "hidden_size": 768,
        "num_heads": 12,
        "mlp_size": 3072,
        "vocab_size": 30_522,
        "max_sequence_length": 512,
        "token_types": 2,
        "norm_epsilon": 1e-12,
        "dropout": 0.1,
    },
    {
        "hidden_act": ("gelu",),
        "position_embedding_type": ("absolute", None),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
    dropouts=("attention_probs_dropout_prob",),
    heads={
        "BertForPreTraining": {"head": "masked_tokens", "sentence_order": True},
        "BertForMaskedLM": {"head": "masked_tokens", "sentence_order": False},
        **task_models("Bert", "classes", "spans", "choice"),
    },
    tied_tensors=(
        ("embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    ),
)
ROBERTA = dataclasses.replace(
    BERT,
    model_type="roberta",
    architecture="RobertaModel",
    defaults={**BERT.defaults, "vocab_size": 50_265},
    required={**BERT.required, "pad_token_id": (1,)},
    heads={
        "RobertaForMaskedLM": {"head": "masked_tokens", "sentence_order": False},
        **task_models("Roberta", "classes", "spans", "choice"),
    },
    tied_tensors=(
        ("embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
        ("lm_head.bias", "lm_head.decoder.bias"),
    ),
    first_position=2,
)
ATTENTION_FAMILIES = (
    GPT2, BIGCODE, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, STARCODER2, ARCEE, NANOCHAT, BERT, ROBERTA,
)  # fmt: skip
"""Families in the order in which a model's family is looked for."""
