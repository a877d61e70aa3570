"""Read checkpoints of format 1, whose files have the format of `torch.distributed.checkpoint`.

The index of such a checkpoint, the file `.metadata`, is a pickle. A pickle can call any function that its reader finds
by name, so a checkpoint from an unknown author could run any code. This module's reader accepts only the names that an
old index needs. The reader replaces each name with an empty class, a plain Python type or a string, and imports no
module. The objects that the pickle builds are then checked like the JSON of a newer checkpoint.

Each part of a tensor is a zip archive that `torch.save` has written. The archive stores the tensor's bytes
uncompressed, so they are read without PyTorch.
"""

import dataclasses
import io
import json
import pickle
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import torch

from crosscut.checkpoint.format.fields import checked, checked_file, count_of, counts_of, field_of
from crosscut.checkpoint.format.index import Entry, Index, Part, Value, checked_entry
from crosscut.checkpoint.storage import Folder, reason
from crosscut.config import CheckpointError

OLD_INDEX_FILE = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_EMPTY_CLASSES = (
    (_METADATA, "Metadata"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
)
_PROPERTIES = (_METADATA, "TensorProperties")
_PLAIN_TYPES: Mapping[tuple[str, str], type] = {
    ("torch", "Size"): tuple,
    (_METADATA, "_MEM_FORMAT_ENCODING"): int,
    ("torch.serialization", "_get_layout"): str,
}
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
"""Names in the module `torch` that the reader replaces with strings of the same name."""

_LOCAL_HEADER = 30
"""Number of bytes in a zip entry's header before the name. The last four bytes are the lengths of the name and of the
extra field."""

_MOST_READ = 1 << 24
"""Maximum size in bytes of a value, or of the table of contents of a tensor's archive. The usual size of both is a few
hundred bytes."""


class _Unpickler(pickle.Unpickler):
    """Unpickler that accepts only the names that an old index needs."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        # New classes for each pickle, because a pickle can set attributes of the classes that it finds.
        self._known: dict[tuple[str, str], Any] = {place: type(place[1], (), {}) for place in _EMPTY_CLASSES}
        self._known[_PROPERTIES] = type("TensorProperties", (), {"__setstate__": _keep_dtype})
        self._known |= _PLAIN_TYPES
        self._known |= {("torch", name): name for name in _DTYPES}

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a known name. Raises `UnpicklingError` for any other name."""
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(f"it names `{module}.{name}`, which no checkpoint needs")
        return self._known[module, name]


def _keep_dtype(properties: Any, state: tuple[Any, ...]) -> None:
    """Keep only the first property of a tensor, the element type. The other properties are the same for all tensors."""
    properties.dtype = state[0]


def read_old_index(folder: Folder) -> Index:
    """Read the index of a checkpoint of format 1. Raises `CheckpointError` if the index contains an unknown name or an
    unknown type.
    """
    content = folder.read(OLD_INDEX_FILE)
    try:
        metadata = vars(_Unpickler(content).load())
        places = _places(field_of(metadata, "storage_data", dict))
        tensors: dict[str, Entry] = {}
        values: dict[str, Value] = {}
        for name, entry in field_of(metadata, "state_dict_metadata", dict).items():
            described = vars(entry)
            if "chunks" in described:
                tensors[name] = _entry(checked(name, str, "a tensor's name"), described, places)
            else:
                values[name] = _read_value(folder, places[checked(name, str, "a value's name"), ()])
    except Exception as error:  # a damaged pickle may raise any exception
        raise CheckpointError(
            f"`{folder}/{OLD_INDEX_FILE}` must be the index of a checkpoint, but is not: {reason(error)}. Use "
            "another checkpoint."
        ) from None
    return Index(tensors, values)


def _places(storage: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...]], Mapping[str, Any]]:
    """Return file positions, keyed by name and offset. For a value that is not a tensor, the offset is an empty
    tuple.
    """
    found = {}
    for index, place in storage.items():
        described = vars(index)
        offset = _counts(described, "offset") if "offset" in described else ()
        found[field_of(described, "fqn", str), offset] = vars(place)
    return found


def _entry(
    name: str, described: Mapping[str, Any], places: Mapping[tuple[str, tuple[int, ...]], Mapping[str, Any]]
) -> Entry:
    parts = []
    for chunk in map(vars, field_of(described, "chunks", list)):
        offsets = _counts(chunk, "offsets")
        file, start, length = _place(places[name, offsets])
        parts.append(Part(offsets, _counts(chunk, "sizes"), file, start, archive_bytes=length))
    dtype = field_of(vars(described["properties"]), "dtype", str)
    return checked_entry(name, _counts(described, "size"), dtype, tuple(parts))


def _place(described: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return the file of a stored object, the position of the object's first byte, and its number of bytes."""
    if described.get("transform_descriptors"):
        raise ValueError("a part of a tensor is stored compressed or otherwise encoded")
    file = checked_file(field_of(described, "relative_path", str))
    return file, count_of(described, "offset"), count_of(described, "length")


def _counts(described: Mapping[str, Any], name: str) -> tuple[int, ...]:
    return counts_of({name: list(field_of(described, name, tuple))}, name)


def _read_value(folder: Folder, place: Mapping[str, Any]) -> Value:
    """Read a value such as a learning rate. Tuples become lists, as in newer checkpoints."""
    file, start, length = _place(place)
    with folder.open(file) as stream:
        content = _FileSlice(stream, start, length).read()
    value = torch.load(io.BytesIO(content), weights_only=True)
    return json.loads(json.dumps(value))


def without_archive(file: IO[bytes], part: Part) -> Part:
    """Return a part that gives the CRC-32 from the zip archive, and the position of the tensor's bytes instead of the
    archive's position. A part of a newer checkpoint has no archive and is returned unchanged.
    """
    if not part.archive_bytes:
        return part
    with zipfile.ZipFile(_FileSlice(file, part.start, part.archive_bytes)) as archive:
        entry = next((e for e in archive.infolist() if e.filename.endswith("/data/0")), None)
    if entry is None or entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("the tensor must be stored uncompressed, as torch.save stores it, but is not")
    file.seek(part.start + entry.header_offset + _LOCAL_HEADER - 4)
    lengths = file.read(4)
    names = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    start = part.start + entry.header_offset + _LOCAL_HEADER + names
    return dataclasses.replace(part, start=start, crc32=entry.CRC, archive_bytes=0)


class _FileSlice(io.RawIOBase):
    """A section of a file, with the interface of a file. The class is used only to read values and the tables of
    contents of archives. Both are small, so `read` raises `ValueError` for more than `_MOST_READ` bytes.
    """

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        super().__init__()
        self.file, self.offset, self.length, self.position = file, offset, length, 0

    def readable(self) -> bool:
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Always true."""
        return True

    def tell(self) -> int:
        """Position relative to the start of the section."""
        return self.position

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position in the section."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        self.position = base + position
        return self.position

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes. If `size` is negative, read to the end of the section."""
        left = max(0, self.length - self.position)
        wanted = left if size < 0 else min(size, left)
        if wanted > _MOST_READ:
            raise ValueError(
                f"a value, or an archive's table of contents, is larger than the allowed {_MOST_READ:,} bytes"
            )
        self.file.seek(self.offset + self.position)
        content = self.file.read(wanted)
        self.position += len(content)
        return content
