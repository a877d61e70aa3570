"""Small models of published families and of no family. Their predictions are far from uniform, so choices differ."""

import torch

from crosscut.config import Layout, ModelConfig
from crosscut.config.parts.gated_delta import GatedDeltaConfig
from crosscut.config.parts.latent_attention import LatentAttentionConfig
from crosscut.config.parts.mamba import MambaConfig
from crosscut.config.parts.mamba2 import Mamba2Config
from crosscut.config.parts.sliding_attention import SlidingAttentionConfig
from crosscut.config.parts.sparse_attention import SparseAttentionConfig
from crosscut.model import GPT, initialize
from crosscut.parallel import RandomStreams, make_mesh, shard_model

SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "max_sequence_length": 12, "dropout": 0.5}
FAMILIES = {
    "gpt2": {},
    "llama": {
        "num_kv_heads": 2, "positions": "rotary", "norm": "rms", "layers": ("attention swiglu",), "biases": "none",
        "tied": False,
    },
    "modern": {
        "positions": "rotary", "norm": "rms", "layers": ("attention relu2",), "biases": "none", "tied": False,
        "qk_norm": True, "norm_affine": False, "embedding_norm": True, "logit_softcap": 2.0,
    },
    "of no family": {
        "num_kv_heads": 2, "norm": "rms", "layers": ("attention geglu attention", "gelu"), "biases": "qkv",
        "tied": False, "embedding_norm": True, "logit_softcap": 2.0,
    },
    "hybrid": {
        "layers": ("mamba2 gelu", "attention gated_delta mamba"), "norm": "rms", "biases": "none",
        "positions": "rotary", "mamba": MambaConfig(state_size=4, chunk_size=4, vector_norms=True),
        "mamba2": Mamba2Config(head_size=4, state_size=4, num_groups=2, chunk_size=4),
        "gated_delta": GatedDeltaConfig(
            num_key_heads=2, num_value_heads=8, key_head_size=6, value_head_size=4, chunk_size=4,
            negative_eigenvalues=True, norm_epsilon=0.01,
        ),
        "norm_offset": True, "norm_places": ("before", "output"),
    },
    "windows": {
        "layers": ("sliding_attention swiglu", "nope_attention gelu", "attention gelu"), "num_layers": 3,
        "sliding_attention": SlidingAttentionConfig(window=3, rotary_base=100.0), "positions": "rotary", "norm": "rms",
        "attention_gate": True, "rotary_fraction": 0.5, "num_kv_heads": 2, "qk_norm": True, "biases": "none",
        "qk_norm_over": "all_heads", "norm_place": "output",
    },
    "blocks": {
        "layers": ("sparse_attention gelu", "sparse_attention attention gelu"), "num_kv_heads": 2,
        "sparse_attention": SparseAttentionConfig(block_size=2, window=1, global_blocks=1, stride=3),
        "attention_multiplier": 0.3,
    },
    "latent": {
        "layers": ("latent_attention swiglu",), "norm": "rms", "biases": "none", "positions": "rotary", "tied": False,
        "latent_attention": LatentAttentionConfig(
            query_rank=6, key_value_rank=8, nope_size=4, rope_size=2, value_size=3
        ),
    },
}  # fmt: skip
"""Settings by family. No program but Crosscut has models like "of no family" (gated, with learned positions, with
layers of one part and of three), "hybrid" (with states), "windows" and "blocks"."""

ALONE = Layout()


def make(
    layout: Layout = ALONE,
    family: str = "gpt2",
    *,
    dtype: torch.dtype = torch.float64,
    **sizes: int,
) -> GPT:
    mesh = make_mesh(layout, torch.device("cpu"))
    config = ModelConfig(**{"vocab_size": 100, **SIZES, **FAMILIES[family], **sizes})
    model = GPT(config, mesh=mesh, streams=RandomStreams(mesh, 0), dtype=dtype)
    shard_model(model, mesh, units=model.blocks, always_used=True)
    initialize(model, 1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.to_local().mul_(8)
    return model
