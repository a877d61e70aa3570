"""Cut of a plain module in place, by a plan."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crosscut.config import ConfigError
from crosscut.cutting.images.escapes import watch_calls
from crosscut.cutting.images.layers import ImageLayer, become_image_layer, make_image_layers
from crosscut.cutting.layers import FORWARDS, Entrance, Forward, Site, become_cut, in_order
from crosscut.cutting.looking.attributes import set_value
from crosscut.cutting.looking.states import unchanged
from crosscut.cutting.plan import Plan, Style
from crosscut.cutting.resolution import Resolved, resolve
from crosscut.cutting.shares import WHOLE
from crosscut.cutting.sources import Load, Source
from crosscut.cutting.streams import Streams, dropout_rates
from crosscut.parallel import ParallelMesh
from crosscut.parallel.collectives import all_gather, all_reduce, own_rank
from crosscut.parallel.state.parameters import is_distributed, note_whole_gradients, own_parameter, whole


def cut(
    module: nn.Module, mesh: ParallelMesh, plan: Plan, *, load: Load | Path | None = None, gather_logits: bool = True
) -> nn.Module:
    """Cut a plain module over the tensor ranks of `mesh`, or its images over the context ranks, in place, and return
    it. Every rank must call this function.

    The module's classes, attributes and names stay. All parameters become `DTensor`s on the tensor axis, so that
    `torch.nn.utils.clip_grad_norm_`, optimizers and `fully_shard` work as for any distributed module; the module's own
    code reads the part of each parameter that this rank uses. When the backward pass ends, all gradients are complete.
    Afterwards, the parameters and buffers are on the mesh's device.

    All ranks must begin with the same values, inputs and random state. In training, the default generator has another
    state on each rank inside of the regions that `Rule.columns` names, and the same state outside.

    `load(name)` returns the whole value of a parameter or buffer that is on the device `meta`, one after the other;
    `load` may also be a folder of safetensors files, of which each rank reads only its parts. `gather_logits=False`
    leaves the output of the only layer with the style `colwise_gather_output` cut: [..., V/T].

    Raises `ConfigError` or `LayoutError` if the plan does not fit the module or the number of ranks, and
    `CheckpointError` if a folder lacks a tensor. After any error, on any rank, the module is as it was before.
    """
    plan.require_context(mesh.context.size)
    resolved = resolve(module, plan, mesh.tensor.size)
    forwards = _forwards(resolved, gather_logits=gather_logits)
    _require_plain(module)
    images = make_image_layers(resolved, plan, mesh)
    with unchanged(module, by_errors=True), _alike_on_all_ranks(mesh):
        _put_tensors(module, resolved, Source(load), mesh)
        _become_cut(module, resolved, forwards, mesh, images)
        for name, values in resolved.integers.items():
            for key, value in values.items():
                set_value(module.get_submodule(name), key, value)
        if mesh.context.size > 1:
            note_whole_gradients(module)
        vars(module)["cut_axes"] = next((layer.grid.axes for layer in images.values()), ())
    return module


@contextmanager
def _alike_on_all_ranks(mesh: ParallelMesh) -> Iterator[None]:
    """Context that ends with an error on all ranks if it ends with one on any rank. Files may fail on one rank."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # of any kind, since `load` may raise it
        failure = error
    if mesh.device.type != "meta":  # where other ranks are pretended
        has_failed = torch.tensor(float(failure is not None), device=mesh.device)
        for axis in mesh.axes:
            has_failed = all_reduce(has_failed, axis, "max")
        if failure is None and has_failed.item():
            failure = ConfigError(
                "A module must be cut on all ranks, but another rank has failed, and the module is uncut on this rank, "
                "too. See the error of the other rank."
            )
    if failure is not None:
        raise failure


