"""Files as trees: JSON, JSON lines, TOML and the header of a safetensors file, also inside gzip and zstandard."""

import gzip
import json
import struct
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tomli_w
import zstandard

from benchmarks.fuzzing.hostile import JSON, TOML


@dataclass(frozen=True)
class Format:
    """A way to read a file as a tree and to write it back."""

    parse: Callable[[bytes], Any]
    dump: Callable[[Any], bytes]
    values: dict[str, str]
    """Hostile source text of the format's language, by name."""


@dataclass(frozen=True)
class Packing:
    """Compression around a file."""

    unpack: Callable[[bytes], bytes]
    pack: Callable[[bytes], bytes]


def _rows(content: bytes) -> list[Any]:
    return [json.loads(line) for line in content.splitlines()]


def _lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def header_of(content: bytes) -> tuple[Any, bytes]:
    """Header of a safetensors file, and the tensors behind it."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


_JSON = Format(json.loads, lambda tree: json.dumps(tree, indent=1).encode(), JSON)
_JSONL = Format(_rows, _lines, JSON)
_TOML = Format(lambda content: tomllib.loads(content.decode()), lambda tree: tomli_w.dumps(tree).encode(), TOML)
_HEADER = Format(lambda content: header_of(content)[0], lambda tree: json.dumps(tree).encode(), JSON)

_FORMATS = {".json": _JSON, ".jsonl": _JSONL, ".toml": _TOML, ".safetensors": _HEADER}
_PACKINGS = {
    ".gz": Packing(gzip.decompress, lambda content: gzip.compress(content, mtime=0)),
    ".zst": Packing(lambda content: zstandard.ZstdDecompressor().decompress(content, max_output_size=1 << 26),
                    lambda content: zstandard.ZstdCompressor(write_checksum=True).compress(content)),
}  # fmt: skip
_NONE = Packing(bytes, bytes)


def packing_of(name: str) -> tuple[Packing, str]:
    """Compression of a file, and the file's name without the compression's suffix."""
    for suffix, packing in _PACKINGS.items():
        if name.endswith(suffix):
            return packing, name.removesuffix(suffix)
    return _NONE, name


def format_of(name: str) -> Format | None:
    """Format of a file, or None if the file is not a tree."""
    _, name = packing_of(name)
    return next((form for suffix, form in _FORMATS.items() if name.endswith(suffix)), None)


def rebuilt(name: str, content: bytes, text: bytes) -> bytes:
    """File whose tree's text is `text`: the text itself, or a safetensors file with the text as its header."""
    if not name.endswith(".safetensors"):
        return text
    return struct.pack("<Q", len(text)) + text + header_of(content)[1]


def paths_of(tree: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Paths of all values in a tree, without the tree itself. A long list is represented by its first items."""
    items: list[tuple[str | int, Any]] = []
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree[:4]))
    return [found for key, value in items for found in ((*path, key), *paths_of(value, (*path, key)))]
