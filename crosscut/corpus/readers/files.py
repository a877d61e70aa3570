"""Find the files of a source in a fixed order. A source names paths, folders, globs, or URLs that fsspec supports.

The ids of documents contain the file's path relative to the folder that the user named: `/data/mail/2003/*.eml` gives
`a.eml`, and `/data/mail` gives `2003/a.eml`. A corpus that moves to another disk therefore keeps its ids. Two entries
of `sources.files` may give two files the same name. The last folders of the later entry's path are then put in front of
the names of all its files: `book/*.html` gives `print.html`, and then `reference/*.html` gives `reference/print.html`.
An entry never changes the names of earlier entries, so a new entry at the end keeps all ids.
"""

import glob
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from crosscut.config.checks import listed
from crosscut.config.corpora import SourceConfig
from crosscut.config.errors import DataError
from crosscut.config.system.extras import install_command
from crosscut.config.system.files import require_regular
from crosscut.corpus.execution.budget import RecordWatch
from crosscut.corpus.readers.selection import JUDGED_BY_CONTENT, START_BYTES, Selection
from crosscut.data.text.sources import BUILTIN_CORPORA, matches_of, unpack, unreadable

SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "text": (".txt",),
    "html": (".html", ".htm", ".xhtml", ".shtml"),
    "mail": (".eml", ".mbox"),
    "wikipedia": (".xml",),
    "megatron": (".idx",),
    "warc": (".warc",),
    "wet": (".wet",),
}
"""File name suffixes of each format. A suffix of `COMPRESSIONS` may follow."""

COMPRESSIONS = (".gz", ".zst", ".bz2")

_RANGE = re.compile(r"(?<=\.xml)-p\d+p\d+$")
"""Pattern for the page range after the suffix of a dump that is published in pieces:
`enwiki-pages-articles1.xml-p1p41242.bz2`."""

_INDEX = re.compile(r"-multistream-index\d*\.txt(-p\d+p\d+)?$")
"""Pattern for the end of the name of an index file. Index files stand next to a dump, and tell where each page of the
dump begins."""

_VERSIONS = ("mtime", "ETag", "etag", "md5Hash", "LastModified", "last_modified", "updated", "created")
"""Keys under which file systems report the version or the last change of a file."""


@dataclass(frozen=True, kw_only=True)
class File:
    """One file of a source."""

    name: str
    """Name of the file in document ids, unique within the source."""

    url: str
    """Absolute path or URL."""

    format: str
    """A key of `SUFFIXES`."""

    compression: str
    """An element of `COMPRESSIONS`, or empty if the file is not compressed."""

    size: int
    """Number of bytes on disk. The size of an `.idx` file includes the bytes of its `.bin` file."""

    version: str
    """Text that changes when the file changes: the time of the last change, or a version that the store reports."""

    watch: RecordWatch = field(default=RecordWatch(), compare=False, repr=False)
    """Limits on the records of the file (see `within_budget`)."""

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """Open the file without decompressing it. Raises `DataError` if opening or reading fails."""
        try:
            with _open(self.url) as file:
                yield file
        except OSError as error:
            raise unreadable(self.url, error) from None

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        """Yield the decompressed bytes in chunks. Each chunk comes with the number of bytes read from the disk so far.

        Raises `DataError` if the file cannot be read, and `BrokenOffError` if compressed data is damaged or incomplete.
        """
        with self.open() as file:
            for data, position in unpack(file, name=self.url, compression=self.compression):
                self.watch.advance(len(data))
                yield data, position


def _open(url: str) -> IO[bytes]:
    if "://" not in url:
        return Path(url).open("rb")
    import fsspec

    return cast(IO[bytes], fsspec.open(url, "rb").open())


class _FoundFile(NamedTuple):
    name: str
    """Path relative to `root`."""

    root: str
    """Folder that the entry of `sources.files` names. It is the same for all files of an entry."""

    url: str
    size: int
    version: str

    @property
    def path(self) -> str:
        """Path as text. For a file in a remote store, the path does not contain the name of the store."""
        return f"{self.root}/{self.name}"


class FoundFiles(NamedTuple):
    """The files of a source."""

    files: list[File]

    left_out: dict[str, int]
    """Number of files, keyed by suffix, that were left out of folders because they do not have the source's format."""


