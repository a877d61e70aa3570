"""Files of a corpus and their content.

`find_sources` resolves the names in `data.text` (files, folders, globs, a built-in corpus) to a fixed, ordered list.
`read_chunks` reads one file in parts of limited size and decompresses gzip and zstd. This module calls the
decompressors directly, because most file-like readers accept a truncated stream as a complete stream.
"""

import bz2
import glob
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from crosscut.config.checks import listed
from crosscut.config.errors import DamagedDataError, DataError
from crosscut.config.system.files import NotRegularError, require_regular

BUILTIN_CORPORA = {
    f"builtin:{name}": Path(__file__).parents[1] / "corpora" / f"{name.replace('-', '_')}.jsonl.zst"
    for name in ("tales", "state-of-the-union")
}

FORMATS = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet", ".tsv": "tsv"}
COMPRESSIONS = (".gz", ".zst")
SUFFIXES = (*FORMATS, *(f"{suffix}{packed}" for suffix in (".txt", ".jsonl", ".tsv") for packed in COMPRESSIONS))

_OF_FOLDERS = tuple(suffix for suffix in SUFFIXES if not suffix.startswith(".tsv"))
"""Endings of the files that are read if `data.text` names a folder. Tables are read only if they are named, because
tables in a folder of text usually hold something else, such as labels."""

CHUNK_BYTES = 64 * 1024

