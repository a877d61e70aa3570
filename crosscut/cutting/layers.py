"""Layers of a cut module: subclasses of the module's own classes.

A cut module keeps its class, its attributes and the names of its parameters. Only its `__class__` becomes a subclass
with the same name, in which a parameter such as `weight` is a property: every parameter is a `DTensor` in
`_parameters`, where optimizers, `fully_shard` and checkpoints find it, and the module's own code sees the part that
this rank uses. A layer whose messages differ from those of its class also gets a new `forward`. If the class has a
`forward` of its own that calls `super().forward`, as an embedding of positions with an offset does, the new `forward`
runs inside of it.

Shapes: I in, O out, V vocabulary, H hidden, T tensor ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from crosscut.config import ConfigError
from crosscut.cutting.looking.matrices import is_transposed
from crosscut.cutting.plan import Style
from crosscut.cutting.resolution import Shares, calls_super
from crosscut.cutting.shares import WHOLE, Share, Span
from crosscut.cutting.streams import Streams
from crosscut.parallel import copy_to_tensor_parallel, local, reduce_from_tensor_parallel
from crosscut.parallel.collectives import all_gather
from crosscut.parallel.mesh import Axis
from crosscut.parallel.operators import exchanged
from crosscut.parallel.state.parameters import is_distributed


class Entrance:
    """Door into the regions of one cut module: the paper's f, which is applied once to the input of several layers.

    The sum of the input's gradient in the backward pass is therefore sent once for queries, keys and values.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._before: tuple[Tensor, tuple[bool, bool], Tensor] | None = None
        self.is_running = False
        """Whether the whole module runs."""

    def begin(self) -> None:
        """Note that a forward pass of the whole module begins."""
        self.is_running = True

    def end(self) -> None:
        """Note that the forward pass has ended, and release the last argument."""
        self.is_running, self._before = False, None

    def enter(self, x: Tensor) -> Tensor:
        """Apply f to `x`. If `x` was the last argument, return the same result again."""
        state, before = (torch.is_grad_enabled(), x.requires_grad), self._before
        if before is not None and before[0] is x and before[1] == state:
            return before[2]
        entered = copy_to_tensor_parallel(x, self._axis)
        self._before = (x, state, entered)
        return entered

    def forget(self) -> None:
        """Release the last argument."""
        self._before = None


@dataclass(eq=False)
class Site:
    """State of one module of a cut module."""

    name: str
    """Name of the module in the whole module, "" for the whole module itself."""
    axis: Axis
    shares: Shares
    """Shares of the module's own parameters and cut buffers, by their names."""
    entrance: Entrance
    streams: Streams
    regions: frozenset[str] = frozenset()
    """Regions that the layer enters, or, of a layer cut by rows, the one that it leaves."""
    foreign: frozenset[str] = frozenset()
    """Names of the parameters with whose parts the module's own code must not compute."""
    last: int = 0
    """Size of the last part of the output, which goes to the heads of each rank (`Style.MLA_KV_A_PROJ`)."""

    def spans(self, name: str) -> tuple[Span, ...]:
        """Spans of a parameter that this rank uses."""
        return self.shares[name].spans[self.axis.rank]


Forward = Callable[[Any, Tensor], Tensor]
"""Method `forward` of a layer."""


def _entered(layer: Any, x: Tensor) -> Tensor:
    """Pass the input of a layer that is cut by columns into the region."""
    site: Site = layer.cut_site
    site.streams.enter(site.regions)
    return site.entrance.enter(x)


def _matrix(layer: Any) -> Tensor:
    """Return the part of a linear layer's weight that this rank uses, as [O, I]."""
    weight: Any = used_part("weight", layer)
    return weight.t() if is_transposed(layer) else weight  # type: ignore[no-any-return]


def columns(layer: Any, x: Tensor) -> Tensor:
    """Compute f(X) A_i + b_i: [..., I] to [..., O/T]. Forward: nothing is sent. Backward: all-reduce of the input's
    gradient, once for several layers with the same input.
    """
    return F.linear(_entered(layer, x), _matrix(layer), used_part("bias", layer))


def gathered_columns(layer: Any, x: Tensor) -> Tensor:
    """Compute f(X) A_i + b_i and gather the columns of all ranks: [..., I] to [..., O]. The parts may be uneven.
    Forward: all-gather. Backward: all-reduce of the input's gradient.
    """
    return gather_last(columns(layer, x), layer.cut_site.axis, layer.cut_site.shares["weight"].spans)


