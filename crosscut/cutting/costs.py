"""Memory and messages of a plan, before anything is cut: the parameters that each rank holds, and the messages of the
forward and the backward pass. The module runs once, whole, to see the shapes of its layers' inputs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

from torch import Tensor, nn

from crosscut.cutting.images.messages import image_messages
from crosscut.cutting.plan import Plan, Style
from crosscut.cutting.resolution import Layer, Resolved, resolve
from crosscut.cutting.shares import Share
from crosscut.parallel import Sent

_AXIS = "tensor"
_COLUMNS = (Style.COLWISE, Style.PACKED_COLWISE, Style.COLWISE_GATHER_OUTPUT)
_SUMS = (Style.ROWWISE, Style.ROWWISE_SPLIT_INPUT, Style.EMBEDDING_ROWWISE)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Memory and messages of a plan at one number of ranks."""

    num_ranks: int
    num_parameters: int
    """Number of the uncut module's parameters."""
    parameters_per_rank: int
    """Number of parameters that the rank with the most parameters holds."""
    forward: Mapping[Sent, int]
    """Messages of one forward pass, and how often each is sent."""
    backward: Mapping[Sent, int]


def costs_of(module: nn.Module, inputs: Mapping[str, object], plan: Plan) -> list[Cost]:
    """Return the cost of a plan for each of its numbers of ranks. The module, which is not changed, runs forward once
    with the keyword inputs; it may be on the device `meta`. Of a plan with a grid, the cost is that of the rank that
    sends most, and the copies of the module that run have no values.

    Raises `ConfigError` or `LayoutError` if the plan does not fit the module.
    """
    if plan.grid:
        return [_cost_of_images(module, inputs, plan)]
    resolved = [resolve(module, plan, num_ranks) for num_ranks in plan.tensor]
    calls = _calls(module, inputs)
    return [_cost(module, each, calls) for each in resolved]


def _cost_of_images(module: nn.Module, inputs: Mapping[str, object], plan: Plan) -> Cost:
    most = max(image_messages(module, inputs, plan), key=lambda messages: messages.elements)
    number = sum(parameter.numel() for parameter in module.parameters())
    return Cost(
        num_ranks=prod(plan.grid),
        num_parameters=number,
        parameters_per_rank=number,
        forward=most.forward,
        backward=most.backward,
    )


class _Call(NamedTuple):
    """One forward call of a module."""

    name: str
    input: Tensor | None
    """First argument, if it is a tensor."""
    output: object


def _calls(module: nn.Module, inputs: Mapping[str, object]) -> list[_Call]:
    """Run a module forward, and return all calls of its modules, in the order of their ends."""
    calls: list[_Call] = []

    def note(name: str, _: nn.Module, arguments: tuple[object, ...], output: object) -> None:
        x = arguments[0] if arguments and isinstance(arguments[0], Tensor) else None
        calls.append(_Call(name, x, output))

    with ExitStack() as stack:
        for name, each in module.named_modules():
            stack.enter_context(each.register_forward_hook(partial(note, name)))
        module(**inputs)
    return calls


def _cost(module: nn.Module, resolved: Resolved, calls: list[_Call]) -> Cost:
    held = {id(p): resolved.shares[name].size(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    forward: Counter[Sent] = Counter()
    backward: Counter[Sent] = Counter()
    entered: Tensor | None = None
    for call in calls if resolved.num_ranks > 1 else []:
        owner = module.get_submodule(call.name)
        backward.update(_sums_of_parameters(call.name, owner, resolved))
        layer = resolved.layers.get(call.name)
        if layer is None or call.input is None or not isinstance(call.output, Tensor):
            continue
        forward.update(_forward(layer, call.output, resolved))
        backward.update(_backward(layer, call.input, call.output, is_again=entered is call.input))
        if layer.rule.style in _COLUMNS:
            entered = call.input
        elif layer.rule.style in _SUMS[:2]:
            entered = None
    return Cost(
        num_ranks=resolved.num_ranks,
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        parameters_per_rank=sum(held.values()),
        forward=forward,
        backward=backward,
    )


def _sums_of_parameters(name: str, owner: nn.Module, resolved: Resolved) -> Iterator[Sent]:
    """Yield the sums of the gradients of which each rank has only a term."""
    for key, parameter in owner.named_parameters(recurse=False):
        share: Share = resolved.shares[f"{name}.{key}".removeprefix(".")]
        if share.is_summed and parameter.requires_grad:
            yield Sent("all_reduce", _AXIS, parameter.numel())


def _forward(layer: Layer, output: Tensor, resolved: Resolved) -> Iterator[Sent]:
    if layer.rule.style in _SUMS:
        yield Sent("all_reduce", _AXIS, output.numel())
    if layer.rule.style is Style.COLWISE_GATHER_OUTPUT:
        first, stop = resolved.shares[f"{layer.name}.weight".removeprefix(".")].spans[0][0]
        padded = resolved.num_ranks * (stop - first)
        yield Sent("all_gather", _AXIS, output.numel() // output.shape[-1] * padded)


def _backward(layer: Layer, x: Tensor, output: Tensor, *, is_again: bool) -> Iterator[Sent]:
    style = layer.rule.style
    if style in _COLUMNS and x.requires_grad and not is_again:
        yield Sent("all_reduce", _AXIS, x.numel())
    if style is Style.ROWWISE_SPLIT_INPUT and x.requires_grad:
        yield Sent("all_gather", _AXIS, x.numel())
    if style is Style.MLA_KV_A_PROJ and output.requires_grad:
        yield Sent("all_reduce", _AXIS, output.numel() // output.shape[-1] * layer.rule.parts[-1])
