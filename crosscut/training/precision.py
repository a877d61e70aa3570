"""The element types of a run's precision as torch's, and whether a device has them."""

import torch

from crosscut.config import ConfigError
from crosscut.config.precision import PRECISIONS, precision_on
from crosscut.parallel import FLOAT8, ORDINARY, Products

BFLOAT16_CAPABILITY = (8, 0)
"""NVIDIA's first with bfloat16 products: Ampere. PyTorch imitates them on those before."""

FLOAT8_CAPABILITY = (8, 9)
"""NVIDIA's first with float8 products: Ada; then Hopper and Blackwell."""


def compute_dtype(precision: str) -> torch.dtype:
    """Of activations and matrix products."""
    return _dtype(PRECISIONS[precision].compute)


def parameter_dtype(precision: str) -> torch.dtype:
    """Of parameters, gradients and optimizer state."""
    return _dtype(PRECISIONS[precision].accumulation)


def products(precision: str) -> Products:
    """What the layers multiply with."""
    return FLOAT8 if PRECISIONS[precision].products.startswith("float8") else ORDINARY


def fast_precision(device: torch.device) -> str:
    """What `training.precision = "auto"` stands for on a device."""
    has_bfloat16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= BFLOAT16_CAPABILITY
    return precision_on(device.type, has_bfloat16=has_bfloat16)


def require_precision(precision: str, device: torch.device) -> None:
    """Raise `ConfigError` where the device does not have the run's precision in its hardware."""
    if products(precision) is not FLOAT8:
        return
    is_cuda = device.type == "cuda"
    if is_cuda and torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY:
        return
    found = f"{torch.cuda.get_device_name(device)} does not" if is_cuda else "the CPU does not"
    raise ConfigError(
        '`training.precision` must be one that the device multiplies in, but is "float8": GPUs from Ada and Hopper on '
        f'(compute capability 8.9) do, {found}. Set training.precision="bfloat16".'
    )


def needs_loss_scale(precision: str) -> bool:
    """Whether gradients pass through a type whose smallest number is too large for them."""
    return compute_dtype(precision) == torch.float16


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
