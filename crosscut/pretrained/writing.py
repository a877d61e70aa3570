"""Write safetensors files of limited size, one tensor at a time.

The tensors have the names and the order that `families` defines. `checkpoint.format.tensor_file` describes the format.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from crosscut.checkpoint import Folder
from crosscut.checkpoint.format.tensor_file import Form, file_header, tensor_bytes
from crosscut.config.published.weights import INDEX_FILE, SINGLE_FILE


@dataclass(frozen=True)
class PlannedFile:
    """A safetensors file to write, with the names, shapes and types of its tensors."""

    name: str
    forms: Mapping[str, Form]
    """Shapes and types by tensor name, in the order in which the file holds the tensors."""


def num_bytes(forms: Mapping[str, Form]) -> int:
    """Return the number of bytes of all tensors together."""
    return sum(math.prod(form.shape) * form.dtype.itemsize for form in forms.values())


def plan_files(forms: Mapping[str, Form], *, max_bytes: int) -> list[PlannedFile]:
    """Distribute tensors, in their order, to files of at most `max_bytes` bytes. A tensor that is larger than
    `max_bytes` gets a file of its own.
    """
    groups: list[dict[str, Form]] = [{}]
    filled = 0
    for name, form in forms.items():
        size = num_bytes({name: form})
        if groups[-1] and filled + size > max_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = form
        filled += size
    if len(groups) == 1:
        return [PlannedFile(SINGLE_FILE, groups[0])]
    count = len(groups)
    return [PlannedFile(f"model-{i:05d}-of-{count:05d}.safetensors", group) for i, group in enumerate(groups, 1)]


def write_tensors(folder: Folder, files: list[PlannedFile], tensors: Iterator[Tensor]) -> None:
    """Write the files, and an index if there are several files. `tensors` yields the tensors in the order of
    `files`.
    """
    for file in files:
        with folder.create(file.name) as stream:
            stream.write(file_header(file.forms))
            for name, form in file.forms.items():
                tensor = next(tensors)
                assert (tuple(tensor.shape), tensor.dtype) == form, name
                stream.write(tensor_bytes(tensor))
                del tensor  # free the tensor before the next one is made
    if len(files) > 1:
        places = {name: file.name for file in files for name in file.forms}
        total = sum(num_bytes(file.forms) for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        folder.write(INDEX_FILE, json_bytes(index))


def json_bytes(table: Mapping[str, object]) -> bytes:
    """Return the content of a JSON file of a published model."""
    return (json.dumps(table, indent=2) + "\n").encode()
