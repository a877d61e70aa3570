"""Faults of sharded models and of recomputation. `mutations` says how a fault is planted."""

from typing import Any

import torch
from torch import Tensor, nn

from crosscut.architecture.parameters import ONES, ZEROS, Start
from crosscut.config import Layout
from crosscut.model import initialization, stages
from crosscut.model.sublayers import attention
from crosscut.parallel import LayerNorm, random
from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.linear import is_recomputing
from crosscut.parallel.state import sharding
from crosscut.parallel.state.gradients import _local
from crosscut.training import step as training_step
from crosscut.training.memory import host_activations, recomputation
from tests.verification.mutations import ACCUMULATED, PACKED, SHARED, STAGES, Patch, clip_by_own_norm, fault, instead_of
from tests.verification.runs import LLAMA

SHARED_GRADIENTS = Layout(data=2, sharding="zero2")
GROUPS = Layout(data=4, sharding="zero3", shard_group=2)
GROUPS_OF_GRADIENTS = Layout(data=4, sharding="zero2", shard_group=2)
STAGED_SHARED = Layout(pipeline=2, data=2, sharding="zero3")
WHOLE = {"recompute": "full"}
CORE = {"recompute": "selective"}
CHEAP = {"recompute": "operators"}


@fault("gradients are not summed over the copies of the model", "gradient reduction", GROUPS)
def copies_not_summed(patch: Patch) -> None:
    patch.setattr(sharding.ShardedReducer, "arm", lambda self: None)


@fault(
    "the gradients of every micro-batch are summed over the copies of the model",
    "collectives",
    GROUPS,
    training=ACCUMULATED,
)
def copies_summed_each_time(patch: Patch) -> None:
    plain = sharding.ShardedReducer._set_last
    patch.setattr(sharding.ShardedReducer, "_set_last", lambda self, is_last: plain(self, is_last=True))


@fault("a rank gets its shard of the gradient from its neighbour", "gradient reduction", SHARED)
@instead_of(sharding.ShardedReducer, "finish")
def shards_of_neighbours(updates: Any, self: Any) -> None:
    updates(self)
    for parameter in self.parameters:
        own = _local(parameter.grad)
        every = [torch.zeros_like(own) for _ in range(2)]
        torch.distributed.all_gather(every, own.contiguous())
        own.copy_(every[1 - torch.distributed.get_rank()])


@fault(
    "only the root's gradients are summed over the copies of the model", "blocks.1.mlp.contract", GROUPS_OF_GRADIENTS
)
def only_the_root_summed(patch: Patch) -> None:
    plain = sharding.FSDPModule.set_requires_all_reduce
    patch.setattr(
        sharding.FSDPModule, "set_requires_all_reduce", lambda self, is_last: plain(self, is_last, recurse=not is_last)
    )


@fault("only the first rank fills its shards of norms with ones", "blocks.0.attention_norm", SHARED_GRADIENTS)
@instead_of(initialization, "_fill")
def first_rank_fills_norms(fill: Any, parameter: nn.Parameter, start: Start, **named: Any) -> None:
    fill(parameter, ZEROS if start == ONES and torch.distributed.get_rank() else start, **named)


@fault("the gradient norm counts a rank's own shards", "gradient norm", SHARED)
@instead_of(training_step, "measure_gradients")
def norm_of_own_shards(norm: Any, parameters: Any, owners: Any, **also: Any) -> Any:
    measured = norm(parameters, owners, **also)
    squares = torch.stack([_local(p.grad).square().sum() for p in parameters]).sum()
    return measured._replace(norm=squares.sqrt()) if parameters[0].device_mesh.size() > 1 else measured


fault("shards are clipped by the norm of the own shards", "clipped gradients", SHARED)(clip_by_own_norm)


@fault("the weights of layers are gathered in float32", "blocks.0.attention_norm", SHARED)
@instead_of(sharding, "_shard_unit")
def gathered_in_float32(shard: Any, unit: nn.Module, *arguments: Any, is_root: bool = False, **others: Any) -> None:
    shard(unit, *arguments, is_root=is_root, **others)
    if not is_root:

        def rounded(module: nn.Module, *_: Any) -> None:
            with torch.no_grad():
                for parameter in module.parameters():
                    _local(parameter).copy_(_local(parameter).float())

        unit.register_forward_pre_hook(rounded)


