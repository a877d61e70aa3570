"""Plain leaves of parameters: ordinary tensors in the memory of the parameters, with which layers compute.

A parameter is a `DTensor` (`parameters`), and so is its gradient. A forward or a backward pass that handled distributed
tensors would describe and check each of them anew, in every layer. The passes therefore never see a `DTensor`: each
parameter has leaves that share the memory of its local tensor. Autograd gives the gradient to the leaf, and a hook
hands it over to the parameter's `.grad` at once, so a leaf never keeps a gradient. The hooks of the parameter then run.
They run once for each leaf that the loss reached, and once more if the loss also reached the parameter itself.

`leaves_of` makes the leaves when a layer first reads the parameter, and makes new ones if the parameter's local tensor
is no longer the one that they share. Parameters that are computed from other tensors have no leaves. Code that asks
`torch.autograd.grad` or `backward(inputs=...)` for the gradient of a parameter does not find the parameter in the
graph; call `backward` instead.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar, final

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec

Gradient = tuple[Placement, ...] | None
"""Placement of a parameter's gradient; None for that of the parameter."""
_T = TypeVar("_T")


@final
class Leaves:
    """Leaves of one parameter. They live as long as the parameter keeps its local tensor: a parameter that is
    converted, copied or stored loses them.
    """

    def __init__(self, parameter: DTensor) -> None:
        spec = parameter._spec
        self.parameter, self.source = parameter, parameter._local_tensor
        """The parameter, and the local tensor that the leaves share."""
        self.dtype = parameter.dtype
        self.trains = parameter.requires_grad
        self.own = self._leaf(spec)
        """Leaf whose gradient has the placement of the parameter."""
        partial_spec = DTensorSpec(spec.mesh, (Partial(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
        self.partial = self._leaf(partial_spec)
        """Leaf whose gradient is `Partial`."""

    def _leaf(self, spec: DTensorSpec) -> Tensor:
        leaf = self.source.detach().requires_grad_()
        # The leaf must not hold its parameter: a converted parameter would then keep its former memory.
        leaf.register_post_accumulate_grad_hook(partial(_hand_over, weakref.ref(self), spec))
        return leaf

    def belong_to(self, parameter: DTensor) -> bool:
        """Whether these are leaves of the parameter, and share its present local tensor."""
        leaf, source = self.own, parameter._local_tensor
        alike: bool = torch._C._is_alias_of(leaf, source)  # type: ignore[attr-defined]
        return (
            self.parameter is parameter
            and self.source is source
            and alike
            and leaf.storage_offset() == source.storage_offset()
            and leaf.shape == source.shape
        )

    def part(self, gradient: Gradient) -> Tensor:
        """Return the leaf whose gradient has the placement `gradient`."""
        if not self.trains:
            return self.source
        return self.own if gradient is None or not isinstance(gradient[0], Partial) else self.partial

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        return OrderedDict, ()  # a copy of the parameter makes its own leaves; `torch.load` allows this type


def _hand_over(owner: weakref.ref[Leaves], spec: DTensorSpec, leaf: Tensor) -> None:
    """Add the gradient of a leaf to that of its parameter, and run the hooks of the parameter."""
    local, leaf.grad = leaf.grad, None
    leaves = owner()
    parameter = None if leaves is None else leaves.parameter
    if parameter is None or getattr(parameter, "leaves", None) is not leaves:
        raise RuntimeError(
            f"A parameter of shape {tuple(spec.shape)} must keep its tensor from the forward to the backward pass, but "
            "it was converted or replaced between them. Convert a model before its forward pass."
        )
    if not parameter.requires_grad:  # since the forward pass
        return
    if local is not None:
        _accumulate(parameter, DTensor(local, spec, requires_grad=False))
    for hook in tuple((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(parameter)


def _accumulate(parameter: DTensor, gradient: Tensor) -> None:
    for hook in tuple((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    held = parameter.grad
    if held is None:
        parameter.grad = gradient
    elif isinstance(held, DTensor) and isinstance(gradient, DTensor) and held.placements == gradient.placements:
        held._local_tensor.add_(gradient._local_tensor)
    else:
        held.add_(gradient)


def leaves_of(parameter: DTensor) -> Leaves | None:
    """Return the leaves of a parameter, which share its present local tensor. None if autograd must reach the parameter
    itself: other tensors determine it, or it can have no gradient at all.
    """
    if not parameter.is_leaf:
        return None
    leaves: object = getattr(parameter, "leaves", None)
    if not isinstance(leaves, Leaves) or not leaves.belong_to(parameter):
        source = parameter._local_tensor
        if source.is_inference() or not source.is_floating_point():
            return None
        with torch.inference_mode(False):
            leaves = Leaves(parameter)
        vars(parameter)["leaves"] = leaves
    leaves.trains = parameter.requires_grad
    return leaves


def on_leaves(modules: Iterable[nn.Module], function: Callable[..., _T], *arguments: object) -> _T:
    """Return `function(*arguments)`, while the attributes of these modules are the leaves in place of the parameters.
    Use this function to run compiled code, whose guards would check each distributed tensor anew.
    """
    shown: list[tuple[dict[str, object], str]] = []
    try:
        for module in modules:
            attributes = module.__dict__
            parameters: Mapping[str, object] = module._parameters
            for name, parameter in parameters.items():
                if isinstance(parameter, DTensor) and (leaves := leaves_of(parameter)) is not None:
                    attributes[name] = leaves  # Python finds it before it asks the module for a parameter
                    shown.append((attributes, name))
        return function(*arguments)
    finally:
        for attributes, name in shown:
            del attributes[name]


def own_part(parameter: Tensor | Leaves, gradient: Gradient, dtype: torch.dtype) -> Tensor:
    """Return this rank's part of a parameter, or of the leaves that compiled code is shown, cast to `dtype`. The
    parameter's gradient gets the placement `gradient`.
    """
    if isinstance(parameter, Leaves):
        part = parameter.part(gradient)
    elif torch.compiler.is_compiling():  # the compiler supports `to_local` and runs its checks only once
        assert isinstance(parameter, DTensor)
        part = parameter.to_local(grad_placements=gradient)
    else:
        assert isinstance(parameter, DTensor)
        if not (torch.is_grad_enabled() and parameter.requires_grad):
            part = parameter._local_tensor
        elif (leaves := leaves_of(parameter)) is not None:
            part = leaves.part(gradient)
        else:
            part = _OwnPart.apply(parameter, gradient)
    return part if part.dtype == dtype else part.to(dtype)


class _OwnPartContext(FunctionCtx):
    spec: DTensorSpec


class _OwnPart(torch.autograd.Function):
    """Autograd function that returns a parameter's local part, and gives the parameter's gradient a placement. It does
    the same as `DTensor.to_local` in a third of the time.

    PyTorch's `to_local` calls `from_local` for every gradient. `from_local` computes and checks shapes and strides that
    the parameter already knows.
    """

    @staticmethod
    def forward(ctx: _OwnPartContext, parameter: DTensor, gradient: tuple[Placement, ...] | None) -> Tensor:
        spec = parameter._spec
        if gradient is not None and gradient != spec.placements:
            spec = DTensorSpec(spec.mesh, gradient, tensor_meta=spec.tensor_meta)
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return parameter._local_tensor.view_as(parameter._local_tensor)  # a new tensor object, as autograd requires

    @staticmethod
    def backward(ctx: _OwnPartContext, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        if gradient is None:
            return None, None
        if gradient.is_contiguous():
            return DTensor(gradient, ctx.spec, requires_grad=False), None
        return DTensor.from_local(gradient, ctx.spec.mesh, ctx.spec.placements, run_check=False), None
