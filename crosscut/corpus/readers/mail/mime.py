"""Split an email into its parts (RFC 2046), in time that grows in proportion to the size of the email.

Python's email package compares every line with the boundaries of all enclosing parts, and its time for some headers
grows with the square of their length. Here, the lines that may be boundaries are listed once for all parts, and the
package reads only headers of limited length.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from email.message import Message
from email.policy import compat32  # newer policies raise on broken headers

from crosscut.corpus.readers.steps import TooComplexError

MAX_NESTING = 100
"""Maximum nesting of parts."""

MAX_VALUE = 2000
"""Number of bytes of a header that are read. The beginning holds the values that are used."""

MAX_PARAMETERS = 100
"""Number of parameters of a header that are read."""

_USED = frozenset([b"content-disposition", b"content-transfer-encoding", b"content-type", b"subject"])
_HEADER = re.compile(rb"(?:From |([!-9;-~]*+):|[\t ])[^\r\n]*+(?:\r\n|\r|\n|\Z)")
_REST_OF_LINE = re.compile(rb"[^\r\n]*+(?:\r\n|\r|\n|\Z)")
_LINE_END = re.compile(rb"\r\n|\r|\n")


class Mail:
    """An email, with the places of the lines that may be boundaries."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._delimiters: dict[bytes, list[int]] | None = None

    def open(self) -> "MimePart":
        """The email as a part."""
        return self.read(0, len(self._raw), "text/plain", 0)

    def read(self, start: int, end: int, kind: str, depth: int) -> "MimePart":
        """Read the headers of a part. `kind` is the type of a part whose headers give none."""
        if depth > MAX_NESTING:
            raise TooComplexError(f"the parts of the message are nested more than {MAX_NESTING} levels deep")
        headers = Message(compat32)
        headers.set_default_type(kind)
        name, place = b"", start
        while line := _HEADER.match(self._raw, start, end):
            if line[1] is not None or line[0].startswith(b"From "):
                self._keep(headers, name, place, start)
                name, place = (line[1] or b"").lower(), line.end(1) + 1
            start = line.end()
        self._keep(headers, name, place, start)
        blank = _LINE_END.match(self._raw, start, end)
        return MimePart(self, headers, blank.end() if blank else start, end, depth)

    def _keep(self, headers: Message, name: bytes, start: int, end: int) -> None:
        """Keep a header if it is used and the first of its name. Its value lies between two places."""
        key = name.decode("ascii")
        if name not in _USED or key in headers:
            return
        value = self._raw[start : min(end, start + MAX_VALUE)].decode("ascii", "surrogateescape")
        if key != "subject":
            value = ";".join(value.split(";", MAX_PARAMETERS)[:MAX_PARAMETERS])
        headers.set_raw(key, value.lstrip(" \t").rstrip("\r\n"))

    def bytes_of(self, start: int, end: int) -> bytes:
        """Bytes between two places."""
        return self._raw[start:end]

    def split(self, boundary: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the start and the end of each part of a multipart body."""
        separators = self._places(b"--" + boundary)
        closers = self._places(b"--" + boundary + b"--")
        number = bisect_left(closers, start)
        end = min(end, closers[number]) if number < len(closers) else end
        first, last = bisect_left(separators, start), bisect_left(separators, end)
        for number in range(first, last):
            line = _REST_OF_LINE.match(self._raw, separators[number], end)
            stop = separators[number + 1] if number + 1 < last else end
            begin = line.end() if line else stop
            stop -= self._raw.endswith(b"\n", begin, stop)
            stop -= self._raw.endswith(b"\r", begin, stop)
            if begin < stop:
                yield begin, stop

    def _places(self, line: bytes) -> list[int]:
        """Places of all lines that consist of the given bytes, which begin with two hyphens, and of blanks."""
        if self._delimiters is None:
            self._delimiters = defaultdict(list)
            place = self._raw.find(b"--")
            while place >= 0:
                end = place + 2
                if not place or self._raw[place - 1] in b"\r\n":
                    found = _REST_OF_LINE.match(self._raw, place)
                    end = found.end() if found else end
                    self._delimiters[self._raw[place:end].rstrip(b"\r\n").rstrip(b" \t")].append(place)
                place = self._raw.find(b"--", end)
        return self._delimiters.get(line, [])


class MimePart:
    """A part of an email: its headers and the place of its body."""

    def __init__(self, mail: Mail, headers: Message, start: int, end: int, depth: int) -> None:
        self._mail = mail
        self._start = start
        self._end = end
        self._depth = depth
        self.headers = headers
        """Headers that say how the part is read. Each value has at most `MAX_VALUE` bytes."""
        self.kind = headers.get_content_type()
        """Media type, such as `text/plain`."""

    @property
    def has_parts(self) -> bool:
        """Whether the part consists of other parts, or of another message."""
        return self.kind.startswith(("multipart/", "message/"))

    def parts(self) -> Iterator["MimePart"]:
        """Yield the inner parts. Raises `TooComplexError` if they are nested too deeply."""
        depth = self._depth + 1
        if self.kind == "message/delivery-status":  # blocks of headers
            return
        if self.kind.startswith("message/"):
            yield self._mail.read(self._start, self._end, "text/plain", depth)
        elif (boundary := self.headers.get_boundary()) is not None:
            kind = "message/rfc822" if self.kind == "multipart/digest" else "text/plain"
            for start, end in self._mail.split(boundary.encode("utf-8", "surrogateescape"), self._start, self._end):
                yield self._mail.read(start, end, kind, depth)

    def decode(self) -> bytes:
        """Body, with its transfer encoding undone."""
        self.headers.set_payload(self._mail.bytes_of(self._start, self._end).decode("ascii", "surrogateescape"))
        payload = self.headers.get_payload(decode=True)
        return payload if isinstance(payload, bytes) else b""
