"""Faults of latent attention. `mutations` says how a fault is planted."""

from typing import Any

import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.model.sublayers import latent_attention
from crosscut.parallel import linear
from crosscut.parallel.collectives import all_gather
from crosscut.parallel.mesh import Axis, ParallelMesh
from crosscut.parallel.state.parameters import local
from tests.verification.mutations import SPLIT, TENSOR, Patch, fault, instead_of

ROPE = 4
LATENT: dict[str, Any] = {
    "layers": ("latent_attention gelu",),
    "positions": "rotary",
    "latent_attention": {
        "query_rank": 12, "key_value_rank": 10, "nope_size": 6, "rope_size": ROPE, "value_size": 5,
    },
}  # fmt: skip
YARN: dict[str, Any] = {
    **LATENT, "rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_original_length": 8,
    "latent_attention": {**LATENT["latent_attention"], "mscale_all_dim": 1.0},
}  # fmt: skip
SHARED = Layout(context=2, context_attention="gather")


@fault("the gradient of the shared part of the keys is not summed", "blocks.1.attention.down.key", TENSOR, **LATENT)
@instead_of(latent_attention, "enter_tensor_parallel")
def shared_gradient_lost(enter: Any, latents: Tensor, mesh: ParallelMesh) -> Tensor:
    return torch.cat((enter(latents[..., :-ROPE], mesh), latents[..., -ROPE:]), -1)


@fault("the gradients of the latents are not summed", "blocks.1.attention.latent_norm", TENSOR, **LATENT)
@instead_of(latent_attention, "enter_tensor_parallel")
def latents_not_summed(_plain: Any, latents: Tensor, _mesh: ParallelMesh) -> Tensor:
    return latents


@fault(
    "gradients of down projections of a split sequence not summed",
    "blocks.1.attention.down.key",
    SPLIT,
    **LATENT,
    biases="none",
)
def down_projections_not_summed(patch: Patch) -> None:
    patch.setattr(linear, "local_on_sequence", lambda parameter, _mesh, dtype: local(parameter, dtype))


@fault("the queries of a rank have no positions", "blocks.0.attention", TENSOR, **LATENT)
@instead_of(latent_attention.LatentAttention, "_rotated")
def queries_not_rotated(rotated: Any, self: Any, q: Tensor, rotation: Any) -> Tensor:
    return q if self.mesh.tensor.size > 1 else rotated(self, q, rotation)


@fault("scores without YaRN's factor", "blocks.0.attention", TENSOR, **YARN)
@instead_of(latent_attention.LatentAttention, "__init__")
def scores_without_factor(make: Any, self: Any, part: Any, build: Any) -> None:
    make(self, part, build)
    if build.mesh.tensor.size > 1:
        self.score_factor = self.head_size**-0.5


@fault("gathered latents are in the order of the ranks", "blocks.0.attention", SHARED, **LATENT, dropout=0.0)
@instead_of(latent_attention, "gather_sequence")
def gathered_in_order_of_ranks(gather: Any, x: Tensor, axis: Axis) -> Tensor:
    whole = gather(x, axis)
    with torch.no_grad():
        wrong = torch.cat(all_gather(x, axis, 0).chunk(axis.size), 2)
    return whole + (wrong - whole).detach()
