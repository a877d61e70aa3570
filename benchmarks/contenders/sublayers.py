"""One sublayer of Crosscut and of transformers, a Mamba-2 mixer or a mixture of experts: a step is a forward and a
backward pass.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.contenders.task import Shape, Step

HEAD_SIZE, STATE_SIZE = 64, 128
"""Sizes of the published models. Both mixers are twice as wide as the hidden size, and have one group."""


def make_sublayer(program: str, shape: Shape) -> Step:
    """Build the step of a program's sublayer."""
    sublayer = _MAKERS[program, shape.family](shape)

    def step(_number: int, micro_batches: Sequence[tuple[Any, Any]]) -> Callable[[], float]:
        sublayer.zero_grad()
        for x, gradient in micro_batches:
            result = sublayer(x.requires_grad_())
            y = result[0] if isinstance(result, tuple) else result  # Crosscut's experts also return sums
            y.backward(gradient)
        return y.detach().square().mean().item

    return step


def _of_crosscut(shape: Shape, *, part: str, **model: Any) -> nn.Module:
    from crosscut.config import Layout, ModelConfig
    from crosscut.model import GPT, initialize
    from crosscut.parallel import RandomStreams, make_mesh

    sizes = {"num_layers": 1, "hidden_size": shape.hidden_size, "num_heads": shape.num_heads}
    mesh = make_mesh(Layout(), torch.device("cpu"))
    whole = GPT(
        ModelConfig(**sizes, vocab_size=shape.vocab_size, biases="none", **model),
        mesh=mesh,
        streams=RandomStreams(mesh, 0),
    )
    initialize(whole, seed=1)
    sublayer: nn.Module = getattr(whole.blocks[0], part)
    return sublayer


def _mamba2_of_crosscut(shape: Shape) -> nn.Module:
    from crosscut.config.parts.mamba2 import Mamba2Config

    sizes = Mamba2Config(head_size=HEAD_SIZE, state_size=STATE_SIZE)
    return _of_crosscut(shape, part="attention", layers=("mamba2",), mamba2=sizes)


def _experts_of_crosscut(shape: Shape) -> nn.Module:
    from crosscut.config.parts.experts import ExpertsConfig

    sizes = ExpertsConfig(number=shape.num_experts, per_token=shape.experts_per_token, size=shape.mlp_size)
    return _of_crosscut(shape, part="mlp", layers=("attention experts",), experts=sizes)


def _mamba2_of_transformers(shape: Shape) -> nn.Module:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=shape.hidden_size, head_dim=HEAD_SIZE, num_heads=2 * shape.hidden_size // HEAD_SIZE,
        state_size=STATE_SIZE, n_groups=1, use_bias=False,
    )  # fmt: skip
    mixer: nn.Module = Mamba2Mixer(config, 0).train()
    return mixer


def _mixtral_of_transformers(shape: Shape) -> nn.Module:
    from transformers import MixtralModel

    block: nn.Module = MixtralModel(mixtral_config(shape)).train().layers[0].mlp
    return block


def _qwen3_of_transformers(shape: Shape) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeModel

    config = Qwen3MoeConfig(
        num_hidden_layers=1, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, norm_topk_prob=True,
        num_experts=shape.num_experts, num_experts_per_tok=shape.experts_per_token,
        moe_intermediate_size=shape.mlp_size,
    )  # fmt: skip
    block: nn.Module = Qwen3MoeModel(config).train().layers[0].mlp
    return block


def mixtral_config(shape: Shape) -> Any:
    """Configuration of a Mixtral in transformers. Its implementation of experts is the default one."""
    from transformers import MixtralConfig

    return MixtralConfig(
        num_hidden_layers=shape.num_layers, hidden_size=shape.hidden_size, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads, intermediate_size=shape.mlp_size, vocab_size=shape.vocab_size,
        num_local_experts=shape.num_experts, num_experts_per_tok=shape.experts_per_token, use_cache=False,
        max_position_embeddings=shape.sequence_length, tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip


_MAKERS: dict[tuple[str, str], Callable[[Shape], nn.Module]] = {
    ("crosscut", "Mamba-2"): _mamba2_of_crosscut,
    ("crosscut", "Mixtral"): _experts_of_crosscut,
    ("crosscut", "Qwen3-MoE"): _experts_of_crosscut,
    ("transformers", "Mamba-2"): _mamba2_of_transformers,
    ("transformers", "Mixtral"): _mixtral_of_transformers,
    ("transformers", "Qwen3-MoE"): _qwen3_of_transformers,
}