def _forwards(resolved: Resolved, *, gather_logits: bool) -> dict[str, Forward | None]:
    """Return the `forward` of each layer that a rule names, None if the layer keeps its own."""
    forwards = {name: FORWARDS.get(layer.rule.style) for name, layer in resolved.layers.items()}
    if gather_logits:
        return forwards
    gathered = [name for name, layer in resolved.layers.items() if layer.rule.style is Style.COLWISE_GATHER_OUTPUT]
    if len(gathered) != 1:
        raise ConfigError(
            "`gather_logits=False` needs a plan with one layer of the style `colwise_gather_output`, but the plan has "
            f"{len(gathered)}. Write `colwise` for the layer whose output stays cut instead."
        )
    return {**forwards, gathered[0]: FORWARDS[Style.COLWISE]}


def _require_plain(module: nn.Module) -> None:
    """Raise `ConfigError` if a module is already cut, or uses its parameters in ways that a cut does not see."""
    parameters = {id(parameter) for parameter in module.parameters()}
    for name, each in module.named_modules():
        shown = name or type(each).__name__
        if any(is_distributed(parameter) for parameter in each.parameters(recurse=False)):
            raise ConfigError(f"`{shown}` must be an uncut module, but has distributed parameters. Build a new module.")
        if "forward" in vars(each):
            raise ConfigError(
                f"`{shown}` must have the `forward` of its class, but other code has replaced it. Cut the module first."
            )
        for key, value in vars(each).items():
            held = value if isinstance(value, list | tuple) else [value]
            if any(id(item) in parameters for item in held):
                raise ConfigError(
                    f"`{shown}` must hold its parameters only as parameters, but its attribute `{key}` refers to one, "
                    "too. Such modules, for example recurrent ones, cannot be cut."
                )


def _put_tensors(module: nn.Module, resolved: Resolved, source: Source, mesh: ParallelMesh) -> None:
    """Replace all parameters by distributed ones, and all buffers by this rank's parts."""
    tensors = list(_owned(module))
    names: dict[int, list[str]] = {}
    for owned in tensors:
        names.setdefault(id(owned.tensor), []).append(owned.name)
    for owned in tensors:
        source.require(names[id(owned.tensor)], owned.tensor)
    made: dict[int, Tensor] = {}
    for owner, key, tensor, name in tensors:
        share = resolved.shares.get(name, WHOLE)
        if id(tensor) not in made:
            part = source.part(names[id(tensor)], tensor, share, mesh.tensor.rank).to(mesh.device)
            is_parameter, dim = isinstance(tensor, nn.Parameter), None if share.is_whole else share.dim
            made[id(tensor)] = own_parameter(part, tensor, dim, mesh.tensor) if is_parameter else part
        (owner._parameters if key in owner._parameters else owner._buffers)[key] = made[id(tensor)]  # type: ignore[assignment]


class _Owned(NamedTuple):
    """Parameter or buffer of a module."""

    owner: nn.Module
    key: str
    """Name in the module that owns the tensor."""
    tensor: Tensor
    name: str
    """Name in the whole module."""


def _owned(module: nn.Module) -> Iterator[_Owned]:
    """Yield all parameters and buffers, tied ones several times."""
    for name, each in module.named_modules():
        for key, tensor in [*each._parameters.items(), *each._buffers.items()]:
            if tensor is not None:
                yield _Owned(each, key, tensor, f"{name}.{key}".removeprefix("."))


