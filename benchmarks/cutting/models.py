"""Models of 25 families of transformers: tiny ones with random weights, to cut, and the sizes of published ones.

    from benchmarks.cutting.models import FAMILIES, build, large_matrices

    report = prove_module(partial(build, "gpt2"), cut, Layout(tensor=2))
    large_matrices("gpt2")  # {"transformer.wte.weight": 0.31, "transformer.h.*.mlp.c_fc.weight": 0.23, ...}

A tiny model has two layers, and as many heads and key-value heads as four tensor ranks can divide or share. Its dropout
is that of its family. Nothing is downloaded: the sizes of the published models are typed in.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BATCH, TOKENS, IMAGE, LABELS = 2, 8, 16, 8
VOCABULARY = 48


class Family(NamedTuple):
    """Family of models."""

    model: str
    """Name of the class in transformers."""
    inputs: Callable[[], dict[str, Any]]
    tiny: dict[str, Any]
    """Sizes of the tiny model, which its config takes."""
    checkpoint: str
    """Name of a published checkpoint on the Hugging Face Hub."""
    published: dict[str, Any]
    """Sizes of the published checkpoint. Both configs take the other values from the library's defaults."""


# --- inputs -----------------------------------------------------------------------------------------------------------


def tokens() -> Tensor:
    """Random ids [BATCH, TOKENS] that are no ids of special tokens."""
    return torch.randint(4, VOCABULARY, (BATCH, TOKENS))


def decoder_inputs() -> dict[str, Any]:
    """Text whose next tokens are the targets."""
    ids = tokens()
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def encoder_inputs() -> dict[str, Any]:
    """Text, other tokens as targets, and one text that is padded."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[-1, -2:] = 0
    return {"input_ids": tokens(), "labels": tokens(), "attention_mask": mask}


def translation_inputs() -> dict[str, Any]:
    """Text of the encoder and targets of the decoder."""
    return {"input_ids": tokens(), "labels": tokens(), "use_cache": False}


def speech_inputs() -> dict[str, Any]:
    """Spectrogram of the encoder, two frames for each of its positions, and targets of the decoder."""
    return {"input_features": torch.randn(BATCH, 8, 2 * TOKENS), "labels": tokens(), "use_cache": False}


def image_inputs() -> dict[str, Any]:
    """Images and their classes."""
    return {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE), "labels": torch.randint(LABELS, (BATCH,))}


def pair_inputs() -> dict[str, Any]:
    """Images and texts that belong together. The model reads a text's vector at the token that ends the text."""
    ids = tokens() - 1
    ids[:, -1] = VOCABULARY - 1
    return {"input_ids": ids, "pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE), "return_loss": True}


# --- families ---------------------------------------------------------------------------------------------------------


def shape(hidden: int, mlp: int, layers: int, heads: int, vocabulary: int | None = None, **more: Any) -> dict[str, Any]:
    """Sizes under the names that most configs have."""
    words = {} if vocabulary is None else {"vocab_size": vocabulary}
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, **words, **more}


def two_stacks(model: int, mlp: int, layers: int, heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    """Sizes of an encoder and a decoder under the names that BART has."""
    each = {"layers": layers, "attention_heads": heads, "ffn_dim": mlp}
    stacks = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in each.items()}
    return {"d_model": model, "vocab_size": vocabulary, **stacks, **more}


