"""Which files a corpus is made of, and their bytes.

`find_sources` turns what `data.text` names (files, folders, globs, a built-in corpus) into a fixed, ordered list, and
`read_chunks` reads one of them in bounded pieces, unpacking gzip and zstd on the way. Both decompressors are driven by
hand, because a stream that merely ends looks to most readers like a file that is whole.
"""

import glob
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from crosscut.config.checks import listed
from crosscut.config.errors import DataError

BUILTIN_CORPORA = {"builtin:state-of-the-union": Path(__file__).parent / "corpora" / "state_of_the_union.jsonl.zst"}

FORMATS = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst")
SUFFIXES = (*FORMATS, *(f"{suffix}{packed}" for suffix in (".txt", ".jsonl") for packed in COMPRESSIONS))

CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file of a corpus."""

    index: int
    """Place in the corpus, from 0."""

    name: str
    """As the user named it, for messages and the manifest."""

    path: Path
    """Where it lies."""

    format: str
    """`text`, `jsonl` or `parquet`."""

    compression: str
    """Empty, `.gz` or `.zst`."""

    size: int
    """Bytes on disk."""

    modified: int
    """Time of the last change, nanoseconds since the epoch."""


def find_sources(patterns: Iterable[str], *, setting: str = "data.text") -> list[Source]:
    """List the files of a corpus: patterns in the order given, the files of each sorted by name, each file once.

    A pattern is a file, a folder (searched all the way down for files of the known suffixes, hidden ones left out), a
    glob, or a name of `BUILTIN_CORPORA`. Raises `DataError` when a pattern matches nothing, names a file of another
    suffix, or cannot be looked at; its message calls the patterns `setting`.
    """
    found: dict[Path, Source] = {}
    for pattern in patterns:
        for name, path in _match(pattern, setting):
            key = path.resolve()
            if key not in found:
                found[key] = _describe(len(found), name, path)
    if not found:
        raise DataError(f"`{setting}` must name at least one file, folder or glob, but is empty.")
    return list(found.values())


def _match(pattern: str, setting: str) -> list[tuple[str, Path]]:
    if pattern.startswith("builtin:"):
        if pattern not in BUILTIN_CORPORA:
            known = listed(f"`{name}`" for name in BUILTIN_CORPORA)
            raise DataError(f"A built-in corpus must be {known}, but `{setting}` names `{pattern}`.")
        return [(pattern, BUILTIN_CORPORA[pattern])]
    if not pattern:
        raise DataError(f"`{setting}` must name files, folders or globs, but one of its names is empty.")
    try:
        matches = _expand(Path(pattern).expanduser())
        files = [file for match in matches for file in (_folder(match) if match.is_dir() else [match])]
    except OSError as error:
        raise unreadable(pattern, error) from None
    if not matches:
        raise DataError(f"`{setting}` must name files that are there, but nothing matches `{pattern}`.")
    if not files:
        raise DataError(f"`{pattern}` must hold a file ending in {listed(SUFFIXES)}, but holds none.")
    return [(file.as_posix(), file) for file in files]


def _expand(path: Path) -> list[Path]:
    if path.exists():
        return [path]
    return sorted(Path(match) for match in glob.glob(str(path), recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern


def _folder(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.name.lower().endswith(SUFFIXES)
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _describe(index: int, name: str, path: Path) -> Source:
    lower = path.name.lower()
    compression = next((suffix for suffix in COMPRESSIONS if lower.endswith(suffix)), "")
    kind = FORMATS.get(Path(lower.removesuffix(compression)).suffix)
    if kind is None or (kind == "parquet" and compression):
        raise DataError(
            f"`{name}` must end in {listed(SUFFIXES)}, but does not. Convert it, or name only the files to read."
        )
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(name, error) from None
    return Source(
        index=index,
        name=name,
        path=path,
        format=kind,
        compression=compression,
        size=status.st_size,
        modified=status.st_mtime_ns,
    )


def unreadable(name: str, error: OSError) -> DataError:
    """The error for a file that the operating system will not give."""
    return DataError(f"`{name}` must be a readable file, but is not: {error.strerror or error}.")


def read_chunks(source: Source) -> Iterator[tuple[bytes, int]]:
    """Read a source's unpacked bytes in order.

    Yields (bytes, bytes on disk read so far). Raises `DataError` when the file cannot be read, or when its compressed
    data is damaged or ends too early.
    """
    try:
        with source.path.open("rb") as file:
            if source.compression:
                yield from _unpack(source, file)
            else:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk, file.tell()
    except OSError as error:
        raise unreadable(source.name, error) from None


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _unpack(source: Source, file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    new, damaged = _gzip() if source.compression == ".gz" else _zstd()
    decompressor = new()
    whole = False
    try:
        while packed := file.read(CHUNK_BYTES):
            # A packed file may hold several streams one after the other, as `cat a.gz b.gz` makes it.
            while packed:
                chunk = decompressor.decompress(packed)
                whole = decompressor.eof
                packed = decompressor.unused_data if whole else b""
                decompressor = new() if whole else decompressor
                if chunk:
                    yield chunk, file.tell()
    except damaged as error:
        raise DataError(
            f"`{source.name}` must be valid {source.compression} data, but is damaged near byte {file.tell()}: "
            f"{error}. Get the file again."
        ) from None
    if not whole:
        raise DataError(
            f"`{source.name}` must hold its {source.compression} data to the end, but is cut short at byte "
            f"{source.size}. Get the file again."
        )


def _gzip() -> tuple[Callable[[], _Decompressor], type[Exception]]:
    return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error


def _zstd() -> tuple[Callable[[], _Decompressor], type[Exception]]:
    import zstandard

    # Files packed with `zstd --long` need a window above the library's default limit.
    context = zstandard.ZstdDecompressor(max_window_size=2**31)
    return context.decompressobj, zstandard.ZstdError