def find_source(source: SourceConfig) -> FoundFiles:
    """Find the files of a source, in the order of `sources.files`. The matches of one entry are sorted by name.

    A file that matches several entries is listed once. Folders are searched recursively for files of the source's
    format (see `Selection`), and the files that are skipped are counted. Hidden files are skipped, too. Raises
    `DataError` if an entry matches nothing, if a folder cannot be read, if a file's suffix does not show the format, or
    if the reader of a format does not support the file's compression or location.
    """
    files: dict[str, File] = {}
    paths: dict[str, str] = {}
    selection = Selection(source.format, _suffixes(source.format))
    for pattern in source.files:
        new = {found.url: found for found in _match(source, pattern, selection) if found.url not in files}
        names = _name(list(new.values()), paths)
        files |= {found.url: _describe(source, found, name) for found, name in zip(new.values(), names, strict=True)}
        paths |= {name: found.path for found, name in zip(new.values(), names, strict=True)}
    return FoundFiles(list(files.values()), selection.left_out)


def _name(files: Sequence[_FoundFile], taken: Mapping[str, str]) -> list[str]:
    """Name the files of one entry of `sources.files`, all relative to the same folder.

    `taken` maps the names of the files of earlier entries to their paths. The names are relative to the folder that the
    entry names. If one of these names is taken, the last folder of the entry's path is put in front of all names. If
    this is not enough, the folder before it is added too, and so on, until no path of an earlier file ends with one of
    the names.
    """
    names = [file.name for file in files]
    if taken.keys().isdisjoint(names):
        return _numbered(names, taken)
    folders = [folder for folder in files[0].root.split("/") if folder not in ("", ".")]
    ends = {end for path in taken.values() for end in _ends(path)}
    for start in range(len(folders) - 1, -1, -1):
        names = ["/".join([*folders[start:], file.name]) for file in files]
        if ends.isdisjoint(names):
            break
    return _numbered(names, taken)


def _ends(path: str) -> Iterator[str]:
    parts = path.split("/")
    return ("/".join(parts[start:]) for start in range(len(parts)))


def _numbered(names: Sequence[str], taken: Container[str]) -> list[str]:
    made: dict[str, None] = {}
    for name in names:
        made[_free(name, taken, made)] = None
    return list(made)


def _free(name: str, taken: Container[str], made: Container[str]) -> str:
    """Return the name, or the name with a number if another file has it already. Two files can have the same path if
    they are in different stores, or if escaping made their paths equal.
    """
    free, number = name, 1
    while free in taken or free in made:
        number += 1
        free = f"{name}~{number}"
    return free


def _match(source: SourceConfig, pattern: str, selection: Selection) -> list[_FoundFile]:
    if pattern in BUILTIN_CORPORA:
        pattern = str(BUILTIN_CORPORA[pattern])
    try:
        if "://" in pattern and not pattern.startswith(("file://", "local://")):
            matched, found = _match_remote(pattern, selection)
        else:
            path = pattern.partition("://")[2] if "://" in pattern else pattern
            matched, found = _match_local(Path(path).expanduser().absolute(), selection)
    except DataError:
        raise
    except OSError as error:
        raise unreadable(error.filename or pattern, error) from None
    except Exception as error:  # each store has its own exceptions, and fsspec raises several kinds for invalid URLs
        hint = f" If s3fs is missing, run `{install_command('s3')}`." if pattern.startswith("s3://") else ""
        raise DataError(
            f"`sources.files` of `{source.name}` must name readable files, but `{pattern}` cannot be read: "
            f"{str(error).rstrip('.') or type(error).__name__}. Check the path and the access rights.{hint}"
        ) from None
    if not matched:
        raise DataError(
            f"`sources.files` of `{source.name}` must name existing files, but no file matches `{pattern}`. Correct "
            "the path."
        )
    if not found:
        wanted = f"a file ending in {listed(_suffixes(source.format))}"
        if source.format in JUDGED_BY_CONTENT:
            wanted += f", or a file whose content has the format `{source.format}`"
        raise DataError(
            f"`{pattern}` of the source `{source.name}` must contain {wanted}, but contains none. Correct the path, or "
            "set the source's `format`."
        )
    return found


def _suffixes(kind: str) -> tuple[str, ...]:
    """Suffixes of the files of a format."""
    return tuple(suffix for name, suffixes in SUFFIXES.items() for suffix in suffixes if kind in ("auto", name))


def _match_local(path: Path, selection: Selection) -> tuple[bool, list[_FoundFile]]:
    """Return whether the path or glob matches anything, and the files found."""
    try:
        path.stat()
        matches, root = [path], path if path.is_dir() else path.parent
    except FileNotFoundError:
        for folder in path.parents:
            for match in matches_of(folder):
                if match.is_dir():
                    os.scandir(match).close()  # raises for an unreadable folder, which glob would skip silently
            if not glob.has_magic(str(folder)):
                root = folder
                break
        matches = matches_of(path)
    start = os.path.normpath(_readable(root))
    files = [file for match in matches for file in (_walk(match, selection) if match.is_dir() else [match])]
    found = []
    for file in files:
        require_regular(file)
        status = file.stat()
        name = _readable(file.relative_to(root))
        found.append(_FoundFile(name, start, str(file), status.st_size, str(status.st_mtime_ns)))
    return bool(matches), found


