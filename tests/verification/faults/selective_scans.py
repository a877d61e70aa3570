"""Faults of state-space mixers of the first kind. `mutations` says how a fault is planted."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.kernels.recurrent.chunks import Place
from crosscut.kernels.recurrent.selective_scan import Operands
from crosscut.model.building import Builder
from crosscut.model.sublayers import mamba
from crosscut.parallel.context.zigzag import split_zigzag
from tests.verification.mutations import PACKED, SPLIT, TENSOR, Patch, fault, instead_of

NUM_CHANNELS = 64
HYBRID: dict[str, Any] = {
    "layers": ("mamba gelu", "attention gelu"),
    "mamba": {"state_size": 6, "step_rank": 3, "chunk_size": 8, "vector_norms": True},
}
SHARED = Layout(context=2)
OF_SHARED: dict[str, Any] = {**HYBRID, "dropout": 0.0, "max_sequence_length": 32}


@fault("a selection of a rank's own channels", "blocks.0.attention", TENSOR, **HYBRID)
def own_selection(patch: Patch) -> None:
    patch.setattr(mamba, "leave_tensor_parallel", lambda x, mesh: x * mesh.tensor.size)


@fault("the selection's gradient of a rank's own channels", "blocks.0.attention.step_norm", TENSOR, **HYBRID)
def own_gradient_of_selection(patch: Patch) -> None:
    patch.setattr(mamba, "enter_tensor_parallel", lambda x, _mesh: x)


@fault("the gradients of a selection's norms are summed twice", "blocks.0.attention.step_norm", TENSOR, **HYBRID)
@instead_of(Builder, "region_norm")
def norms_summed_twice(build: Any, self: Builder, norm: Any) -> Any:
    return build(self, replace(norm, inside=True))


@fault("a selection of a context rank's own channels", "blocks.0.attention", SHARED, **OF_SHARED)
def own_selection_over_context(patch: Patch) -> None:
    patch.setattr(
        mamba, "scatter_sum_of_sequence", lambda x, axis: axis.size * split_zigzag(x, axis.size, 2)[axis.rank]
    )


@fault("selections of a sequence in the order of the ranks", "blocks.0.attention", SHARED, **OF_SHARED)
@instead_of(mamba, "gather_sequence")
def selections_out_of_order(gather: Any, x: Tensor, axis: Any) -> Tensor:
    first, second, third, last = gather(x, axis).chunk(2 * axis.size, 2)
    return torch.cat((first, last, second, third), 2)


@fault("the state of a channel is not reset at a document", "documents", SPLIT, **HYBRID, training=PACKED)
@instead_of(mamba, "selective_scan")
def state_not_reset(scan: Any, operands: Operands, chunk: int, place: Place) -> Tensor:
    return scan(operands, chunk, place._replace(documents=None))


@fault("the states of channels are in float32", "blocks.0.attention", TENSOR, **HYBRID)
@instead_of(mamba, "selective_scan")
def narrow_state(scan: Any, operands: Operands, chunk: int, place: Place) -> Tensor:
    if operands.x.shape[-1] == NUM_CHANNELS:
        return scan(operands, chunk, place)
    return scan(Operands(*(each.float() for each in operands)), chunk, place).double()
