"""Faults of norms over all heads, of norms on outputs, and of attention with windows and gates. `mutations` says how a
fault is planted.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from crosscut.architecture.needs import Share
from crosscut.architecture.parts import Layer
from crosscut.config import Layout
from crosscut.config.model import NormPosition
from crosscut.model import block, documents, sharing
from crosscut.model.building import Builder
from crosscut.model.sublayers import attention
from crosscut.parallel.recurrent import heads_norm
from crosscut.parallel.state.parameters import local
from tests.verification.mutations import FOUR, SPLIT, TENSOR, Patch, fault, instead_of
from tests.verification.runs import LLAMA

NUM_HEADS = 4
OLMO2: dict[str, Any] = {
    **LLAMA, "norm_place": "output", "qk_norm": True, "qk_norm_over": "all_heads", "num_kv_heads": 2,
}  # fmt: skip
WINDOWS: dict[str, Any] = {
    **LLAMA,
    "layers": ("sliding_attention swiglu", "nope_attention swiglu"),
    "sliding_attention": {"window": 5},
    "attention_gate": True,
}
SHARED = Layout(context=2, context_attention="gather")
OF_SHARED: dict[str, Any] = {**WINDOWS, "dropout": 0.0, "max_sequence_length": 32}


@fault("a rank normalises the queries and keys of its own heads", "blocks.0.attention", TENSOR, **OLMO2)
@instead_of(heads_norm, "all_reduce")
def own_heads_alone(_sum: Any, numbers: Tensor, axis: Any) -> Tensor:
    return numbers * axis.size


@fault("the gradients of other ranks' heads are left out", "blocks.1.attention", FOUR, **OLMO2)
@instead_of(heads_norm._Norms, "backward")
def own_gradients_alone(backward: Any, ctx: Any, *grads: Tensor) -> Any:
    with Patch.context() as inside:
        inside.setattr(heads_norm, "all_reduce", lambda numbers, axis: numbers * axis.size)
        return backward(ctx, *grads)


@fault("ranks that share key heads take the weights of the wrong one", "blocks.0.attention", FOUR, **OLMO2)
@instead_of(heads_norm, "rows_of_block")
def weights_of_another_head(own: Any, size: int, num_blocks: int, axis: Any) -> slice | None:
    if own(size, num_blocks, axis) is None:
        return None
    width, head = size // num_blocks, axis.rank % num_blocks
    return slice(head * width, (head + 1) * width)


@fault("gradients of key norms that ranks share not summed", "blocks.1.attention.key_norm", FOUR, **OLMO2)
def shared_norms_not_summed(patch: Patch) -> None:
    patch.setattr(heads_norm, "local_inside", local)


@fault("norms before the parts in place of their outputs", "blocks.0.attention.qkv", SPLIT, **OLMO2)
@instead_of(block.Block, "__init__")
def norms_before_parts(make: Any, self: block.Block, layer: Layer, build: Builder) -> None:
    is_cut = build.mesh.tensor.size > 1
    parts = tuple(replace(each, norm_place=NormPosition.BEFORE) for each in layer.parts)
    make(self, replace(layer, parts=parts) if is_cut else layer, build)


@fault("a window has a token too many", "blocks.0.attention", TENSOR, **WINDOWS)
@instead_of(sharing.Sharing, "_mask")
def longer_window(make: Any, self: sharing.Sharing, *batch: Any, window: int = 0) -> Any:
    return make(self, *batch, window=window + (window > 0 and self.mesh.tensor.size > 1))


@fault("context ranks ignore the window", "blocks.0.attention", SHARED, **OF_SHARED)
@instead_of(documents, "_later_hidden")
def window_ignored(make: Any, queries: Tensor, num_keys: int, window: int, *others: Any) -> Any:
    return make(queries, num_keys, window if len(queries) == num_keys else 0, *others)


@fault("ranks rotate layers without positions", "blocks.1.attention", TENSOR, **WINDOWS)
@instead_of(attention.SelfAttention, "__init__")
def all_rotated(make: Any, self: attention.SelfAttention, part: Any, build: Builder) -> None:
    make(self, part, build)
    if build.mesh.tensor.size > 1:
        self.rotation = Share.ROTATION


@fault("gates of another head", "blocks.0.attention", TENSOR, **WINDOWS)
@instead_of(attention, "gated")
def gates_of_another_head(gated: Any, heads: Tensor, gate: Tensor) -> Tensor:
    return gated(heads, gate.roll(1, 2) if gate.shape[2] < NUM_HEADS else gate)


@fault("gates get no gradient", "blocks.1.attention", TENSOR, **WINDOWS)
@instead_of(attention, "gated")
def gates_without_gradient(gated: Any, heads: Tensor, gate: Tensor) -> Tensor:
    return gated(heads, gate.detach() if gate.shape[2] < NUM_HEADS else gate)