def _become_cut(
    module: nn.Module,
    resolved: Resolved,
    forwards: Mapping[str, Forward | None],
    mesh: ParallelMesh,
    images: Mapping[str, ImageLayer],
) -> None:
    """Give all modules a site, and turn those that own parameters into cut ones."""
    entrance, streams = Entrance(mesh.tensor), Streams(mesh, dropout_rates(module))
    for name, each in [*module.named_modules()]:
        named = {key: f"{name}.{key}".removeprefix(".") for key in (*each._parameters, *each._buffers)}
        shares = {key: resolved.shares[own] for key, own in named.items() if own in resolved.shares}
        site = Site(name, mesh.tensor, shares, entrance, streams)
        layer, forward = resolved.layers.get(name), forwards.get(name)
        if layer is not None:
            site.regions, site.last = layer.regions, layer.rule.parts[-1] if layer.rule.parts else 0
        if name in images:
            site.axis = mesh.context  # over which gradients of the weights are summed
            become_image_layer(each, site, images[name])
            continue
        if mesh.tensor.size > 1:
            own = {key for key, share in shares.items() if share.spans}
            site.foreign = frozenset(key for key in own if forward or named[key] in resolved.kept)
        become_cut(each, site, forward)
        if layer is not None and layer.rule.style is Style.REPLICATE and dropout_rates(each):
            each.register_forward_pre_hook(partial(_hook, streams.outside))
            each.register_forward_hook(partial(_hook, streams.inside), always_call=True)
    if images and mesh.context.size > 1:
        watch_calls(module)
    for begin, end in ((entrance.begin, entrance.end), (streams.begin, streams.end)):
        module.register_forward_pre_hook(partial(_hook, begin), prepend=True)
        module.register_forward_hook(partial(_hook, end), always_call=True)
    for region in {region for layer in resolved.layers.values() for region in layer.regions}:
        names = [name for name, layer in resolved.layers.items() if region in layer.regions]
        leave = partial(_hook, partial(streams.leave, frozenset([region])))
        _around(module, names).register_forward_hook(leave, always_call=True)


def _hook(action: Callable[[], None], *_: object) -> None:
    """Call a method of a module's own streams or entrance. A copy of the module (`deepcopy`) has its own ones."""
    action()


def _around(module: nn.Module, names: Sequence[str]) -> nn.Module:
    """Return the innermost module with a `forward` of its own that contains all of the named modules. Its end is also
    the end of their region: an error may have ended the module before the layer that leaves the region, and so does a
    recomputation (`torch.utils.checkpoint`) that has all tensors that it needs.
    """
    paths = [name.split(".")[:-1] for name in names]
    shared = [words[0] for words in takewhile(lambda words: len({*words}) == 1, zip(*paths, strict=False))]
    while isinstance(found := module.get_submodule(".".join(shared)), nn.ModuleList | nn.ModuleDict) and shared:
        shared = shared[:-1]
    return found


def gathered_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Gather the parameters and buffers of a cut module, under the names and in the shapes of the uncut module. Every
    rank must call this function. The values are in the host memory of the first rank; other ranks get an empty mapping.

    Use this function instead of `full_tensor()`: the rows of packed layers are stored in another order.
    Communication: an all-gather of every parameter that is cut.
    """
    found: dict[str, Tensor] = {}
    module.state_dict(keep_vars=True)  # runs hooks, such as that of `fully_shard` which brings the shards back
    for prefix, each in _plainly_named(module, ""):
        own: dict[str, Any] = {}
        each._save_to_state_dict(own, "", keep_vars=True)
        for key, tensor in own.items():
            gathered = _gathered(each, key, tensor)
            if own_rank() == 0:
                found[f"{prefix}{key}"] = gathered.detach().cpu().clone()
    return found


def _gathered(owner: nn.Module, key: str, tensor: Tensor) -> Tensor:
    """Gather a parameter or buffer from all ranks."""
    site: Site | None = vars(owner).get("cut_site")
    if site is None or key not in site.shares:
        return tensor
    if is_distributed(tensor):
        return in_order(owner, key, whole(tensor))
    return tensor if site.shares[key].is_whole else all_gather(tensor, site.axis, site.shares[key].dim)


def _plainly_named(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules, and what stands before the names of their parameters in the uncut module. Modules that were
    put around others after the cut, as `torch.compile` does, have no name.
    """
    module = _unwrapped(module)
    yield prefix, module
    for name, child in module.named_children():
        yield from _plainly_named(child, f"{prefix}{name}.")


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the cut module around which other code has put modules that hold nothing else."""
    inner = module
    while "cut_site" not in vars(inner):
        children = [*inner.children()]
        if len(children) != 1 or inner._parameters or inner._buffers:
            return module
        (inner,) = children
    return inner
