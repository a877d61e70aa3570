"""The element types of a run's precision as torch's."""

import torch

from crosscut.config.precision import PRECISIONS


def compute_dtype(precision: str) -> torch.dtype:
    """Of activations and matrix products."""
    return _dtype(PRECISIONS[precision].compute)


def parameter_dtype(precision: str) -> torch.dtype:
    """Of parameters, gradients and optimizer state."""
    return _dtype(PRECISIONS[precision].accumulation)


def needs_loss_scale(precision: str) -> bool:
    """Whether gradients pass through a type whose smallest number is too large for them."""
    return compute_dtype(precision) == torch.float16


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
