"""Mistakes in a config file and on the command line, which are collected and reported together."""

import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from crosscut.config.errors import ConfigError
from crosscut.config.loading.toml_lines import key_lines

_NAME = re.compile(r"`(\w+)`|\b(\w+(?:\.\w+)+)")
_COMMAND_LINE = 1 << 62
"""Line number for mistakes on the command line, which are sorted after all mistakes in the file."""


class Mistakes:
    """Mistakes in one config. The message of a mistake in a file starts with the file and the line number.

    `keys` are the names of all keys that the config may have. `file` and `text` are the name and the content of the
    file. A config without a file is a table, which has no line numbers.
    """

    def __init__(self, keys: Iterable[str], *, file: Path | None = None, text: str = "") -> None:
        self._keys = frozenset(keys)
        self._file, self._text = file, text
        self._overridden: set[str] = set()
        self._doubtful: set[str] = set()
        self._noted: dict[str, tuple[int, ConfigError]] = {}

    @cached_property
    def _lines(self) -> dict[str, int]:
        return key_lines(self._text)

    def override(self, name: str) -> None:
        """Record that the command line sets the key `name`, so that a message does not refer to a line of the file."""
        self._overridden.add(name)

    def doubt(self, names: Iterable[str]) -> None:
        """Record keys and sections whose value is not the one that the user meant, because of a mistake such as a
        misspelt key. From then on, `note` ignores errors that name these keys, because they are only a consequence of
        the mistake.
        """
        self._doubtful.update(names)

    def is_doubtful(self, name: str) -> bool:
        """Whether `doubt` has recorded the key or section `name`."""
        return name in self._doubtful

    def note(self, error: ConfigError, place: str = "") -> None:
        """Record a mistake. `place` is the name of the wrong key or section, if the message does not begin with this
        name.
        """
        names = self.named_in(str(error))
        if self._doubtful.isdisjoint(names):
            line = self._line([place, *names] if place else names)
            self._noted.setdefault(self._placed(str(error), line), (line or _COMMAND_LINE, error))

    def placed(self, message: str) -> str:
        """Put the file and the line number of the wrong key in front of the message, if the file contains this key."""
        return self._placed(message, self._line(self.named_in(message)))

    def named_in(self, message: str) -> list[str]:
        """Names of the keys that a message contains, in order."""
        found = (match[1] or match[2] for match in _NAME.finditer(message))
        return list(dict.fromkeys(name for name in found if name in self._keys))

    def raise_all(self) -> None:
        """Raise a `ConfigError` with all mistakes, sorted by line. A single mistake keeps the class of its error. Do
        nothing if there are no mistakes.
        """
        told = sorted(self._noted, key=lambda message: self._noted[message][0])
        if len(told) == 1:
            raise type(self._noted[told[0]][1])(told[0])
        if told:
            raise ConfigError("\n  ".join([f"{len(told)} settings are wrong:", *told]))

    def _placed(self, message: str, line: int | None) -> str:
        return f"{self._file}:{line}: {message}" if line else message

    def _line(self, names: list[str]) -> int | None:
        """Return the line number of the first of `names` that the file contains. If the file contains none of them,
        return the line number of the section of the first name. None if the file does not contain this section either,
        or if the command line sets the name that was found or one before it.
        """
        if self._file is None:
            return None
        for name in (*names, *(name.rpartition(".")[0] for name in names[:1])):
            if name in self._overridden:
                return None
            if name in self._lines:
                return self._lines[name]
        return None