def rows(layer: Any, x: Tensor) -> Tensor:
    """Compute g(X_i A_i) + b: [..., I/T] to [..., O]. Forward: all-reduce. Backward: nothing is sent."""
    site: Site = layer.cut_site
    y = reduce_from_tensor_parallel(F.linear(x, _matrix(layer)), site.axis)
    site.streams.leave(site.regions)
    site.entrance.forget()
    bias = used_part("bias", layer)
    return y if bias is None else y + bias.to(y.dtype)


def rows_of_whole(layer: Any, x: Tensor) -> Tensor:
    """Take this rank's columns of a whole input, and compute `rows`. Backward: all-gather of the input's gradient."""
    return rows(layer, split_last(x, layer.cut_site.axis))


def embedding_rows(layer: Any, ids: Tensor) -> Tensor:
    """Look up the ids whose rows this rank holds, and sum over the ranks: [...] to [..., H]. Forward: all-reduce.
    Backward: nothing is sent. Raises `RuntimeError` if an id is not below the number of rows.
    """
    ((first, stop),), size = layer.cut_site.spans("weight"), layer.cut_site.shares["weight"].spans[-1][-1][1]
    torch._assert_async(
        ((ids >= 0) & (ids < size)).all(),
        f"Ids must be from 0 to {size - 1}, the last row of the embedding, but an id is outside this range. Check the "
        "vocabulary and the length of the sequences.",
    )
    elsewhere = (ids < first) | (ids >= stop)
    index = (ids - first).masked_fill(elsewhere, 0)
    padding = layer.padding_idx
    padding = padding - first if padding is not None and first <= padding < stop else None
    weight: Any = used_part("weight", layer)
    found = F.embedding(index, weight, padding)
    return reduce_from_tensor_parallel(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), layer.cut_site.axis)


def with_last_inside(layer: Any, x: Tensor) -> Tensor:
    """Compute X A + b with the whole A, and pass the last part of the output into the region with f. Backward:
    all-reduce of this part's gradient.
    """
    y = F.linear(x, _matrix(layer), used_part("bias", layer))
    own, last = y.split([y.shape[-1] - layer.cut_site.last, layer.cut_site.last], -1)
    return torch.cat([own, copy_to_tensor_parallel(last, layer.cut_site.axis)], -1)


FORWARDS: dict[Style, Forward] = {
    Style.COLWISE: columns,
    Style.PACKED_COLWISE: columns,
    Style.COLWISE_GATHER_OUTPUT: gathered_columns,
    Style.ROWWISE: rows,
    Style.ROWWISE_SPLIT_INPUT: rows_of_whole,
    Style.EMBEDDING_ROWWISE: embedding_rows,
    Style.MLA_KV_A_PROJ: with_last_inside,
}
"""`forward` of each style. A layer of another style keeps its own."""


def gather_last(x: Tensor, axis: Axis, spans: tuple[tuple[Span, ...], ...]) -> Tensor:
    """Gather the last dimension from all ranks, whose parts may be shorter at the end. Forward: all-gather, of parts
    padded to one size. Backward: nothing is sent; the incoming gradient must be the same on all ranks.
    """
    (first, stop), (_, size), longest = *spans[axis.rank], spans[-1][-1], spans[0][0][1]
    dim = x.dim() - 1

    def gather(part: Tensor, on: Axis) -> Tensor:
        joined = all_gather(F.pad(part, (0, longest - part.shape[-1])), on, dim)
        return joined if joined.shape[-1] == size else joined[..., :size].contiguous()  # not a view of another tensor

    return exchanged(x, axis, forward=gather, backward=lambda grad, _: grad[..., first:stop].contiguous())


def split_last(x: Tensor, axis: Axis) -> Tensor:
    """Keep this rank's part of the last dimension. Forward: nothing is sent. Backward: all-gather."""
    dim = x.dim() - 1
    return exchanged(
        x,
        axis,
        forward=lambda whole, on: whole.chunk(on.size, dim)[on.rank].contiguous(),
        backward=lambda grad, on: all_gather(grad, on, dim),
    )


def used_part(name: str, module: Any, *, enters: bool = True) -> Tensor | None:
    """Return the part of a parameter that this rank uses, as an ordinary tensor. If ranks have only terms of its
    gradient, the backward pass sums them with an all-reduce, unless `enters` is false. A parameter of which data ranks
    store shards (`fully_shard`) is returned itself. Raises `ConfigError` if other code has put an ordinary parameter in
    its place.
    """
    parameter: Any = module._parameters.get(name)
    site: Site = module.cut_site
    if parameter is not None and not is_distributed(parameter):
        raise ConfigError(
            f"`{name}` of a cut {type(module).__name__} must be a distributed parameter, but an ordinary one has "
            "replaced it. Cut a module that has the values, or copy them into the parts."
        )
    if parameter is None or parameter.device_mesh.ndim > 1:  # no code computes with a parameter that data ranks shard
        return parameter  # type: ignore[no-any-return]
    share = site.shares.get(name, WHOLE)
    part = local(parameter, parameter.dtype)
    if share.is_summed and enters:
        part = copy_to_tensor_parallel(part, site.axis)
    return taken(part, share, site.axis.rank) if share.is_whole and share.spans else part