PACKED_BYTES = 1024
"""Number of compressed bytes that are decompressed at a time. The number is small because decompression can enlarge the
data a thousandfold.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """One file of a corpus."""

    index: int
    """Index in the corpus, from 0."""

    name: str
    """Name of the file in messages and in the manifest, as the user gave it."""

    path: Path
    """Path of the file."""

    format: str
    """`text`, `jsonl`, `parquet` or `tsv`."""

    compression: str
    """Empty, `.gz` or `.zst`."""

    size: int
    """Size in bytes on disk."""

    modified: int
    """Time of the last change, in nanoseconds since the epoch."""


def find_sources(
    patterns: Iterable[str], *, setting: str = "data.text", remedy: str = "Check the path."
) -> list[TextSource]:
    """List the files of a corpus. Patterns keep their order, the files of each pattern are sorted by name, and each
    file appears once.

    A pattern is a file, a folder (searched recursively for files with known suffixes, without hidden files), a glob, or
    a name in `BUILTIN_CORPORA`. `setting` is the name of the option that holds the patterns, and `remedy` the advice
    about a pattern that matches nothing, for messages. Raises `DataError` if a pattern matches nothing, names a file
    with an unknown suffix, or cannot be accessed.
    """
    found: dict[Path, TextSource] = {}
    for pattern in patterns:
        for name, path in _match(pattern, setting, remedy):
            key = Path(os.path.realpath(path))  # `Path.resolve` would raise for a symbolic link to itself
            if key not in found:
                found[key] = _describe(len(found), name, path)
    if not found:
        raise DataError(f"`{setting}` must name at least one file, folder or glob, but is empty. Name a text file.")
    return list(found.values())


def _match(pattern: str, setting: str, remedy: str) -> list[tuple[str, Path]]:
    if pattern.startswith("builtin:"):
        if pattern not in BUILTIN_CORPORA:
            known = listed(f"`{name}`" for name in BUILTIN_CORPORA)
            raise DataError(f"A built-in corpus must be {known}, but `{setting}` names `{pattern}`. Correct the name.")
        return [(pattern, BUILTIN_CORPORA[pattern])]
    if not pattern:
        raise DataError(f"`{setting}` must name files, folders or globs, but one name is empty. Remove this name.")
    try:
        path = Path(pattern).expanduser()
        matches = [path] if path.exists() else matches_of(path)
        files = [file for match in matches for file in (_folder(match) if match.is_dir() else [match])]
    except OSError as error:
        raise unreadable(pattern, error) from None
    if not matches:
        raise DataError(f"`{setting}` must name existing files, but nothing matches `{pattern}`. {remedy}")
    if not files:
        raise DataError(
            f"`{pattern}` must hold a file ending in {listed(_OF_FOLDERS)}, but holds none. Check the path."
        )
    return [(file.as_posix(), file) for file in files]


def matches_of(path: Path) -> list[Path]:
    """Return the paths that match a glob, sorted by name."""
    return sorted(Path(match) for match in glob.glob(str(path), recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern


def _folder(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.name.lower().endswith(_OF_FOLDERS)
        and not file.is_dir()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _describe(index: int, name: str, path: Path) -> TextSource:
    lower = path.name.lower()
    compression = next((suffix for suffix in COMPRESSIONS if lower.endswith(suffix)), "")
    kind = FORMATS.get(Path(lower.removesuffix(compression)).suffix)
    if kind is None or (kind == "parquet" and compression):
        raise DataError(
            f"`{name}` must end in {listed(SUFFIXES)}, but does not. Convert the file, or name other files."
        )
    try:
        require_regular(path)
        status = path.stat()
    except OSError as error:
        raise unreadable(name, error) from None
    return TextSource(
        index=index,
        name=name,
        path=path,
        format=kind,
        compression=compression,
        size=status.st_size,
        modified=status.st_mtime_ns,
    )


def unreadable(name: str, error: OSError) -> DataError:
    """Return the error for a file that the operating system cannot read, or that `require_regular` refuses. The message
    calls the file `name`.
    """
    is_endless = isinstance(error, NotRegularError)
    remedy = "Write the data to a file, and name that file." if is_endless else "Check the path."
    return DataError(f"`{name}` must be a readable file, but is not: {error.strerror or error}. {remedy}")


def undecodable(name: str, compression: str, offset: int) -> str:
    """Return the message about a byte that is not UTF-8, by its offset in the decompressed data."""
    unpacked = " of the decompressed data" if compression else ""
    return f"`{name}` must be UTF-8 text, but byte {offset}{unpacked} is not. Convert the file to UTF-8."


def read_chunks(source: TextSource) -> Iterator[tuple[bytes, int]]:
    """Read the decompressed bytes of a source in order.

    Yields (bytes, number of bytes on disk read so far). Raises `DataError` if the file cannot be read, and
    `BrokenOffError` if its compressed data is damaged or truncated.
    """
    try:
        with source.path.open("rb") as file:
            yield from unpack(file, name=source.name, compression=source.compression)
    except OSError as error:
        raise unreadable(source.name, error) from None


class BrokenOffError(DamagedDataError):
    """Error for compressed data that is damaged or truncated. The data that was read before the error is correct."""

    def __init__(self, message: str, place: int = 0) -> None:
        super().__init__(message)
        self.place = place
        """Position of the damage in the compressed file, in bytes (approximate), or the end of a truncated file."""


class Decompressor(Protocol):
    """Decompressor of one member. A member is a complete piece of compressed data, and a file may hold several."""

    @property
    def eof(self) -> bool:
        """Whether the end of the member has been read."""
        ...

    @property
    def unused_data(self) -> bytes:
        """Bytes after the end of the member."""
        ...

    def decompress(self, data: bytes, /) -> bytes:
        """Decompress the next bytes."""
        ...


def unpack(file: IO[bytes], *, name: str, compression: str) -> Iterator[tuple[bytes, int]]:
    """Read an open file in parts, and decompress it. `compression` is `.gz`, `.zst`, `.bz2`, or empty for a plain file.

    Yields (bytes, number of compressed bytes read so far). A part has at most a few megabytes, even if the data was
    compressed a thousandfold. `name` is the name of the file in messages. Raises `BrokenOffError` for damaged or
    truncated data, and `OSError` if the file cannot be read.
    """
    if not compression:
        position = 0
        while chunk := file.read(CHUNK_BYTES):
            position += len(chunk)
            yield chunk, position
        return
    new, damaged = DECOMPRESSORS[compression]()
    decompressor = new()
    whole = False
    position = 0
    for packed in _slices(file):
        position += len(packed)
        # A compressed file may hold several concatenated streams, as `cat a.gz b.gz` produces them.
        while packed:
            try:
                unpacked = decompressor.decompress(packed)
            except damaged as error:
                raise BrokenOffError(
                    f"`{name}` must be valid {compression} data, but is damaged near byte {position}: {error}. "
                    "Get the file again.",
                    position,
                ) from None
            whole = decompressor.eof
            packed = decompressor.unused_data if whole else b""
            decompressor = new() if whole else decompressor
            if unpacked:
                yield unpacked, position
    if not whole:
        raise BrokenOffError(
            f"`{name}` must hold complete {compression} data, but is truncated at byte {position}. Get the file again.",
            position,
        )


def _slices(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        for start in range(0, len(chunk), PACKED_BYTES):
            yield chunk[start : start + PACKED_BYTES]


def zstd_with(dictionary: bytes = b"") -> tuple[Callable[[], Decompressor], type[Exception]]:
    """Return the function that makes a decompressor of zstd, and the type of the exception for damaged data.
    `dictionary` is the dictionary with which the data was compressed, if any.
    """
    import zstandard

    trained = zstandard.ZstdCompressionDict(dictionary) if dictionary else None
    # Files compressed with `zstd --long` need a window above the library's default limit.
    context = zstandard.ZstdDecompressor(dict_data=trained, max_window_size=2**31)
    return context.decompressobj, zstandard.ZstdError


DECOMPRESSORS: Mapping[str, Callable[[], tuple[Callable[[], Decompressor], type[Exception]]]] = {
    ".gz": lambda: (lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error),
    ".zst": zstd_with,
    ".bz2": lambda: (bz2.BZ2Decompressor, OSError),
}
"""Functions, keyed by the suffix of compressed files. Each function returns a pair: another function, which makes a
decompressor, and the type of the exception for damaged data."""
