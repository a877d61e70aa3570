"""Faults of state-space mixers. `mutations` says how a fault is planted."""

from typing import Any

import torch
from torch import Tensor

from crosscut.config import Layout
from crosscut.kernels.recurrent.chunks import Place
from crosscut.kernels.recurrent.scan import Operands, ScanShape
from crosscut.model import initialization
from crosscut.model.sublayers import mamba2, recurrent
from crosscut.parallel.recurrent import convolution, group_norm
from crosscut.parallel.state.parameters import local
from tests.verification.mutations import FOUR, PACKED, SPLIT, TENSOR, Patch, fault, instead_of

NUM_HEADS = 8
HYBRID: dict[str, Any] = {
    "layers": ("mamba2 gelu", "attention gelu"),
    "mamba2": {"head_size": 8, "state_size": 6, "num_groups": 2, "chunk_size": 8},
}
SHARED = Layout(context=4)
OF_SHARED: dict[str, Any] = {**HYBRID, "dropout": 0.0, "max_sequence_length": 32}


def is_cut(operands: Operands) -> bool:
    """Whether this rank scans only a part of the heads."""
    return operands.step.shape[-1] < NUM_HEADS


@fault("a rank normalises its own part of a group", "blocks.0.attention.norm", FOUR, **HYBRID)
def local_norm(patch: Patch) -> None:
    patch.setattr(
        group_norm.Groups, "summed", lambda self, sums: sums * (self.axis.size / min(self.axis.size, self.number))
    )


@fault("the sums over a group's gradients are those of a rank", "blocks.0.attention.norm", FOUR, **HYBRID)
@instead_of(group_norm._Norm, "backward")
def local_norm_backward(backward: Any, ctx: Any, grad: Tensor) -> Any:
    with Patch.context() as inside:
        inside.setattr(group_norm.Groups, "summed", lambda self, sums: sums)
        return backward(ctx, grad)


@fault("taps reach into the document before", "documents", SPLIT, **HYBRID, training=PACKED)
@instead_of(recurrent, "convolve")
def convolution_over_documents(convolve: Any, *arguments: Tensor, documents: Any = None) -> Tensor:
    del documents
    return convolve(*arguments)


@fault("the state is not reset at a document", "documents", TENSOR, **HYBRID, training=PACKED)
@instead_of(mamba2, "scan")
def state_not_reset(scan: Any, operands: Operands, shape: ScanShape, place: Place) -> Tensor:
    return scan(operands, shape, place._replace(documents=None))


@fault("the state is in float32", "blocks.0.attention", TENSOR, **HYBRID)
@instead_of(mamba2, "scan")
def narrow_state(scan: Any, operands: Operands, shape: ScanShape, place: Place) -> Tensor:
    if not is_cut(operands):
        return scan(operands, shape, place)
    return scan(Operands(*(each.float() for each in operands)), shape, place).double()


@fault("the state is lost between two chunks", "blocks.0.attention", TENSOR, **HYBRID)
@instead_of(mamba2, "scan")
def state_lost(scan: Any, operands: Operands, shape: ScanShape, place: Place) -> Tensor:
    if not is_cut(operands):
        return scan(operands, shape, place)
    halves = zip(*(each.chunk(2, 1) for each in operands[:3]), strict=True)
    return torch.cat([scan(Operands(*half, *operands[3:]), shape, place) for half in halves], 1)


@fault("ranks that share groups take the taps of the wrong one", "blocks.0.attention", FOUR, **HYBRID)
@instead_of(convolution, "rows_of_block")
def groups_rotated(own: Any, size: int, num_blocks: int | None, axis: Any) -> slice | None:
    if num_blocks is None or own(size, num_blocks, axis) is None:
        return None
    width, block = size // num_blocks, axis.rank % num_blocks
    return slice(block * width, (block + 1) * width)


@fault("gradients of taps that ranks share not summed", "blocks.0.attention.bc_convolution", FOUR, **HYBRID)
def shared_taps_not_summed(patch: Patch) -> None:
    patch.setattr(convolution, "local_inside", local)


@fault("copies of the groups in the wrong order", "blocks.0.attention", SHARED, **OF_SHARED)
@instead_of(recurrent, "_repeated")
def groups_copied_in_turns(_plain: Any, x: Tensor, times: int, width: int, *, dim: int) -> Tensor:
    del width
    return x if times == 1 else torch.cat([x] * times, dim)


@fault("each rank draws its own decay rates", "blocks.0.attention", TENSOR, **HYBRID)
@instead_of(initialization, "uniform_")
def own_decay_rates(draw: Any, parameter: Any, change: Any, *, seed: int, name: str) -> None:
    draw(parameter, change, seed=seed, name=name)
    mine = parameter.to_local()
    if len(mine) < NUM_HEADS:
        mine.mul_(1 + parameter.device_mesh.get_local_rank() / 10)
