"""Layout of a safetensors file: a header that lists the tensors, followed by their bytes.

The safetensors library writes a file from all of its tensors at once. The format also allows writing one tensor after
another, because the header depends only on the tensors' shapes and types.
"""

import json
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Element types that a file can hold, by their names in safetensors."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8
"""Alignment of the first tensor in the file, in bytes."""


class Form(NamedTuple):
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Total size of all elements, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def file_header(tensors: Mapping[str, Form]) -> bytes:
    """Return the header of a file that holds tensors with these shapes and types, in the order of `tensors`."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, form in tensors.items():
        start, end = end, end + form.num_bytes
        table[name] = {"dtype": _NAMES[form.dtype], "shape": form.shape, "data_offsets": (start, end)}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements, in row-major order."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
