"""The Mamba-2 mixer against that of transformers, whose casts to float32 are replaced by casts to float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crosscut.architecture import Target, describe, kept
from crosscut.config import Layout, ModelConfig
from crosscut.config.parts.mamba2 import Mamba2Config as Sizes
from crosscut.model import GPT
from crosscut.parallel import RandomStreams, make_mesh
from tests.ranks import RankPool

HIDDEN, LENGTH = 24, 37


def our_weights(theirs: nn.Module, groups: int, state: int) -> dict[str, Tensor]:
    """Weights of transformers' mixer by the names of ours. Its input projection is [gate, x, B, C, step]; ours has the
    B and C of each group side by side.
    """

    def split(rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split([inner, 2 * groups * state, len(rows) - 2 * groups * state - inner])

    def by_group(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (2, groups, state)).transpose(0, 1).flatten(0, 2)

    inner = theirs.intermediate_size
    gate, others = theirs.in_proj.weight.split([inner, len(theirs.in_proj.weight) - inner])
    x, bc, step = split(others)
    named = {"gate": gate, "inner": x, "bc": by_group(bc), "step": step}
    found = {f"inputs.{name}.weight": weight for name, weight in named.items()}
    for name, parameter in (("weight", theirs.conv1d.weight.squeeze(1)), ("bias", theirs.conv1d.bias)):
        taps, bc_taps, _ = split(parameter)
        found |= {f"convolution.{name}": taps, f"bc_convolution.{name}": by_group(bc_taps)}
    dynamics = {"log_rate": theirs.A_log, "skip": theirs.D, "step_bias": theirs.dt_bias}
    return {**found, **dynamics, "norm.weight": theirs.norm.weight, "output.weight": theirs.out_proj.weight}


def outputs_and_gradients(mixer: nn.Module, x: Tensor) -> list[Tensor]:
    y = mixer(x)
    (grad,) = torch.autograd.grad((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum(), x)
    return [y, grad]


def against_transformers(groups: int, limits: tuple[float, float]) -> tuple[list[Tensor], list[Tensor]]:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    torch.manual_seed(1)
    shape: Any = {"num_heads": 6, "head_dim": 8, "state_size": 5, "n_groups": groups, "chunk_size": 16}
    published = Mamba2Config(
        hidden_size=HIDDEN, expand=2, conv_kernel=4, use_bias=False, time_step_limit=limits, **shape
    )
    theirs = Mamba2Mixer(published, 0).double()
    for parameter in theirs.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    sizes: Any = {
        "num_heads": 6, "head_size": 8, "state_size": 5, "num_groups": groups, "chunk_size": 16,
        "least_time_step": limits[0], "most_time_step": 0.0 if limits[1] == float("inf") else limits[1],
    }  # fmt: skip

    model = ModelConfig(
        num_layers=1, hidden_size=HIDDEN, num_heads=2, vocab_size=8, layers=("mamba2",), biases="none",
        mamba2=Sizes(**sizes),
    )  # fmt: skip
    mesh = make_mesh(Layout(), torch.device("cpu"))
    ours = GPT(model, mesh=mesh, streams=RandomStreams(mesh, 0), dtype=torch.float64).blocks[0].attention
    weights = our_weights(theirs, groups, 5)
    for name, parameter in ours.named_parameters():
        parameter.data.to_local().copy_(weights.pop(name).detach())
    assert not weights
    x = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        reference = outputs_and_gradients(theirs, x)
    return outputs_and_gradients(ours, x), reference


@pytest.mark.slow  # transformers takes long to import; the plain mixer of `twins` finds the same faults
@pytest.mark.parametrize(("groups", "limits"), [(1, (0.0, float("inf"))), (3, (0.01, 1.0))])
def test_the_mixer_is_that_of_transformers(ranks: RankPool, groups: int, limits: tuple[float, float]) -> None:
    ours, reference = ranks.run(1, against_transformers, groups, limits)[0]
    for mine, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def saved_and_planned(length: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that a layer of one part saves for its backward pass, apart from its parameters."""
    model = ModelConfig(
        num_layers=1, hidden_size=32, num_heads=2, vocab_size=8, layers=("mamba2",), norm="rms", dropout=0.0,
        mamba2=Sizes(head_size=8, state_size=6, num_groups=2, chunk_size=16),
    )  # fmt: skip
    mesh = make_mesh(Layout(), torch.device("cpu"))
    gpt = GPT(model, mesh=mesh, streams=RandomStreams(mesh, 0), dtype=dtype)
    own = {parameter.to_local().untyped_storage().data_ptr() for parameter in gpt.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = gpt.blocks[0](torch.randn(3, length, 32, dtype=dtype, requires_grad=True))
    assert y.requires_grad
    own = {"compute_bytes": dtype.itemsize, "sums_bytes": dtype.itemsize}
    target = replace(Target.of(Layout()), sequences=3, length=length, **own)
    (planned,) = kept(describe(model).layers[0], target, "none")
    return sum(saved.values()), planned.total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [16, 37])
def test_the_planner_counts_saved_values_to_the_byte(ranks: RankPool, length: int, dtype: torch.dtype) -> None:
    saved, planned = ranks.run(1, saved_and_planned, length, dtype)[0]
    assert saved == planned
