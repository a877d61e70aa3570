"""Write safetensors files of limited size, one tensor at a time.

The tensors have the names and the order that `families` defines. `checkpoint.format.tensor_file` describes the format.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from crosscut.checkpoint import Folder
from crosscut.checkpoint.format.tensor_file import Form, file_header, tensor_bytes
from crosscut.config.published.weights import INDEX_FILE, SINGLE_FILE


@dataclass(frozen=True)
class PlannedFile:
    """A safetensors file to write, with the names and shapes of its tensors."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes by tensor name, in the order in which the file holds the tensors."""


def plan_files(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, *, max_bytes: int) -> list[PlannedFile]:
    """Distribute tensors, in their order, to files of at most `max_bytes` bytes. A tensor that is larger than
    `max_bytes` gets a file of its own.
    """
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if groups[-1] and filled + size > max_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += size
    if len(groups) == 1:
        return [PlannedFile(SINGLE_FILE, groups[0])]
    count = len(groups)
    return [PlannedFile(f"model-{i:05d}-of-{count:05d}.safetensors", group) for i, group in enumerate(groups, 1)]


def write_tensors(folder: Folder, files: list[PlannedFile], dtype: torch.dtype, tensors: Iterator[Tensor]) -> None:
    """Write the files, and an index if there are several files. `tensors` yields the tensors in the order of
    `files`.
    """
    for file in files:
        with folder.create(file.name) as stream:
            stream.write(file_header({name: Form(shape, dtype) for name, shape in file.shapes.items()}))
            for name, shape in file.shapes.items():
                tensor = next(tensors)
                assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype), name
                stream.write(tensor_bytes(tensor))
                del tensor  # free the tensor before the next one is made
    if len(files) > 1:
        places = {name: file.name for file in files for name in file.shapes}
        total = sum(math.prod(shape) for file in files for shape in file.shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": places}
        folder.write(INDEX_FILE, json_bytes(index))


def json_bytes(table: Mapping[str, object]) -> bytes:
    """Return the content of a JSON file of a published model."""
    return (json.dumps(table, indent=2) + "\n").encode()
