"""The Mamba-1 mixer against those of transformers, whose casts to float32 are replaced by casts to float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crosscut.config.parts.mamba import MambaConfig as Sizes
from tests.model.mixers import compared, mixer_of, saved_and_planned
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


def options(*, norms: bool) -> dict[str, Any]:
    sizes = Sizes(state_size=5, step_rank=3, chunk_size=16, vector_norms=norms)
    return {"hidden_size": HIDDEN, "layers": ("mamba",), "mamba": sizes}


def against_transformers(norms: bool) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    theirs = their_mixer(norms=norms).double()
    for parameter in theirs.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2
    return compared(mixer_of(options(norms=norms)), theirs, our_weights(theirs, norms=norms), length=LENGTH)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("norms", [True, False])
def test_the_mixer_is_that_of_transformers(ranks: RankPool, norms: bool) -> None:
    ours, reference = ranks.run(1, against_transformers, norms)[0]
    for mine, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "norms"), [(torch.float32, True), (torch.float64, False)], ids=str)
@pytest.mark.parametrize("length", [16, 37])
def test_the_planner_counts_saved_values_to_the_byte(
    ranks: RankPool, length: int, dtype: torch.dtype, norms: bool
) -> None:
    saved, planned = ranks.run(1, saved_and_planned, {**options(norms=norms), "biases": "none"}, length, dtype)[0]
    assert saved == planned
