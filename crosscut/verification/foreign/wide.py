"""Float64 for all of a module's arithmetic.

Many modules compute parts of their work in float32, whatever the type of their inputs is: norms, softmaxes and rotary
angles. A proof in float64 would end at the precision of these parts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from crosscut.parallel import seed_of

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
_NOISE = 0.1
"""Standard deviation of the noise that is added to parameters whose elements are all equal."""


class _Wide(TorchFunctionMode):
    """Context in which a cast to a narrower type, or a tensor of a narrower type that a function creates, has the type
    float64.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function with float64 in place of narrower types."""
        if func in _CASTS:
            return Tensor.double(args[0])
        options = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **options)


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


@contextmanager
def in_float64() -> Iterator[None]:
    """Context in which PyTorch's functions compute in float64 where a module asks for a narrower type."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(usual)


def to_float64(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert all floating-point tensors among a module's keyword inputs to float64."""
    return {name: _pytree.tree_map(_to_float64, value) for name, value in inputs.items()}


def _to_float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def disturb_constants(module: nn.Module) -> None:
    """Add noise to each parameter whose elements are all equal, because a bug in the use of a bias of zeros or of a
    norm's weight of ones would stay invisible. The noise depends only on the parameter's name.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.numel() and bool((parameter == parameter.flatten()[0]).all()):
                generator = torch.Generator().manual_seed(seed_of("noise", name))
                parameter.add_(_NOISE * torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator))
