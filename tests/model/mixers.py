"""Mixers with a state beside those of transformers, and the values that they save."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crosscut.architecture import Target, describe, kept
from crosscut.config import Layout, ModelConfig
from crosscut.model import GPT
from crosscut.parallel import RandomStreams, make_mesh


def model_of(options: dict[str, Any], dtype: torch.dtype) -> GPT:
    """Model of one layer, with weights of zero."""
    mesh = make_mesh(Layout(), torch.device("cpu"))
    model = ModelConfig(**{"num_layers": 1, "num_heads": 2, "vocab_size": 8, **options})
    return GPT(model, mesh=mesh, streams=RandomStreams(mesh, 0), dtype=dtype)


def mixer_of(options: dict[str, Any]) -> nn.Module:
    """Mixer of the one layer of a model without biases, in float64."""
    mixer: nn.Module = model_of({"biases": "none", **options}, torch.float64).blocks[0].attention
    return mixer


def outputs_and_gradients(mixer: nn.Module, x: Tensor) -> list[Tensor]:
    y = mixer(x)
    (grad,) = torch.autograd.grad((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum(), x)
    return [y, grad]


def compared(ours: nn.Module, theirs: nn.Module, weights: dict[str, Tensor], *, length: int) -> Any:
    """Outputs and gradients of our mixer with these weights, and of transformers', whose casts to float32 are replaced
    by casts to float64.
    """
    for name, parameter in ours.named_parameters():
        parameter.data.to_local().copy_(weights.pop(name).detach())
    assert not weights
    x = torch.randn(2, length, ours.inputs.gate.weight.shape[1], dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        reference = outputs_and_gradients(theirs, x)
    return outputs_and_gradients(ours, x), reference


def saved_and_planned(mixer: dict[str, Any], length: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that a layer of one part saves for its backward pass, apart from its parameters."""
    gpt = model_of({"hidden_size": 32, "norm": "rms", "dropout": 0.0, **mixer}, dtype)
    own = {parameter.to_local().untyped_storage().data_ptr() for parameter in gpt.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y, _ = gpt.blocks[0](torch.randn(3, length, gpt.config.hidden_size, dtype=dtype, requires_grad=True))
    assert y.requires_grad
    own_bytes = {"compute_bytes": dtype.itemsize, "sums_bytes": dtype.itemsize}
    target = replace(Target.of(Layout()), sequences=3, length=length, **own_bytes)
    (planned,) = kept(describe(gpt.config).layers[0], target, "none")
    return sum(saved.values()), planned.total