TINY = shape(16, 32, 2, 4, VOCABULARY)
TINY_TEXT = {**TINY, "max_position_embeddings": 16}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = {"num_key_value_heads": 2}
TINY_IMAGE = shape(16, 32, 2, 4, image_size=IMAGE, patch_size=4, num_labels=LABELS)

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", decoder_inputs, {**TINY, **SPECIAL, **GROUPED, "tie_word_embeddings": True},
        "meta-llama/Llama-3.2-1B",
        shape(2048, 8192, 16, 32, 128_256, num_key_value_heads=8, tie_word_embeddings=True),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", decoder_inputs, {**TINY, **SPECIAL, **GROUPED, "head_dim": 8, "tie_word_embeddings": True},
        "Qwen/Qwen3-0.6B",
        shape(1024, 3072, 28, 16, 151_936, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True),
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM", decoder_inputs,
        {**TINY, **SPECIAL, **GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4,
         "layer_types": ["sliding_attention", "full_attention"]},
        "google/gemma-3-1b-pt",
        shape(1152, 6912, 26, 4, 262_144, num_key_value_heads=1, head_dim=256, sliding_window=512),
    ),
    "phi3": Family(
        "Phi3ForCausalLM", decoder_inputs, {**TINY, **SPECIAL, "num_key_value_heads": 4},
        "microsoft/Phi-3-mini-4k-instruct", shape(3072, 8192, 32, 32, 32_064, num_key_value_heads=32),
    ),
    "gpt2": Family(
        "GPT2LMHeadModel", decoder_inputs,
        {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": VOCABULARY, **SPECIAL},
        "openai-community/gpt2",
        {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50_257},
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM", decoder_inputs,
        {**TINY_TEXT, **SPECIAL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                     "partial_rotary_factor": 0.5}},
        "EleutherAI/pythia-1b", shape(2048, 8192, 16, 8, 50_304, max_position_embeddings=2048),
    ),
    "opt": Family(
        "OPTForCausalLM", decoder_inputs,
        {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY,
         "max_position_embeddings": 16, "word_embed_proj_dim": 16, **SPECIAL},
        "facebook/opt-1.3b",
        {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32, "vocab_size": 50_272,
         "max_position_embeddings": 2048, "word_embed_proj_dim": 2048},
    ),
    "bloom": Family(
        "BloomForCausalLM", decoder_inputs,
        {"hidden_size": 16, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, **SPECIAL},
        "bigscience/bloom-560m", {"hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250_880},
    ),
    "falcon": Family(
        "FalconForCausalLM", decoder_inputs,
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "num_kv_heads": 4,
         "new_decoder_architecture": True, "bias": False, "vocab_size": VOCABULARY, **SPECIAL},
        "tiiuae/falcon-40b",
        {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
         "new_decoder_architecture": True, "bias": False, "vocab_size": 65_024},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM", decoder_inputs, {**TINY, **SPECIAL, "num_key_value_heads": 4},
        "allenai/OLMo-2-1124-7B", shape(4096, 11_008, 32, 32, 100_352, num_key_value_heads=32),
    ),
    "bert": Family(
        "BertForMaskedLM", encoder_inputs, TINY_TEXT,
        "google-bert/bert-base-uncased", shape(768, 3072, 12, 12, 30_522, max_position_embeddings=512),
    ),
    "roberta": Family(
        "RobertaForMaskedLM", encoder_inputs, {**TINY_TEXT, "type_vocab_size": 1, "pad_token_id": 1},
        "FacebookAI/roberta-base",
        shape(768, 3072, 12, 12, 50_265, max_position_embeddings=514, type_vocab_size=1, pad_token_id=1),
    ),
    "distilbert": Family(
        "DistilBertForMaskedLM", encoder_inputs,
        {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY,
         "max_position_embeddings": 16},
        "distilbert/distilbert-base-uncased",
        {"dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12, "vocab_size": 30_522,
         "max_position_embeddings": 512},
    ),
    "deberta_v2": Family(
        "DebertaV2ForMaskedLM", encoder_inputs,
        {**TINY_TEXT, "type_vocab_size": 0, "relative_attention": True, "position_buckets": 4, "share_att_key": True,
         "norm_rel_ebd": "layer_norm", "pos_att_type": "p2c|c2p", "position_biased_input": False},
        "microsoft/deberta-v3-base",
        shape(768, 3072, 12, 12, 128_100, max_position_embeddings=512, type_vocab_size=0, relative_attention=True,
              position_buckets=256, share_att_key=True, norm_rel_ebd="layer_norm", pos_att_type="p2c|c2p",
              position_biased_input=False),
    ),
    "modernbert": Family(
        "ModernBertForMaskedLM", encoder_inputs,
        {**TINY_TEXT, **SPECIAL, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4,
         "layer_types": ["full_attention", "sliding_attention"]},
        "answerdotai/ModernBERT-base", shape(768, 1152, 22, 12, 50_368, max_position_embeddings=8192),
    ),
    "albert": Family(
        "AlbertForMaskedLM", encoder_inputs, {**TINY_TEXT, "embedding_size": 8},
        "albert/albert-base-v2", shape(768, 3072, 12, 12, 30_000, embedding_size=128, max_position_embeddings=512),
    ),
    "t5": Family(
        "T5ForConditionalGeneration", translation_inputs,
        {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY,
         "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 0},
        "google-t5/t5-base",
        {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32_128},
    ),
    "bart": Family(
        "BartForConditionalGeneration", translation_inputs,
        two_stacks(16, 32, 2, 4, VOCABULARY, max_position_embeddings=16),
        "facebook/bart-base", two_stacks(768, 3072, 6, 12, 50_265, max_position_embeddings=1024),
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration", speech_inputs,
        two_stacks(16, 32, 2, 4, VOCABULARY, num_mel_bins=8, max_source_positions=TOKENS, max_target_positions=16,
                   decoder_start_token_id=3, **SPECIAL),
        "openai/whisper-small",
        two_stacks(768, 3072, 12, 12, 51_865, num_mel_bins=80, max_source_positions=1500, max_target_positions=448),
    ),
    "m2m_100": Family(
        "M2M100ForConditionalGeneration", translation_inputs,
        # whole layers are not dropped: ranks whose attention draws other numbers would drop other layers
        two_stacks(16, 32, 2, 4, VOCABULARY, max_position_embeddings=16, encoder_layerdrop=0.0, decoder_layerdrop=0.0),
        "facebook/m2m100_418M", two_stacks(1024, 4096, 12, 16, 128_112, max_position_embeddings=1024),
    ),
    "vit": Family(
        "ViTForImageClassification", image_inputs, TINY_IMAGE,
        "google/vit-base-patch16-224", shape(768, 3072, 12, 12, image_size=224, patch_size=16, num_labels=1000),
    ),
    "clip": Family(
        "CLIPModel", pair_inputs,
        {"projection_dim": 16, "text_config": {**TINY_TEXT, **SPECIAL, "eos_token_id": VOCABULARY - 1},
         "vision_config": TINY_IMAGE},
        "openai/clip-vit-base-patch32",
        {"projection_dim": 512, "text_config": shape(512, 2048, 12, 8, 49_408, max_position_embeddings=77),
         "vision_config": shape(768, 3072, 12, 12, image_size=224, patch_size=32)},
    ),
    "swin": Family(
        "SwinForImageClassification", image_inputs,
        {"image_size": IMAGE, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [4, 8],
         "window_size": 4, "num_labels": LABELS},
        "microsoft/swin-base-patch4-window7-224",
        {"image_size": 224, "patch_size": 4, "embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32],
         "window_size": 7, "num_labels": 1000},
    ),
    "dinov2": Family(
        "Dinov2ForImageClassification", image_inputs, {**TINY_IMAGE, "mlp_ratio": 2},
        "facebook/dinov2-base-imagenet1k-1-layer",
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "mlp_ratio": 4, "image_size": 518,
         "patch_size": 14, "num_labels": 1000},
    ),
    "mixtral": Family(
        "MixtralForCausalLM", decoder_inputs,
        {**TINY, **SPECIAL, **GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        "mistralai/Mixtral-8x7B-v0.1",
        shape(4096, 14_336, 32, 32, 32_000, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2),
    ),
}  # fmt: skip


