"""The Mamba-2 mixer against that of transformers, whose casts to float32 are replaced by casts to float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crosscut.config.parts.mamba2 import Mamba2Config as Sizes
from tests.model.mixers import compared, mixer_of, saved_and_planned
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

    ours = mixer_of({"hidden_size": HIDDEN, "layers": ("mamba2",), "mamba2": Sizes(**sizes)})
    return compared(ours, theirs, our_weights(theirs, groups, 5), length=LENGTH)


@pytest.mark.slow  # transformers takes long to import; the plain mixer of `twins` finds the same faults
@pytest.mark.parametrize(("groups", "limits"), [(1, (0.0, float("inf"))), (3, (0.01, 1.0))])
def test_the_mixer_is_that_of_transformers(ranks: RankPool, groups: int, limits: tuple[float, float]) -> None:
    ours, reference = ranks.run(1, against_transformers, groups, limits)[0]
    for mine, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


SAVED: dict[str, Any] = {
    "layers": ("mamba2",), "mamba2": Sizes(head_size=8, state_size=6, num_groups=2, chunk_size=16)
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [16, 37])
def test_the_planner_counts_saved_values_to_the_byte(ranks: RankPool, length: int, dtype: torch.dtype) -> None:
    saved, planned = ranks.run(1, saved_and_planned, SAVED, length, dtype)[0]
    assert saved == planned
