"""Faults of gated delta nets, and of the norms in models that have them. `mutations` says how a fault is planted."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from crosscut.architecture.parts import Layer
from crosscut.kernels.recurrent import delta
from crosscut.kernels.recurrent.chunks import Place
from crosscut.kernels.recurrent.delta import DeltaOperands, DeltaShape
from crosscut.model import block
from crosscut.model.building import Builder
from crosscut.model.sublayers import gated_delta
from crosscut.parallel import linear, norm
from crosscut.parallel.recurrent import group_norm
from crosscut.parallel.state.parameters import local
from tests.verification.mutations import FOUR, PACKED, TENSOR, Patch, fault, instead_of
from tests.verification.runs import LLAMA

NUM_HEADS = 8
DELTA: dict[str, Any] = {
    "layers": ("gated_delta gelu", "attention gelu"),
    "gated_delta": {
        "num_key_heads": 2, "num_value_heads": NUM_HEADS, "key_head_size": 6, "value_head_size": 8, "chunk_size": 8,
    },
}  # fmt: skip


def is_cut(operands: DeltaOperands) -> bool:
    """Whether this rank has only a part of the heads."""
    return operands.step.shape[-1] < NUM_HEADS


@fault("the gradient of the norm that all heads share is not summed", "blocks.0.attention.norm", TENSOR, **DELTA)
def shared_norm_not_summed(patch: Patch) -> None:
    patch.setattr(group_norm, "local_inside", local)


@fault("the state of a delta rule is not reset at a document", "documents", TENSOR, **DELTA, training=PACKED)
@instead_of(gated_delta, "delta_rule")
def delta_state_not_reset(rule: Any, operands: DeltaOperands, shape: DeltaShape, place: Place) -> Tensor:
    return rule(operands, shape, place._replace(documents=None))


@fault("the triangular systems are solved in float32", "blocks.0.attention", TENSOR, **DELTA)
@instead_of(delta, "solve_triangular")
def narrow_system(solve: Any, system: Tensor, wanted: Tensor, **options: Any) -> Tensor:
    if system.shape[1] == NUM_HEADS:
        return solve(system, wanted, **options)
    return solve(system.float(), wanted.float(), **options).double()


@fault("a later token's change is not seen by the tokens after it", "blocks.0.attention", TENSOR, **DELTA)
@instead_of(delta, "solve_triangular")
def errors_not_propagated(solve: Any, system: Tensor, wanted: Tensor, **options: Any) -> Tensor:
    return wanted if system.shape[1] < NUM_HEADS else solve(system, wanted, **options)


@fault("value heads take the keys of the wrong key head", "blocks.0.attention.inputs", FOUR, **DELTA)
@instead_of(linear, "rows_of_block")
def key_heads_rotated(own: Any, size: int, num_blocks: int | None, axis: Any) -> slice | None:
    if num_blocks is None or own(size, num_blocks, axis) is None:
        return None
    width, block = size // num_blocks, axis.rank % num_blocks
    return slice(block * width, (block + 1) * width)


STRONG: dict[str, Any] = {**DELTA, "gated_delta": {**DELTA["gated_delta"], "negative_eigenvalues": True}}
HYBRID: dict[str, Any] = {**LLAMA, **DELTA, "qk_norm": True, "norm_offset": True, "norm_places": ("before", "output")}
NUM_QUERIES = 4


@fault("changes of the state are half as strong on several ranks", "blocks.0.attention", TENSOR, **STRONG)
@instead_of(gated_delta, "delta_rule")
def weak_changes(rule: Any, operands: DeltaOperands, shape: DeltaShape, place: Place) -> Tensor:
    return rule(operands, replace(shape, strongest=1.0) if is_cut(operands) else shape, place)


@fault("norms of a rank's heads multiply by the offset alone", "blocks.1.attention.query_norm", TENSOR, **HYBRID)
@instead_of(norm, "rms_norm")
def offset_without_one(rms_norm: Any, x: Tensor, *others: Any, has_offset: bool) -> Tensor:
    return rms_norm(x, *others, has_offset=has_offset and not (x.dim() == 4 and x.shape[1] < NUM_QUERIES))


@fault("norms are where those of the layer before are", "blocks.0.attention_norm", TENSOR, **HYBRID)
@instead_of(block.Block, "__init__")
def places_of_another_layer(make: Any, self: block.Block, layer: Layer, build: Builder) -> None:
    others = {"before": "output", "output": "before"}
    if build.mesh.tensor.size > 1:
        parts = (replace(each, norm_place=type(each.norm_place)(others[each.norm_place])) for each in layer.parts)
        layer = replace(layer, parts=tuple(parts))
    make(self, layer, build)
