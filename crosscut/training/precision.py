"""PyTorch element types of each precision, and checks whether a device supports a precision."""

import torch

from crosscut.config import ConfigError, ResolvedRun, RunConfig, resolve
from crosscut.config.conventions import AMPERE
from crosscut.config.precision import FLOAT8_MULTIPLE, PRECISIONS, Precision, precision_on
from crosscut.kernels import FLOAT8, ORDINARY, Products

FLOAT8_CAPABILITY = (8, 9)
"""Lowest compute capability of NVIDIA GPUs with float8 products (Ada; Hopper and Blackwell are higher)."""


def torch_dtype(name: str) -> torch.dtype:
    """PyTorch's element type of this name, such as a name in `ElementTypes`."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def products(precision: str) -> Products:
    """Implementation of the layers' matrix products in this precision."""
    return FLOAT8 if PRECISIONS[precision].products.startswith("float8") else ORDINARY


def fast_precision(device: torch.device) -> str:
    """Precision that `training.precision = "auto"` selects on this device."""
    # PyTorch emulates bfloat16 on older GPUs.
    has_bfloat16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE
    return precision_on(device.type, has_bfloat16=has_bfloat16)


def resolve_on(run: RunConfig, device: torch.device) -> ResolvedRun:
    """Resolve a run's "auto" settings for the device that the run trains on."""
    return resolve(run, device="cuda" if device.type == "cuda" else "cpu", precision=fast_precision(device))


def require_precision(precision: str, device: torch.device) -> None:
    """Raise `ConfigError` if the device's hardware does not support the precision."""
    if products(precision) is FLOAT8 and not _has_float8(device):
        raise ConfigError(f'{_no_float8("`training.precision`", device)}. Set training.precision="bfloat16".')


def require_imitable_precision(precision: str, device: torch.device) -> None:
    """Raise `ConfigError` if PyTorch can neither run nor emulate the precision's matrix products on the device.

    Emulation is slow, but multiplies the same 8-bit numbers as the hardware. Emulation is therefore enough for
    `crosscut verify`.
    """
    if products(precision) is FLOAT8 and not (_has_float8(device) or _imitates_float8(device)):
        elsewhere = ', or verify on the CPU with training.device="cpu"' if device.type == "cuda" else ""
        raise ConfigError(f"{_no_float8('`--precision`', device)}. Use --precision bfloat16{elsewhere}.")


def _has_float8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


def _imitates_float8(device: torch.device) -> bool:
    """Whether PyTorch emulates 8-bit products on this device: only on CPUs, and only in some builds."""
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
        f'{option} must be a precision that the device supports, but is "float8". float8 needs a GPU of compute '
        f"capability 8.9 or higher (Ada, Hopper or later), but the device is {found}"
    )


def needs_loss_scale(precision: str) -> bool:
    """Whether the precision needs a loss scale because gradients pass through float16."""
    return PRECISIONS[precision].compute == Precision.FLOAT16
