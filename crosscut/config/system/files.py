"""Safe reading of files from unknown sources, atomic writing of small files, and a check that a file can be written.

A file that a user names, or that came with a downloaded model, may be anything: a FIFO that never ends, a device, text
in another encoding, or extremely nested JSON. The functions of this module read such files. They raise `OSError` or
`ValueError` with the reason, or a `CrosscutError` with the whole message.
"""

import errno
import json
import os
import re
import secrets
import shutil
import stat
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

from crosscut.config.errors import ConfigError, CrosscutError
from crosscut.config.system.deletion import remove_made, replace_file
from crosscut.config.system.markers import closing

MOST_BYTES = 1 << 28
"""Maximum size of a JSON or TOML file. The largest real files are tokenizers of 50 MB."""

MOST_BYTES_OF_LINE = 1 << 26
"""Maximum length, in bytes, of a line that `read_lines` accepts."""

_MOST_PARTS = 64
"""Maximum number of dotted parts of a key in a TOML file. The deepest key of a run or a corpus has four."""
_LONG_KEY = re.compile(rf"(?:(?<![\w-])[\w-]++[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}")
_NOT_KEYS = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*+"'''  # strings of one and of several lines
    r"""|'''.*?'''|'[^'\n]*+'|\#[^\n]*+""",
    re.DOTALL,
)
"""Strings, which may be parts of a key, and comments of a TOML file."""

_ENDLESS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
"""Types of files whose reading may never end, by the bits of `st_mode`."""


class NotRegularError(OSError):
    """Error for a named pipe, a socket or a device in place of a file. Reading such a file may block or never end, and
    its content cannot be read a second time.
    """


def require_regular(path: Path) -> None:
    """Raise `OSError` unless `path` is a regular file: `IsADirectoryError` for a folder, and `NotRegularError` for a
    file whose reading may never end.
    """
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind := _ENDLESS.get(stat.S_IFMT(mode)):
        raise NotRegularError(errno.EINVAL, f"It is {kind}, not a regular file", str(path))


def read_text(path: Path) -> str:
    """Read a text file in UTF-8, with its line ends unchanged. Raises `OSError` if the file cannot be read or is not a
    regular file, and `UnicodeDecodeError` if it is not UTF-8.
    """
    require_regular(path)
    return path.read_bytes().decode("utf-8")


def read_lines(path: Path) -> Iterator[str]:
    r"""Yield the lines of a text file in UTF-8, without a byte-order mark and without the line ends \n and \r\n.

    Unlike `str.splitlines`, this function does not split at U+2028, U+0085 and other characters that JSON and prose may
    contain within a line. Raises the errors of `read_text`, and `OSError` if a line is longer than 64 MiB.
    """
    require_regular(path)
    offset = 0
    with path.open("rb") as file:
        while line := file.readline(MOST_BYTES_OF_LINE + 1):
            if len(line) > MOST_BYTES_OF_LINE:
                raise OSError(errno.EFBIG, f"A line is longer than {MOST_BYTES_OF_LINE >> 20:,} MiB", str(path))
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                error.start += offset
                error.end += offset
                raise
            yield text.removeprefix("\ufeff" if not offset else "").removesuffix("\n").removesuffix("\r")
            offset += len(line)


def read_small(path: Path) -> str:
    """Read a text file whose content is parsed as a whole. Raises the errors of `read_text`, and `OSError` if the file
    is larger than 256 MiB.
    """
    require_regular(path)
    if path.stat().st_size > MOST_BYTES:
        raise too_large(str(path), MOST_BYTES)
    return read_text(path)


def too_large(name: str, most_bytes: int) -> OSError:
    """Return the error for a file that is larger than the `most_bytes` that its reader accepts."""
    return OSError(errno.EFBIG, f"It is larger than {most_bytes >> 20:,} MiB", name)