def _readable(path: Path) -> str:
    """Convert a path to text. File names are bytes and may not be UTF-8, but an id must be UTF-8."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def _walk(folder: Path, selection: Selection) -> list[Path]:
    def stop(error: OSError) -> None:  # os.walk would skip an unreadable folder silently
        raise error

    found = []
    seen = {folder.resolve()}
    for parent, folders, names in os.walk(folder, onerror=stop, followlinks=True):
        inner = [Path(parent) / name for name in sorted(folders) if not name.startswith(".")]
        inner = [path for path in inner if path.resolve() not in seen]  # symbolic links may form a cycle
        seen |= {path.resolve() for path in inner}
        folders[:] = [path.name for path in inner]
        found += [Path(parent) / name for name in names if not name.startswith(".")]
    return [path for path in sorted(found) if _is_taken(path.name, str(path), selection)]


def _is_taken(name: str, url: str, selection: Selection) -> bool:
    stem, compression = _split(name)
    if _INDEX.search(stem):
        return selection.leave_out(url, stem)
    return selection.takes(url, stem, lambda: _read_start(url, compression if compression in COMPRESSIONS else ""))


def _read_start(url: str, compression: str) -> bytes | None:
    """Return the first unpacked bytes of a file, or None if they cannot be read."""
    if "://" not in url:
        require_regular(Path(url))
    start = b""
    try:
        with _open(url) as file:
            for chunk, _ in unpack(file, name=url, compression=compression):
                start += chunk
                if len(start) >= START_BYTES:
                    break
    except (OSError, DataError):
        return None
    return start


def _match_remote(pattern: str, selection: Selection) -> tuple[bool, list[_FoundFile]]:
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
            if not _is_hidden(name.removeprefix(match))
            and _is_taken(name.rpartition("/")[2], system.unstrip_protocol(name), selection)
        }
    found = []
    for name, entry in files.items():
        version = next((str(entry[key]) for key in _VERSIONS if entry.get(key) is not None), "")
        relative = name.removeprefix(root).strip("/")
        found.append(_FoundFile(relative, root, system.unstrip_protocol(name), int(entry["size"] or 0), version))
    return bool(matches), found


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _describe(source: SourceConfig, found: _FoundFile, name: str) -> File:
    stem, compression = _split(found.url)
    kinds = [kind for kind, suffixes in SUFFIXES.items() if stem.endswith(suffixes)]
    kind = source.format if source.format != "auto" else next(iter(kinds), "")
    if not kind:
        raise DataError(
            f"`{found.url}` of the source `{source.name}` must end in {listed(_suffixes('auto'))}, but does not. Set "
            "the source's `format`, or rename the file."
        )
    if kind == "wikipedia" and found.url.lower().endswith(".7z"):
        raise DataError(
            f"`{found.url}` of the source `{source.name}` must be an unpacked file or end in {listed(COMPRESSIONS)}, "
            "but is a .7z file. Unpack the file, or get the dump as .bz2."
        )
    if compression and kind in ("parquet", "megatron"):
        raise DataError(
            f"`{found.url}` must not be compressed, but is a {compression} file. The reader of {kind} files needs "
            "random access. Unpack the file first."
        )
    size, version = found.size, found.version
    if kind == "megatron":
        status = _tokens_of(found.url)
        size, version = size + status.st_size, f"{version} {status.st_mtime_ns}"
    return File(name=name, url=found.url, format=kind, compression=compression, size=size, version=version)


def _tokens_of(url: str) -> os.stat_result:
    """Return the file status (size and modification time) of the `.bin` file next to an `.idx` file."""
    if "://" in url:
        raise DataError(
            f"`{url}` must be a local file, but is a URL. Files of the format `megatron` need random access. Copy "
            "the file to a local disk."
        )
    path = Path(url).with_suffix(".bin")
    try:
        require_regular(path)
        return path.stat()
    except OSError as error:
        raise unreadable(str(path), error) from None


def _split(name: str) -> tuple[str, str]:
    """Split a file's name into the name without its compression suffix, and this suffix, which may be empty. Both are
    in lower case.

    The page range of a dump in pieces is removed too. A dump may also end in .7z, which no reader can unpack.
    """
    lower = name.lower()
    compression = next((suffix for suffix in COMPRESSIONS if lower.endswith(suffix)), "")
    stem = _RANGE.sub("", lower.removesuffix(compression))
    packed = _RANGE.sub("", lower.removesuffix(".7z"))
    return (packed, ".7z") if lower.endswith(".7z") and packed.endswith(".xml") else (stem, compression)