def build(name: str, **changes: Any) -> tuple[nn.Module, dict[str, Any], Callable[[Any], Tensor]]:
    """Tiny model of a family, its keyword inputs, and its loss, in the form that `prove_module` takes. `changes` are
    other values of its config.
    """
    model, inputs = _model(name, {**FAMILIES[name].tiny, **changes}), FAMILIES[name].inputs()
    return model.train(), inputs, loss_of


def loss_of(output: Any) -> Tensor:
    """Return the loss that a model of transformers computes of its labels."""
    loss: Tensor = output.loss
    return loss


def published(name: str) -> nn.Module:
    """Model of the published checkpoint of a family on `meta`, where it takes no memory."""
    with torch.device("meta"):
        return _model(name, FAMILIES[name].published)


def _model(name: str, sizes: dict[str, Any]) -> Any:
    import transformers

    kind = getattr(transformers, FAMILIES[name].model)
    config = kind.config_class(**sizes)
    config._experts_implementation = "eager"  # grouped products exist only in float32 and below
    return kind._from_config(config, attn_implementation="eager")


def pattern_of(name: str) -> str:
    """Name of a parameter or a module with `*` for the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def large_matrices(name: str, share: float = 0.01) -> dict[str, float]:
    """Shares of the published model's parameters that its large matrices hold, by their `pattern_of` names, which the
    tiny model has, too. The copies of a matrix in all layers count together, so a matrix of every layer may be listed
    that alone holds less than `share`.
    """
    model = published(name)
    total = sum(parameter.numel() for parameter in model.parameters())
    found: dict[str, float] = {}
    for full, parameter in model.named_parameters():
        if parameter.dim() > 1:
            pattern = pattern_of(full)
            found[pattern] = found.get(pattern, 0.0) + parameter.numel() / total
    return {pattern: part for pattern, part in found.items() if part >= share}
