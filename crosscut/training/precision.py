"""The element types of a run's precision as torch's, and whether a device has them."""

import torch

from crosscut.config import ConfigError, ResolvedRun, RunConfig, resolve
from crosscut.config.conventions import AMPERE
from crosscut.config.precision import FLOAT8_MULTIPLE, PRECISIONS, precision_on
from crosscut.kernels import FLOAT8, ORDINARY, Products

FLOAT8_CAPABILITY = (8, 9)
"""Compute capability of NVIDIA's first GPUs with float8 products, Ada; Hopper and Blackwell have them, too."""


def compute_dtype(precision: str) -> torch.dtype:
    """Element type of activations and matrix products."""
    return _dtype(PRECISIONS[precision].compute)


def parameter_dtype(precision: str) -> torch.dtype:
    """Element type of parameters, gradients and optimizer state."""
    return _dtype(PRECISIONS[precision].accumulation)


def product_dtype(precision: str) -> torch.dtype:
    """Element type of the factors of the layers' matrix products."""
    return _dtype(PRECISIONS[precision].products)


def products(precision: str) -> Products:
    """Matrix products that the layers use."""
    return FLOAT8 if PRECISIONS[precision].products.startswith("float8") else ORDINARY


def fast_precision(device: torch.device) -> str:
    """Precision that `training.precision = "auto"` stands for on a device."""
    # PyTorch imitates bfloat16 on GPUs before.
    has_bfloat16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE
    return precision_on(device.type, has_bfloat16=has_bfloat16)


def resolve_on(run: RunConfig, device: torch.device) -> ResolvedRun:
    """Resolve a run for the device that it trains on."""
    return resolve(run, device="cuda" if device.type == "cuda" else "cpu", precision=fast_precision(device))


def require_precision(precision: str, device: torch.device) -> None:
    """Raise `ConfigError` where the device does not have the run's precision in its hardware."""
    if products(precision) is FLOAT8 and not _has_float8(device):
        raise ConfigError(f'{_no_float8("`training.precision`", device)}. Set training.precision="bfloat16".')


def require_imitable_precision(precision: str, device: torch.device) -> None:
    """Raise `ConfigError` where PyTorch does not even imitate what the precision's hardware does.

    An imitation gains training no time, but its factors are the same 8 bits: enough for `crosscut verify`.
    """
    if products(precision) is FLOAT8 and not (_has_float8(device) or _imitates_float8(device)):
        elsewhere = ', or verify on the CPU with training.device="cpu"' if device.type == "cuda" else ""
        raise ConfigError(f"{_no_float8('`--precision`', device)}. Take --precision bfloat16{elsewhere}.")


def _has_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


def _imitates_float8(device: torch.device) -> bool:
    """Whether PyTorch multiplies 8 bits without hardware for it: on CPUs, in builds that have the operator there."""
    if device.type != "cpu":
        return False
    zeros = torch.zeros(FLOAT8_MULTIPLE, FLOAT8_MULTIPLE, dtype=torch.bfloat16)
    try:
        FLOAT8.output(zeros, zeros)
        FLOAT8.weight_gradient(zeros, zeros)
    except RuntimeError:
        return False
    return True


def _no_float8(option: str, device: torch.device) -> str:
    found = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return (
        f'{option} must be one that the device multiplies in, but is "float8": GPUs from Ada and Hopper on (compute '
        f"capability 8.9) do, {found} does not"
    )


def needs_loss_scale(precision: str) -> bool:
    """Whether gradients pass through a type whose smallest number is too large for them."""
    return compute_dtype(precision) == torch.float16


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
