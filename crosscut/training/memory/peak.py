"""Largest memory of a rank so far."""

import resource
import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """Return the largest memory of this rank so far: on a GPU, of all tensors; on a CPU, of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # in KiB on Linux
