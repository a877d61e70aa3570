"""Select the files of a folder that have the format of the source.

A file whose name has a suffix of the format is selected. In three formats, a file without such a suffix is judged by
its first bytes: an HTML page may have no suffix, and an email or a text may have any suffix. All other files are left
out and counted by suffix.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Literal

START_BYTES = 4096
"""Number of bytes at the beginning of a file that are judged."""

NO_SUFFIX = "no suffix"
"""Name under which files without a suffix are counted."""

_SUFFIX = re.compile(r"\.[a-z0-9]{1,8}")

_HTML = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?(?:<!--(?>.*?-->)\s*+)*+<(?:!doctype\s+html|html|head|body|title|meta|link|"
    rb"script|style|frameset|iframe|h[1-6]|div|p|a|b|br|font|table|center)[\s/>]",
    re.IGNORECASE | re.DOTALL,
)
_MAIL = re.compile(
    rb"^(?:from|to|cc|date|subject|received|return-path|delivered-to|message-id|sender|reply-to|mime-version|"
    rb"content-type|newsgroups)[ \t]*:",
    re.IGNORECASE | re.MULTILINE,
)
_MAIL_LINE = re.compile(rb"\s*(?:From |>From |[!-9;-~]+[ \t]*:)")
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def is_binary(start: bytes) -> bool:
    """Whether data is not text, because its first bytes contain control characters."""
    return bool(_CONTROL.search(start, 0, START_BYTES))


def is_html(start: bytes) -> bool:
    """Whether data begins with a tag of an HTML page. Comments and an XML declaration may stand before the tag."""
    return bool(_HTML.match(start))


def is_mail(start: bytes) -> bool:
    """Whether data begins like an email or an mbox file: the first line is a header line, and one of the next lines is
    a common email header.
    """
    return bool(_MAIL_LINE.match(start)) and bool(start.startswith(b"From ") or _MAIL.search(start))


JUDGED_BY_CONTENT: dict[str, Callable[[bytes], bool]] = {
    "text": lambda start: not is_binary(start),
    "html": is_html,
    "mail": is_mail,
}
"""Formats whose files may lack the suffix of the format, with the test for the first bytes of such a file."""


class Selection:
    """Selection of the files that a source takes from folders."""

    def __init__(self, kind: str, suffixes: Sequence[str]) -> None:
        self._kind = kind
        self._suffixes = tuple(suffixes)
        self._left_out: dict[str, str] = {}

    @property
    def left_out(self) -> dict[str, int]:
        """Number of files that were left out, by suffix in alphabetical order."""
        return dict(sorted(Counter(self._left_out.values()).items()))

    def takes(self, path: str, stem: str, read_start: Callable[[], bytes | None]) -> bool:
        """Decide whether a file belongs to the source, and count the file if not.

        `stem` is the name of the file in lower case without a compression suffix. `read_start` returns the first bytes
        of the file, or None if the file cannot be read. An unreadable file counts as a file of the source, because
        its reader then reports the reason.
        """
        if stem.endswith(self._suffixes):
            return True
        suffix = PurePosixPath(stem).suffix
        if self._kind in JUDGED_BY_CONTENT and (self._kind != "html" or not _SUFFIX.fullmatch(suffix)):
            start = read_start()
            if start is None or (start and JUDGED_BY_CONTENT[self._kind](start)):
                return True
        return self.leave_out(path, stem)

    def leave_out(self, path: str, stem: str) -> Literal[False]:
        """Count a file that does not belong to the source."""
        suffix = PurePosixPath(stem).suffix
        self._left_out[path] = suffix if _SUFFIX.fullmatch(suffix) else NO_SUFFIX
        return False