@fault("the second copy of the model starts from other weights", "tokens", GROUPS)
@instead_of(random, "seed_of")
def copies_start_apart(plain: Any, *parts: object) -> int:
    return plain(*parts, torch.distributed.get_rank() // 2) if parts[0] == "weights" else plain(*parts)


@fault("the loss is normalised by the targets of a shard group", "loss", GROUPS)
def targets_of_a_group(patch: Patch) -> None:
    scales = training_step.Trainer._scales

    def of_group(self: Any, micro_batches: Any) -> Any:
        if self.mesh.sharding is None:
            return scales(self, micro_batches)
        with patch.context() as inside:
            inside.setattr(training_step, "all_reduce", lambda x, axis: all_reduce(x, self.mesh.sharding.shard))
            return scales(self, micro_batches)

    patch.setattr(training_step.Trainer, "_scales", of_group)


@fault(
    "the stages of a sharded pipeline sum only the gradients of the last micro-batch",
    "gradient reduction",
    STAGED_SHARED,
)
@instead_of(stages._Step, "_backward")
def stages_sum_the_last(backward: Any, self: Any, action: Any, gradient: Tensor | None) -> Tensor | None:
    if action.micro_batch == len(self.step.micro_batches) - 1:
        for state in sharding.fully_shard.state(self.step.model)._state_ctx.all_states:
            for group in sharding.param_groups_of(state):
                for parameter in group.fsdp_params:
                    if hasattr(parameter, "unsharded_accumulated_grad"):
                        parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None
    return backward(self, action, gradient)


@fault("only the first shard is updated", "parameters after a step", SHARED_GRADIENTS)
@instead_of(training_step.Trainer, "update")
def first_shard_updated(update: Any, self: Any, step: int, loss: Tensor) -> Any:
    kept = [_local(p).detach().clone() for p in self.parameters]
    result = update(self, step, loss)
    if torch.distributed.get_rank() == 1:
        for parameter, before in zip(self.parameters, kept, strict=True):
            _local(parameter.detach()).copy_(before)
    return result


# --- recomputation ---------------------------------------------------------------------------------------------------


def _recomputed(patch: Patch, changed: Any) -> None:
    """Change the inputs of what runs again: `changed(inputs, earlier)`, with the inputs of all calls so far."""
    plain = recomputation.Recomputed.__call__
    earlier: list[tuple[Any, ...]] = []

    def other(self: Any, function: Any, *inputs: Any) -> Tensor:
        earlier.append(inputs)

        def again(*own: Any) -> Tensor:
            return function(*(changed(own, earlier) if is_recomputing() else own))

        return plain(self, again, *inputs)

    patch.setattr(recomputation.Recomputed, "__call__", other)


@fault(
    "a recomputed layer has the input of the micro-batch before",
    "blocks.0.attention",
    training={**WHOLE, **ACCUMULATED},
)
def recomputed_from_the_one_before(patch: Patch) -> None:
    _recomputed(
        patch, lambda own, earlier: (earlier[0][0].detach() + 0 * own[0], *own[1:]) if len(earlier) > 2 else own
    )


@fault("a recomputed layer has no positions", "blocks.1.mlp.contract", training=WHOLE, **LLAMA)
def recomputed_without_positions(patch: Patch) -> None:
    def unrotated(own: Any, _: Any) -> Any:
        x, shared, *others = own
        cosines, sines = shared.rotation
        return x, shared._replace(rotation=(torch.ones_like(cosines), torch.zeros_like(sines))), *others

    _recomputed(patch, unrotated)


@fault("recomputed attention has the documents of other sequences", "blocks.1.attention", training={**CORE, **PACKED})
def recomputed_with_other_documents(patch: Patch) -> None:
    def exchanged(own: Any, _: Any) -> Any:
        mask = own[-1]
        return own if mask is None else (*own[:-1], mask._replace(added=mask.added.roll(1, 0)))

    _recomputed(patch, exchanged)


@fault("recomputed attention has the keys of the first layer", "blocks.1.attention", training=CORE)
def recomputed_with_keys_of_the_first(patch: Patch) -> None:
    _recomputed(patch, lambda own, earlier: (own[0], earlier[0][1].detach() + 0 * own[1], *own[2:]))


@fault(
    "a stage recomputes with the documents of the newest micro-batch",
    "blocks.0.attention",
    STAGES,
    training={**CORE, **PACKED},
)
def recomputed_with_newest_documents(patch: Patch) -> None:
    _recomputed(patch, lambda own, earlier: (*own[:-1], earlier[-1][-1]))


@fault("the stage recomputes a layer with the newest micro-batch's input", "blocks.0.attention", STAGES, training=WHOLE)
def recomputed_with_newest_input(patch: Patch) -> None:
    _recomputed(patch, lambda own, earlier: (earlier[-1][0].detach() + 0 * own[0], *own[1:]))


@fault("cheap operators are recomputed from the input of another call", "blocks.1.mlp.contract", training=CHEAP)
def recomputed_from_another_call(patch: Patch) -> None:
    unpack = recomputation.CheapOutputs._unpack
    kept: dict[Any, Any] = {}

    def stale(self: Any, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return unpack(self, saved)
        key = tuple(source.shape for source in saved.sources)
        return unpack(self, kept.setdefault(key, saved))

    patch.setattr(recomputation.CheapOutputs, "_unpack", stale)


@fault("a norm is recomputed without its weight", "blocks.1.mlp.expand", training=CHEAP)
def norm_recomputed_without_weight(patch: Patch) -> None:
    unpack = recomputation.CheapOutputs._unpack

    def plain(self: Any, saved: Any) -> Tensor:
        norm = None if isinstance(saved, Tensor) else getattr(saved.make, "__self__", None)
        with patch.context() as inside:
            if isinstance(norm, LayerNorm):
                inside.setitem(norm._parameters, "weight", None)
            return unpack(self, saved)

    patch.setattr(recomputation.CheapOutputs, "_unpack", plain)


@fault(
    "an offloaded input comes back as that of the layer before",
    "blocks.1.mlp.contract",
    training={**WHOLE, "offload": ("activations",)},
)
@instead_of(host_activations.HostActivations, "_get")
def offloaded_input_of_the_one_before(get: Any, self: Any, waiting: Any) -> Tensor:
    own = get(self, waiting)
    other = None if isinstance(waiting, Tensor) or waiting.before is None else waiting.before()
    if other is None or other.host.shape != own.shape:
        return own
    return other.host.to(own.device)


@fault("attention on tensor ranks gives a value that is not a number", "blocks.0.attention")
@instead_of(attention.SelfAttention, "_attend")
def attention_not_a_number(attend: Any, self: attention.SelfAttention, q: Tensor, *operands: Any) -> Tensor:
    y = attend(self, q, *operands)
    return y if self.streams.mesh.tensor.size == 1 else y + 0.0 * (y.detach()[:1] * 0.0).log()
