"""Named models: the paper's models, GPT-2 in four sizes, three larger models of the GPT kind, BERT, published models of
the Llama kind, Nemotron-H, mixtures of experts, and small models for a laptop.

`PRESETS[name]` gives the fields of a `ModelConfig`, and `sequence_length_of` the length of the sequences on which the
model was trained. The models of the paper's scaling study (Table 1) have a head size of 96, and 1.2, 2.5, 4.2 and 8.3
billion parameters. Table 4 lists the models that the paper trained. The 8.3B model has the same size in both tables,
but 32 heads in Table 1 and 24 in Table 4.
"""

from crosscut.config.checks import Settings
from crosscut.config.model import ModelConfig

GPT2_VOCAB_SIZE = 50_257

BERT_VOCAB_SIZE = 30_522
"""Size of BERT's uncased vocabulary."""


def _shape(num_layers: int, hidden_size: int, num_heads: int, **rest: object) -> Settings:
    return {"num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads, **rest}


def _gpt(num_layers: int, hidden_size: int, num_heads: int, **rest: object) -> Settings:
    return _shape(num_layers, hidden_size, num_heads, vocab_size=GPT2_VOCAB_SIZE, **rest)


def _llama(num_layers: int, hidden_size: int, num_heads: int, **rest: object) -> Settings:
    family = {"positions": "rotary", "norm": "rms", "layers": ("attention swiglu",), "biases": "none", "dropout": 0.0}
    return {**_shape(num_layers, hidden_size, num_heads), **family, **rest}


def _nemotron_h(pattern: str, hidden_size: int, num_heads: int, **rest: object) -> Settings:
    kinds = {"M": "mamba2", "*": "attention", "-": "relu2"}
    layers = tuple(kinds[letter] for letter in pattern)
    family = {"positions": "none", "norm": "rms", "biases": "none", "tied": False, "dropout": 0.0}
    return {**_shape(len(layers), hidden_size, num_heads), "layers": layers, **family, **rest}


def _bert(num_layers: int, hidden_size: int, num_heads: int, **rest: object) -> Settings:
    family = {"attention": "bidirectional", "token_types": 2, "head": "masked_tokens", "sentence_order": True}
    return {**_shape(num_layers, hidden_size, num_heads), **family, "max_sequence_length": 512, **rest}


_ORIGINAL_BERT: Settings = {"norm_place": "after", "layers": ("attention gelu_exact",), "norm_epsilon": 1e-12}

_QWEN: Settings = {"vocab_size": 151_936, "rotary_base": 1_000_000.0, "norm_epsilon": 1e-6}
_LLAMA2: Settings = {"vocab_size": 32_000, "max_sequence_length": 4096, "tied": False}
_LLAMA3: Settings = {
    "num_kv_heads": 8, "vocab_size": 128_256, "max_sequence_length": 8192, "rotary_base": 500_000.0, "tied": False,
}  # fmt: skip

_DEEPSEEK_EXPERTS: Settings = {
    "number": 256,
    "per_token": 8,
    "size": 2048,
    "shared_size": 2048,
    "scores": "sigmoid",
    "scaling": 2.5,
    "groups": 8,
    "groups_per_token": 4,
    "balance_loss": 0.001,
    "balance_bias": True,
}
MODERN: Settings = {
    "positions": "rotary",
    "norm": "rms",
    "norm_affine": False,
    "embedding_norm": True,
    "qk_norm": True,
    "layers": ("attention relu2",),
    "biases": "none",
    "tied": False,
    "dropout": 0.0,
}
"""Settings of the models of the recipe "modern" (docs/recipe.md)."""

PRESETS: dict[str, Settings] = {
    # Paper, Table 1: the scaling study.
    "megatron-1.2b": _gpt(40, 1536, 16),
    "megatron-2.5b": _gpt(54, 1920, 20),
    "megatron-4.2b": _gpt(64, 2304, 24),
    "megatron-8.3b": _gpt(72, 3072, 32),
    # Paper, Table 4: the models that were trained to convergence (the 2.5B model is in Table 1).
    "megatron-355m": _gpt(24, 1024, 16),
    "megatron-8.3b-24-heads": _gpt(72, 3072, 24),
    # GPT-2 (Radford et al. 2019), Table 2, with the parameter counts of the released models.
    "gpt2-small": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    # Larger models, with GPT-2's vocabulary. Their published layouts are in examples/, in files of the same names.
    # Turing-NLG: Microsoft's announcement of 2020-02-13.
    "turing-nlg-17b": _gpt(78, 4256, 28),
    # GPT-3 (Brown et al. 2020, arXiv 2005.14165, Table 2.1) with dense attention in all layers, as in Narayanan et al.
    # 2021 (arXiv 2104.04473). Half of the original's layers have sparse attention.
    "gpt3-175b": _gpt(96, 12_288, 96, max_sequence_length=2048),
    # Megatron-Turing NLG (Smith et al. 2022, arXiv 2201.11990).
    "mt-nlg-530b": _gpt(105, 20_480, 128, max_sequence_length=2048),
    # The paper's later version, section 5.3: BERT with the norms before the sublayers.
    "megatron-bert-336m": _bert(24, 1024, 16, vocab_size=BERT_VOCAB_SIZE),
    "megatron-bert-1.3b": _bert(24, 2048, 32, vocab_size=BERT_VOCAB_SIZE),
    "megatron-bert-3.9b": _bert(48, 2560, 40, vocab_size=BERT_VOCAB_SIZE),
    # BERT (Devlin et al. 2018), section 3. It has the norms after the sublayers.
    "bert-base": _bert(12, 768, 12, vocab_size=BERT_VOCAB_SIZE, **_ORIGINAL_BERT),
    "bert-large": _bert(24, 1024, 16, vocab_size=BERT_VOCAB_SIZE, **_ORIGINAL_BERT),
    # Published models of the Llama kind, with the values of their own configurations.
    "smollm2-135m": _llama(
        30, 576, 9, num_kv_heads=3, mlp_size=1536, vocab_size=49_152, max_sequence_length=8192, rotary_base=100_000.0
    ),
    "qwen2.5-0.5b": _llama(
        24, 896, 14, num_kv_heads=2, mlp_size=4864, max_sequence_length=32_768, biases="qkv", **_QWEN
    ),
    "qwen3-0.6b": _llama(
        28, 1024, 16, num_kv_heads=8, head_size=128, mlp_size=3072, max_sequence_length=40_960, qk_norm=True, **_QWEN
    ),
    "llama2-7b": _llama(32, 4096, 32, mlp_size=11_008, **_LLAMA2),
    "llama2-13b": _llama(40, 5120, 40, mlp_size=13_824, **_LLAMA2),
    # Code Llama (arXiv 2308.12950): the only released Llama of this size.
    "codellama-34b": _llama(
        48,
        8192,
        64,
        num_kv_heads=8,
        mlp_size=22_016,
        rotary_base=1_000_000.0,
        **_LLAMA2 | {"max_sequence_length": 16_384},
    ),
    "llama3-8b": _llama(32, 4096, 32, mlp_size=14_336, **_LLAMA3),
    "llama3-70b": _llama(80, 8192, 64, mlp_size=28_672, **_LLAMA3),
    # Nemotron-H (arXiv 2504.03624): state-space layers, four layers of attention, and MLPs, with one part per layer.
    "nemotron-h-8b": _nemotron_h(
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        4096,
        32,
        num_kv_heads=8,
        head_size=128,
        mlp_size=21_504,
        vocab_size=131_072,
        max_sequence_length=8192,
        mamba2={"num_heads": 128, "head_size": 64, "num_groups": 8, "state_size": 128},
    ),
    # Mixtures of experts, with the values of their own configurations: Mixtral (arXiv 2401.04088), Qwen3 (arXiv
    # 2505.09388) and DeepSeek-V3 (arXiv 2412.19437) without the layer that predicts further tokens.
    "mixtral-8x7b": _llama(
        32,
        4096,
        32,
        num_kv_heads=8,
        layers=("attention experts",),
        vocab_size=32_000,
        max_sequence_length=32_768,
        rotary_base=1_000_000.0,
        tied=False,
        experts={"number": 8, "per_token": 2, "size": 14_336},
    ),
    "qwen3-30b-a3b": _llama(
        48,
        2048,
        32,
        num_kv_heads=4,
        head_size=128,
        mlp_size=6144,
        layers=("attention experts",),
        max_sequence_length=40_960,
        qk_norm=True,
        tied=False,
        experts={"number": 128, "per_token": 8, "size": 768},
        **_QWEN,
    ),
    "deepseek-v3": _llama(
        61,
        7168,
        128,
        mlp_size=18_432,
        layers=("latent_attention swiglu",) * 3 + ("latent_attention experts",) * 58,
        vocab_size=129_280,
        max_sequence_length=4096,
        norm_epsilon=1e-6,
        tied=False,
        latent_attention={
            "query_rank": 1536,
            "key_value_rank": 512,
            "nope_size": 128,
            "rope_size": 64,
            "value_size": 128,
        },
        experts=_DEEPSEEK_EXPERTS,
    ),
    # Models for a laptop's CPU. The tokenizer determines the vocabulary size.
    "laptop-tiny": _shape(2, 64, 4, max_sequence_length=128),
    "laptop-small": _shape(4, 256, 4, max_sequence_length=256),
    "laptop-base": _shape(6, 384, 6, max_sequence_length=256),
    "laptop-llama": _llama(4, 256, 4, num_kv_heads=2, mlp_size=704, max_sequence_length=256),
    "laptop-bert": _bert(4, 256, 4, max_sequence_length=128),
    # The demo's model (config/demo.toml).
    "demo": _shape(4, 128, 4, max_sequence_length=128, **MODERN),
}
"""Settings of the known models, by the name that `model.preset` takes."""

LAPTOP_PRESETS = tuple(name for name in PRESETS if name.startswith("laptop-"))
"""Presets of small models, which are not published."""

DEMO_PRESET = "demo"
"""Preset of the demo's model, whose recipe is "modern"."""

_TRAINED_ON = {"smollm2-135m": 2048, "qwen2.5-0.5b": 4096, "qwen3-0.6b": 4096, "qwen3-30b-a3b": 4096}
"""Tokens per sequence in the main part of the training, for models that were trained on longer sequences only at the
end: SmolLM2 (arXiv 2502.02737), Qwen2.5 (arXiv 2412.15115) and Qwen3 (arXiv 2505.09388)."""


def sequence_length_of(preset: str) -> int:
    """Length, in tokens, of the sequences on which a preset's model was trained."""
    return _TRAINED_ON.get(preset) or PRESETS[preset].get("max_sequence_length", ModelConfig.max_sequence_length)
