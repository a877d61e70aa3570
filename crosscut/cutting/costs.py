"""Memory and messages of a plan, before anything is cut: the parameters that each rank holds, and the messages of the
forward and the backward pass. The module runs once, whole, to see the shapes of its layers' inputs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import Node

from crosscut.cutting.images.messages import image_messages
from crosscut.cutting.looking.states import copied, results_of, unchanged
from crosscut.cutting.plan import Plan, Style
from crosscut.cutting.resolution import Layer, Resolved, resolve
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
    """Return the cost of a plan for each of its numbers of ranks. The module runs forward once with copies of the
    keyword inputs. It stays unchanged, and may be on the device `meta`. Of a plan with a grid, the cost is that of the
    rank that sends most, and the copies of the module that run have no values.

    Raises `ConfigError` or `LayoutError` if the plan does not fit the module.
    """
    if plan.grid:
        return [_cost_of_images(module, inputs, plan)]
    resolved = [resolve(module, plan, num_ranks) for num_ranks in plan.tensor]
    summed = {name for each in resolved for name, share in each.shares.items() if share.is_summed}
    calls, reads = _look(module, inputs, summed)
    return [_cost(module, each, calls, reads) for each in resolved]


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
    """First argument, by position or by name, if it is a tensor."""
    output: object


def _look(module: nn.Module, inputs: Mapping[str, object], summed: AbstractSet[str]) -> tuple[list[_Call], list[str]]:
    """Run a module forward. Returns all calls of its modules, in the order of their ends, and one name for each time
    when the module reads one of the parameters in `summed` and computes with it.
    """
    calls: list[_Call] = []
    reads: list[tuple[str, object]] = []
    names = {each: name for name, each in module.named_modules()}

    def note(held: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], output: object) -> None:
        first = next(iter((*args, *kwargs.values())), None)
        calls.append(_Call(names[held], first if isinstance(first, Tensor) else None, output))

    def read(held: nn.Module, key: str) -> Tensor | None:
        if (parameter := held._parameters[key]) is None:
            return None
        part = parameter.view_as(parameter)
        reads.append((f"{names[held]}.{key}".removeprefix("."), part.grad_fn))
        return part

    with unchanged(module):
        for each, name in names.items():
            each.register_forward_hook(note, with_kwargs=True)
            keys = [key for key in each._parameters if f"{name}.{key}".removeprefix(".") in summed]
            if keys:
                each.__class__ = _spied(type(each), read, keys)
        nodes = _nodes(results_of(module(**copied(inputs))))
    return calls, [name for name, node in reads if node in nodes]


def _spied(kind: type[nn.Module], read: Callable[[nn.Module, str], Tensor | None], keys: Iterable[str]) -> object:
    """Return a subclass of a module's class that reports which of the module's parameters are read."""

    def spy(key: str) -> property:
        return property(lambda held: read(held, key))

    return type(kind.__name__, (kind,), {key: spy(key) for key in keys})


def _nodes(tensors: Iterable[Tensor]) -> set[Node]:
    """Return all nodes of the tensors' autograd graph."""
    found, todo = set[Node](), [each.grad_fn for each in tensors]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [before for before, _ in node.next_functions]
    return found


def _cost(module: nn.Module, resolved: Resolved, calls: list[_Call], reads: list[str]) -> Cost:
    held = {id(p): resolved.shares[name].size(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    forward: Counter[Sent] = Counter()
    backward: Counter[Sent] = Counter()
    entered: Tensor | None = None
    for name in reads if resolved.num_ranks > 1 else []:
        if resolved.shares[name].is_summed:
            backward[Sent("all_reduce", _AXIS, module.get_parameter(name).numel())] += 1
    for call in calls if resolved.num_ranks > 1 else []:
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