def read_json(
    path: Path,
    error: type[CrosscutError] = ConfigError,
    *,
    invalid: type[CrosscutError] | None = None,
    remedy: str = "",
) -> dict[str, Any]:
    """Read the JSON object in a file. Raises `error` if the file cannot be read, and `invalid` (by default `error`) if
    the file does not hold a JSON object. `remedy` is the end of the message.
    """
    invalid = invalid or error
    remedy = remedy and f" {remedy}"
    try:
        table = parse_json(read_small(path))
    except OSError as reason:
        raise error(f"`{path}` must be a readable file, but is not: {reason.strerror}.{remedy}") from None
    except ValueError as reason:
        raise invalid(f"`{path}` must be valid JSON, but is not: {reason}.{remedy}") from None
    if not isinstance(table, dict):
        raise invalid(f"`{path}` must be a JSON object, but is a {type(table).__name__}.{remedy}")
    return table


def parse_json(content: str | bytes) -> Any:
    """Parse JSON. Raises `ValueError` if the content is not JSON, and also if it is nested too deeply (Python's own
    reader raises `RecursionError`) or if a string holds a lone surrogate, which cannot be written or encoded as tokens.
    """
    try:
        value = json.loads(content)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it holds a lone surrogate, which is not a character") from None
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises `ValueError` if the text is not TOML, is nested too deeply, or holds a number that Python
    cannot convert.
    """
    if _LONG_KEY.search(
        _NOT_KEYS.sub("s", text)
    ):  # Python's reader takes time in proportion to the square of the parts
        raise ValueError(f"a key has more than {_MOST_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: to a temporary file first, which is flushed to the disk and then renamed. After a crash,
    the path holds either the old content or the new content, never a part. A link at `path` is replaced; its target is
    not changed. Raises `OSError` with the path if the file cannot be written.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    is_made = False
    try:
        with temporary.open("xb") as file:
            is_made = True
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replace_file(temporary, path)
    except OSError as error:  # on a full disk, an incomplete file would only take up space
        if is_made:
            with suppress(OSError):
                remove_made(temporary)
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_json(path: Path, value: object, *, indent: int | None = 2) -> None:
    """Write a value as JSON to a file, in the way of `write_whole`."""
    write_whole(path, json.dumps(value, indent=indent) + "\n")


def open_own(path: Path, mode: str) -> IO[Any]:
    """Open a file in a folder of Crosscut for writing, with `mode` "w", "wb", "a" or "ab". Text is in UTF-8.

    A file that somebody has linked to this name is not opened: the target may be any file of the user. Raises `OSError`
    for a symbolic link, for a file with several hard links, and for anything but a regular file.
    """

    def opener(name: str, flags: int) -> int:  # noqa: ARG001 - the same path
        descriptor = open_descriptor(path, flags & ~os.O_TRUNC)
        if "w" in mode:
            os.ftruncate(descriptor, 0)
        return descriptor

    return open(path, mode, encoding=None if "b" in mode else "utf-8", opener=opener)


def open_descriptor(path: Path, flags: int) -> int:
    """Open a file in a folder of Crosscut, with the flags of `os.open`, and return its descriptor. Raises the errors of
    `open_own`.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # a FIFO does not block
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _linked(path) from None
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return descriptor
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        raise _linked(path)
    raise NotRegularError(errno.EINVAL, "It is not a regular file", str(path))


def _linked(path: Path) -> OSError:
    return OSError(errno.ELOOP, "It is a link, and Crosscut does not write through links", str(path))


def copy_file(source: Path, path: Path) -> None:
    """Copy a file to a folder of Crosscut. Raises the errors of `open_own`."""
    with source.open("rb") as file, open_own(path, "wb") as copy:
        shutil.copyfileobj(file, copy)


def flush_to_disk(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk, so that they survive a power failure."""
    with closing(os.open(path, os.O_RDONLY)) as descriptor:
        os.fsync(descriptor)


def require_writable_file(setting: str, path: Path) -> None:
    """Raise `ConfigError` unless a file can be written at `path`. The message names `setting`. Call this function
    before the work starts. The check leaves no file behind.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"`{setting}` must name a file, but `{path}` is a folder. Name a file in the folder.")
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise ConfigError(
            f"`{setting}` must name a file that can be written, but is `{path}`: {error.strerror}. Create its folder, "
            "or name another file."
        ) from None
