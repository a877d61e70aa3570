"""The Mamba-1 mixer against those of transformers, whose casts to float32 are replaced by casts to float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crosscut.architecture import Target, describe, kept
from crosscut.config import Layout, ModelConfig
from crosscut.config.parts.mamba import MambaConfig as Sizes
from crosscut.model import GPT
from crosscut.model.sublayers.mamba import Mamba
from crosscut.parallel import RandomStreams, make_mesh
from tests.ranks import RankPool

HIDDEN, LENGTH = 24, 37


def our_weights(theirs: nn.Module, *, norms: bool) -> dict[str, Tensor]:
    """Weights of transformers' mixer by the names of ours. Its input projection is [channels, gate]."""
    inner, gate = theirs.in_proj.weight.chunk(2)
    named = {
        "inputs.inner.weight": inner, "inputs.gate.weight": gate, "convolution.weight": theirs.conv1d.weight.squeeze(1),
        "convolution.bias": theirs.conv1d.bias, "selection.weight": theirs.x_proj.weight,
        "step.weight": theirs.dt_proj.weight, "step_bias": theirs.dt_proj.bias, "log_rate": theirs.A_log,
        "skip": theirs.D, "output.weight": theirs.out_proj.weight,
    }  # fmt: skip
    published = {"step_norm": "dt_layernorm", "b_norm": "b_layernorm", "c_norm": "c_layernorm"} if norms else {}
    return named | {f"{ours}.weight": getattr(theirs, name).weight for ours, name in published.items()}


def outputs_and_gradients(mixer: nn.Module, x: Tensor) -> list[Tensor]:
    y = mixer(x)
    (grad,) = torch.autograd.grad((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum(), x)
    return [y, grad]


def their_mixer(*, norms: bool) -> nn.Module:
    """Mixer of Jamba, which has norms, or of Mamba."""
    if norms:
        from transformers import JambaConfig
        from transformers.models.jamba.modeling_jamba import JambaMambaMixer

        config: Any = JambaConfig(hidden_size=HIDDEN, mamba_d_state=5, mamba_dt_rank=3, rms_norm_eps=1e-5)
        return JambaMambaMixer(config, 0)
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    return MambaMixer(MambaConfig(hidden_size=HIDDEN, state_size=5, time_step_rank=3), 0)


def our_mixer(*, norms: bool, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[GPT, Mamba]:
    sizes = Sizes(state_size=5, step_rank=3, chunk_size=16, vector_norms=norms)
    model = ModelConfig(
        num_layers=1, hidden_size=HIDDEN, num_heads=2, vocab_size=8, layers=("mamba",), biases="none", mamba=sizes,
        **options,
    )  # fmt: skip
    mesh = make_mesh(Layout(), torch.device("cpu"))
    gpt = GPT(model, mesh=mesh, streams=RandomStreams(mesh, 0), dtype=dtype)
    mixer = gpt.blocks[0].attention
    assert isinstance(mixer, Mamba)
    return gpt, mixer


def against_transformers(norms: bool) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    theirs = their_mixer(norms=norms).double()
    for parameter in theirs.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    _, ours = our_mixer(norms=norms)
    weights = our_weights(theirs, norms=norms)
    for name, parameter in ours.named_parameters():
        parameter.data.to_local().copy_(weights.pop(name).detach())
    assert not weights
    x = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        reference = outputs_and_gradients(theirs, x)
    return outputs_and_gradients(ours, x), reference


@pytest.mark.one_in(2)
@pytest.mark.parametrize("norms", [True, False])
def test_the_mixer_is_that_of_transformers(ranks: RankPool, norms: bool) -> None:
    ours, reference = ranks.run(1, against_transformers, norms)[0]
    for mine, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def saved_and_planned(length: int, dtype: torch.dtype, norms: bool) -> tuple[int, int]:
    """Bytes that a layer of one part saves for its backward pass, apart from its parameters."""
    gpt, _ = our_mixer(norms=norms, dtype=dtype, norm="rms", dropout=0.0)
    own = {parameter.to_local().untyped_storage().data_ptr() for parameter in gpt.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = gpt.blocks[0](torch.randn(3, length, HIDDEN, dtype=dtype, requires_grad=True))
    assert y.requires_grad
    target = Target(sequences=3, length=length, compute_bytes=dtype.itemsize, sums_bytes=dtype.itemsize)
    (planned,) = kept(describe(gpt.config).layers[0], target, "none")
    return sum(saved.values()), planned.total


@pytest.mark.parametrize(("dtype", "norms"), [(torch.float32, True), (torch.float64, False)], ids=str)
@pytest.mark.parametrize("length", [16, 37])
def test_the_planner_counts_saved_values_to_the_byte(
    ranks: RankPool, length: int, dtype: torch.dtype, norms: bool
) -> None:
    saved, planned = ranks.run(1, saved_and_planned, length, dtype, norms)[0]
    assert saved == planned