def read_part(name: str, module: Any) -> Tensor | None:
    """Return `used_part` to code that reads `module.weight`. While the whole module runs, code other than that of the
    layer which the plan cuts gets a tensor with which it cannot compute.
    """
    part, site = used_part(name, module), module.cut_site
    if part is None or name not in site.foreign or not site.entrance.is_running or is_distributed(part):
        return part
    return ForeignPart.of(part, f"{site.name}.{name}".removeprefix("."))


class ForeignPart(Tensor):
    """Part of a parameter for code that may only look at its type, device and shape. The code would take the part for
    the whole parameter.
    """

    name_in_module: str

    @classmethod
    def of(cls, part: Tensor, name: str) -> "ForeignPart":
        """Make an alias of a part."""
        made = part.as_subclass(cls)
        made.name_in_module = name
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        _types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call a function that looks, or that gives another tensor the type or the device of the part. Raises
        `ConfigError` before a function that writes or reads values, and if one returns a tensor.
        """
        name = getattr(func, "__name__", str(func))
        if not _writes(name) and name not in _READING and (kwargs or {}).get("out") is None:
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            is_other = name in _OF_OTHERS and not isinstance(args[0], cls)
            if is_other or not any(isinstance(each, Tensor) for each in tree_leaves(found)):
                return found
        part = next(each.name_in_module for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        raise ConfigError(
            f"`{part}` must be used only by the layer whose rule cuts it, because each rank holds a part, but other "
            f"code calls `{name}` with it. Call the layer, or give it the style `replicate`."
        )


_OF_OTHERS = ("to", "type_as")
"""Methods of another tensor that ask a part only for its type and device."""
_READING = ("__array__", "__dlpack__", "allclose", "equal", "item", "numpy", "tolist", "untyped_storage")


def _writes(name: str) -> bool:
    """Whether a function changes a tensor in place."""
    is_method = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
    return is_method or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def taken(whole: Tensor, share: Share, rank: int) -> Tensor:
    """Return the spans of a whole tensor that a rank uses."""
    if not share.spans:
        return whole
    parts = [whole.narrow(share.dim, start, stop - start) for start, stop in share.spans[rank]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, share.dim)


def in_order(module: Any, name: str, gathered: Tensor) -> Tensor:
    """Return a gathered parameter in the order of the uncut module. `verification` calls this method."""
    order = module.cut_site.shares.get(name, WHOLE).order
    if order is None:
        return gathered
    return gathered.index_select(
        module.cut_site.shares[name].dim, torch.tensor(order, device=gathered.device).argsort()
    )


def output_columns(module: Any) -> list[list[int]]:
    """Return the columns of the uncut output that each rank returns. `verification` calls this method."""
    return [[column for span in own for column in range(*span)] for own in module.cut_site.shares["weight"].spans]


def become_cut(module: nn.Module, site: Site, forward: Forward | None) -> None:
    """Turn a module into one whose parameters are read through properties, with another `forward` or its own."""
    module.cut_site = site  # type: ignore[assignment]  # not a module
    if site.shares or forward is not None:
        kind: Any = type(module)
        module.__class__ = _subclass(kind, forward, tuple(module._parameters))


@cache
def _subclass(kind: type[nn.Module], forward: Forward | None, names: tuple[str, ...]) -> type[nn.Module]:
    """Make the subclass of a module's class. Equal layers have one class, so that code is compiled once for all."""
    attributes: dict[str, object] = {name: property(partial(read_part, name)) for name in names}
    attributes["in_uncut_order"] = in_order
    base = next((each for each in (nn.Linear, nn.Embedding) if issubclass(kind, each)), kind)
    if forward is None:
        return type(kind.__name__, (kind,), attributes)
    if forward is columns:
        attributes["uncut_columns"] = output_columns
    if not calls_super(kind):  # the class computes the layer itself, as `resolve` has checked
        return type(kind.__name__, (kind,), {**attributes, "forward": _method(forward, kind)})
    inner = type(base.__name__, (base,), {"forward": _method(forward, base)})  # what `super().forward` finds
    return type(kind.__name__, (kind, inner), attributes)


def _method(forward: Forward, kind: type[nn.Module]) -> Callable[..., Tensor]:
    """Return a method with the signature of a class's own `forward`, whose only argument may be given by its name."""

    @wraps(kind.forward)
    def called(layer: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return forward(layer, *args, *kwargs.values())

    return called
