"""Which files a source is made of: paths, folders, globs and URLs of any store that fsspec knows, in a fixed order.

A file's name, which stands in the ids of its documents, is its path below what the user named: `/data/mail/2003/*.eml`
gives `a.eml`, and `/data/mail` gives `2003/a.eml`, so a corpus that moves to another disk keeps its ids.
"""

import glob
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from crosscut.config.checks import listed
from crosscut.config.corpus import SourceConfig
from crosscut.config.errors import DataError
from crosscut.data.sources import BUILTIN_CORPORA, unpack, unreadable

SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "text": (".txt",),
    "html": (".html", ".htm", ".xhtml"),
    "mail": (".eml", ".mbox"),
    "wikipedia": (".xml",),
    "megatron": (".idx",),
}
"""What the names of files of each format end in, before `COMPRESSIONS`."""

COMPRESSIONS = (".gz", ".zst", ".bz2")

NAMED_FREELY = ("text", "html", "mail")
"""Formats of which a folder's files count whatever they are called, if the source says that it has this format."""

_VERSIONS = ("mtime", "ETag", "etag", "md5Hash", "LastModified", "last_modified", "updated", "created")
"""Where file systems tell that a file has changed."""


@dataclass(frozen=True, kw_only=True)
class File:
    """One file of a source."""

    name: str
    """In document ids; another for each file of the source."""

    url: str
    """Where it lies: an absolute path, or a URL."""

    format: str
    """One of `SUFFIXES`."""

    compression: str
    """Empty or one of `COMPRESSIONS`."""

    size: int
    """Bytes on disk, those of a `.bin` beside an `.idx` among them."""

    version: str
    """Changes when the file does: time of the last change, or what its store has for it."""

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open it as it lies on disk. Raises `DataError` when it, or anything while it is open, cannot be read."""
        try:
            with _open(self.url) as file:
                yield file
        except OSError as error:
            raise unreadable(self.url, error) from None

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        """Its unpacked bytes in order, each piece with the bytes on disk read so far.

        Raises `DataError` when it cannot be read, and `DamagedError` where packed data is damaged or ends too early.
        """
        with self.open() as file:
            yield from unpack(file, name=self.url, compression=self.compression)


def _open(url: str) -> IO[bytes]:
    if "://" not in url:
        return Path(url).open("rb")
    import fsspec

    return cast(IO[bytes], fsspec.open(url, "rb").open())


class _Found(NamedTuple):
    name: str
    url: str
    size: int
    version: str


def find_files(source: SourceConfig) -> list[File]:
    """The files of a source: what it names in the order given, the files of each sorted by name, each file once.

    Folders are searched all the way down, hidden files left out, for files whose suffix is known or, where the source
    has a format of `NAMED_FREELY`, for all. Raises `DataError` when something matches nothing, cannot be looked at, or
    has a suffix that does not tell its format.
    """
    files: dict[str, File] = {}
    names: set[str] = set()
    for pattern in source.files:
        for found in _match(source, pattern):
            if found.url not in files:
                file = _describe(source, found, names)
                files[found.url] = file
                names.add(file.name)
    return list(files.values())


def _match(source: SourceConfig, pattern: str) -> list[_Found]:
    if pattern in BUILTIN_CORPORA:
        pattern = str(BUILTIN_CORPORA[pattern])
    suffixes = _suffixes(source.format)
    try:
        if "://" in pattern and not pattern.startswith(("file://", "local://")):
            matched, found = _match_remote(pattern, suffixes)
        else:
            path = pattern.partition("://")[2] if "://" in pattern else pattern
            matched, found = _match_local(Path(path).expanduser().absolute(), suffixes)
    except DataError:
        raise
    except OSError as error:
        raise unreadable(error.filename or pattern, error) from None
    except Exception as error:  # stores have exceptions of their own, and fsspec raises several for a URL that is none
        hint = " Try `pip install crosscut[s3]`." if pattern.startswith("s3://") else ""
        raise DataError(
            f"`sources.files` of `{source.name}` must name files that can be read, but `{pattern}` cannot: "
            f"{str(error).rstrip('.') or type(error).__name__}.{hint}"
        ) from None
    if not matched:
        raise DataError(
            f"`sources.files` of `{source.name}` must name files that are there, but nothing matches `{pattern}`."
        )
    if not found:
        wanted = f"a file ending in {listed(suffixes)}" if suffixes else "a file"
        raise DataError(f"`{pattern}` of the source `{source.name}` must hold {wanted}, but holds none.")
    return found


def _suffixes(kind: str) -> tuple[str, ...]:
    """What the files of a folder must end in; empty where any will do."""
    if kind in NAMED_FREELY:
        return ()
    return tuple(suffix for name, suffixes in SUFFIXES.items() for suffix in suffixes if kind in ("auto", name))


def _match_local(path: Path, suffixes: tuple[str, ...]) -> tuple[bool, list[_Found]]:
    """Whether anything matches, and the files."""
    try:
        path.stat()
        matches, root = [path], path if path.is_dir() else path.parent
    except FileNotFoundError:
        for folder in path.parents:
            for match in _glob(folder):
                if match.is_dir():
                    os.scandir(match).close()  # glob would pass over a folder without rights in silence
            if not glob.has_magic(str(folder)):
                root = folder
                break
        matches = _glob(path)
    files = [file for match in matches for file in (_walk(match, suffixes) if match.is_dir() else [match])]
    found = []
    for file in files:
        status = file.stat()
        # Names on a disk are bytes, which need not be UTF-8 as an id must.
        name = os.fsencode(file.relative_to(root).as_posix()).decode("utf-8", "backslashreplace")
        found.append(_Found(name, str(file), status.st_size, str(status.st_mtime_ns)))
    return bool(matches), found


def _glob(path: Path) -> list[Path]:
    return sorted(Path(match) for match in glob.glob(str(path), recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern


def _walk(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    def stop(error: OSError) -> None:  # os.walk would pass over a folder without rights in silence
        raise error

    found = []
    seen = {folder.resolve()}
    for parent, folders, names in os.walk(folder, onerror=stop, followlinks=True):
        inner = [Path(parent) / name for name in sorted(folders) if not name.startswith(".")]
        inner = [path for path in inner if path.resolve() not in seen]  # links may lead in circles
        seen |= {path.resolve() for path in inner}
        folders[:] = [path.name for path in inner]
        found += [Path(parent) / name for name in names if _counts(name, suffixes)]
    return sorted(path for path in found if path.is_file())


def _counts(name: str, suffixes: tuple[str, ...]) -> bool:
    return not name.startswith(".") and (not suffixes or _split(name)[0].endswith(suffixes))


def _match_remote(pattern: str, suffixes: tuple[str, ...]) -> tuple[bool, list[_Found]]:
    from fsspec.core import url_to_fs

    system, path = url_to_fs(pattern)
    path = path.rstrip("/")
    try:
        matches = {path: system.info(path)}
        root = path if matches[path]["type"] == "directory" else path.rpartition("/")[0]
    except FileNotFoundError:
        root = path
        while glob.has_magic(root):
            root = root.rpartition("/")[0]
        globbed = system.glob(path, detail=True) if glob.has_magic(path) else {}
        matches = {name: entry for name, entry in globbed.items() if not _is_hidden(name.removeprefix(root))}
    files: dict[str, Mapping[str, Any]] = {}
    for match, entry in sorted(matches.items()):
        if entry["type"] != "directory":
            files[match] = entry
            continue
        files |= {
            name: inner
            for name, inner in sorted(system.find(match, detail=True).items())
            if _counts(name.rpartition("/")[2], suffixes) and not _is_hidden(name.removeprefix(match))
        }
    found = []
    for name, entry in files.items():
        version = next((str(entry[key]) for key in _VERSIONS if entry.get(key) is not None), "")
        relative = name.removeprefix(root).strip("/")
        found.append(_Found(relative, system.unstrip_protocol(name), int(entry["size"] or 0), version))
    return bool(matches), found


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _describe(source: SourceConfig, found: _Found, taken: set[str]) -> File:
    stem, compression = _split(found.url)
    kinds = [kind for kind, suffixes in SUFFIXES.items() if stem.endswith(suffixes)]
    kind = source.format if source.format != "auto" else next(iter(kinds), "")
    if not kind:
        raise DataError(
            f"`{found.url}` of the source `{source.name}` must end in {listed(_suffixes('auto'))}, or the source must "
            "have a `format`, but neither is so."
        )
    if compression and kind in ("parquet", "megatron"):
        raise DataError(f"`{found.url}` must not be packed, as {kind} files are read in places. Unpack it first.")
    name, number = found.name, 1
    while name in taken:  # two folders of the source may each have a file of that name
        number += 1
        name = f"{found.name}~{number}"
    size, version = found.size, found.version
    if kind == "megatron":
        status = _tokens_of(found.url)
        size, version = size + status.st_size, f"{version} {status.st_mtime_ns}"
    return File(name=name, url=found.url, format=kind, compression=compression, size=size, version=version)


def _tokens_of(url: str) -> os.stat_result:
    """What there is to know of the `.bin` beside an `.idx`."""
    if "://" in url:
        raise DataError(f"`{url}` must lie on a disk, as megatron files are mapped into memory. Copy it first.")
    path = Path(url).with_suffix(".bin")
    try:
        return path.stat()
    except OSError as error:
        raise unreadable(str(path), error) from None


def _split(name: str) -> tuple[str, str]:
    """A file's name in lower case without the suffix of its compression, and that suffix."""
    lower = name.lower()
    compression = next((suffix for suffix in COMPRESSIONS if lower.endswith(suffix)), "")
    return lower.removesuffix(compression), compression
