"""Messages of a module whose images are cut, before any rank starts: this process acts as one rank after the other."""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from crosscut.config import Layout
from crosscut.cutting.cut import cut
from crosscut.cutting.images.part import ImagePart
from crosscut.cutting.plan import Plan
from crosscut.parallel import CollectiveRecorder, ParallelMesh, Sent, make_mesh
from crosscut.parallel.pretended import pretended_ranks


class RankMessages(NamedTuple):
    """Messages of one rank, and how often each is sent."""

    forward: Counter[Sent]
    backward: Counter[Sent]

    @property
    def elements(self) -> int:
        """Number of elements of all messages."""
        return sum(count * sent.elements for each in self for sent, count in each.items())


def image_messages(module: nn.Module, inputs: Mapping[str, object], plan: Plan) -> list[RankMessages]:
    """Return the messages of each rank of a plan's grid. Copies of the module run forward and backward, without values
    (on the device `meta`). The backward pass begins at all outputs that need gradients. Must not be called while this
    process is in a process group.

    Raises `ConfigError` or `LayoutError` if the plan does not fit the module, or if code of the module mixes positions.
    """
    return [_messages_of(rank, module, inputs, plan) for rank in range(prod(plan.grid))]


def _messages_of(rank: int, module: nn.Module, inputs: Mapping[str, object], plan: Plan) -> RankMessages:
    with pretended_ranks(prod(plan.grid), rank), torch.random.fork_rng(devices=()):
        mesh = replace(make_mesh(Layout(context=prod(plan.grid)), torch.device("cpu")), device=torch.device("meta"))
        tensors = {name: _without_values(each) for name, each in _tensors(module)}
        memo = {id(each): tensors[name] for name, each in _tensors(module)}
        net = cut(copy.deepcopy(module, memo), mesh, plan, load=tensors.__getitem__)
        with torch.enable_grad(), _recorder(net, mesh) as forward:
            output = net(**_pytree.tree_map(_without_values, dict(inputs)))
        leaves = [each for each in _pytree.tree_leaves(output) if isinstance(each, Tensor) and each.requires_grad]
        results = [each.plain() if isinstance(each, ImagePart) else each for each in leaves]
        with _recorder(net, mesh) as backward:
            if results:
                torch.autograd.backward(results, [torch.empty_like(each) for each in results])
    return RankMessages(Counter(forward.sent), Counter(backward.sent))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _without_values(value: Any) -> Any:
    """Return a tensor of the same kind on the device `meta`; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    empty = value.detach().to("meta")
    return (
        nn.Parameter(empty, value.requires_grad)
        if isinstance(value, nn.Parameter)
        else empty.requires_grad_(value.requires_grad)
    )


def _recorder(net: nn.Module, mesh: ParallelMesh) -> CollectiveRecorder:
    return CollectiveRecorder(mesh, grid=vars(net)["cut_axes"])
