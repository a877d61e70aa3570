"""One Mamba-2 mixer of Crosscut and of transformers: a step is a forward and a backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.contenders.task import Shape, Step

HEAD_SIZE, STATE_SIZE = 64, 128
"""Sizes of the published models. Both mixers are twice as wide as the hidden size, and have one group."""


def make_layer(program: str, shape: Shape) -> Step:
    """Build the step of a program's mixer."""
    mixer = {"crosscut": _of_crosscut, "transformers": _of_transformers}[program](shape)

    def step(_number: int, micro_batches: Sequence[tuple[Any, Any]]) -> Callable[[], float]:
        mixer.zero_grad()
        for x, gradient in micro_batches:
            y = mixer(x.requires_grad_())
            y.backward(gradient)
        return y.detach().square().mean().item

    return step


def _of_crosscut(shape: Shape) -> nn.Module:
    from crosscut.config import Layout, ModelConfig
    from crosscut.config.parts.mamba2 import Mamba2Config
    from crosscut.model import GPT, initialize
    from crosscut.parallel import RandomStreams, make_mesh

    config = ModelConfig(
        num_layers=1, hidden_size=shape.hidden_size, vocab_size=shape.vocab_size, layers=("mamba2",), biases="none",
        mamba2=Mamba2Config(head_size=HEAD_SIZE, state_size=STATE_SIZE),
    )  # fmt: skip
    mesh = make_mesh(Layout(), torch.device("cpu"))
    model = GPT(config, mesh=mesh, streams=RandomStreams(mesh, 0))
    initialize(model, seed=1)
    mixer: nn.Module = model.blocks[0].attention
    return mixer


def _of_transformers(shape: Shape) -> nn.Module:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=shape.hidden_size, head_dim=HEAD_SIZE, num_heads=2 * shape.hidden_size // HEAD_SIZE,
        state_size=STATE_SIZE, n_groups=1, use_bias=False,
    )  # fmt: skip
    mixer: nn.Module = Mamba2Mixer(config, 0).train()
    return mixer
