r"""Read emails: files with one message, and mbox files with several messages.

In an mbox file, each message begins with a line like `From jo@example.org Sat Nov 21 22:44:22 2026`. The document is
the plain text of the message, or the text of its HTML if the message has no plain text. Attachments are left out. The
title is the subject.
"""

import email.errors
import email.header
import re
from collections.abc import Iterator
from email.message import Message
from functools import partial

from crosscut.corpus.readers.charsets import charset_in_page, decode
from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.html import extract
from crosscut.corpus.readers.mail.mime import Mail, MimePart
from crosscut.corpus.readers.record import Item, RawText, ReaderSettings, unless_blank, within_budget
from crosscut.corpus.readers.steps import TOO_COMPLEX, TooComplexError
from crosscut.data.text.json_text import encodable
from crosscut.data.text.records import Reject, broken_off, excerpt, too_long
from crosscut.data.text.sources import BrokenOffError

_START = re.compile(
    rb"From \S+ +(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [^\n]*\n"
)
_START_BYTES = 1000
"""Maximum number of bytes in the line that begins a message, including the blank line before it."""

_QUOTED_FROM = re.compile(rb"^>(>*From )", re.MULTILINE)


def read_mail(file: File, reading: ReaderSettings) -> Iterator[Item]:
    """Yield the documents of a mail file. Each message is a record."""
    try:
        for number, (message, position) in enumerate(_split(file, reading.max_bytes), start=1):
            if len(message) > reading.max_bytes:
                yield too_long(f"message {number}", "the message", message, reading.max_bytes)
            elif message:
                read = partial(_read_message, message, number, position)
                yield within_budget(file.watch, f"message {number}", message, read)
    except BrokenOffError as error:
        yield broken_off(file.size, error, "a message")


def _split(file: File, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield the messages of a file, each with the number of bytes on disk that were read so far.

    Only the first `max_bytes` + 1 bytes of a longer message are kept.
    """
    held = bytearray()
    started = False
    searched = position = 0
    first = b""

    def message(end: int) -> bytes:
        return first or bytes(held[:end])

    for chunk, position in file.chunks():
        held += chunk
        while start := _find_start(held, searched, is_first=not (started or first)):
            if started or start.start():
                yield message(start.start()), position
            del held[: start.end()]
            started, searched, first = True, 0, b""
        searched = max(len(held) - _START_BYTES, 0)
        if searched > max_bytes:  # the message is too long, so its rest is only searched for the next message
            first = first or bytes(held[: max_bytes + 1])
            del held[:searched]
            searched = 0
    if started or held or first:
        yield message(len(held)), position


def _find_start(held: bytearray, place: int, *, is_first: bool) -> re.Match[bytes] | None:
    """Find the line that begins the next message. It is the first line of the file, or it follows a blank line."""
    while (place := held.find(b"From ", place)) >= 0:
        before = held[max(place - 3, 0) : place]
        if before.endswith((b"\n\n", b"\n\r\n")) or (is_first and not place):
            start = _START.match(held, place)
            if start:
                return start
        place += 1
    return None


def _read_message(raw: bytes, number: int, position: int) -> Item:
    place = f"message {number}"
    raw = _QUOTED_FROM.sub(rb"\1", raw).lstrip(b"\r\n") if b"\n>From " in raw else raw.lstrip(b"\r\n")
    texts = _MessageTexts()
    try:
        message = Mail(raw).open()
        texts.take(message)
    except TooComplexError as error:
        return Reject(place, TOO_COMPLEX, str(error), excerpt(raw))
    if texts.undecodable and not texts.found:
        return Reject(place, "charset", "no charset fits the bytes of the message", excerpt(raw))
    text = "\n\n".join(texts.found)
    note = "charset" if texts.other_charset else ""
    document = RawText(text, number, position, title=_subject(message.headers), note=note)
    return unless_blank(document._replace(num_replaced=texts.num_replaced))


class _MessageTexts:
    """Collector of the texts of a message, part by part."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.other_charset = False
        self.num_replaced = 0
        self.undecodable = False

    def take(self, part: MimePart) -> None:
        if part.headers.get_content_disposition() == "attachment":
            return
        if part.kind == "multipart/alternative":
            self._take_one(part)
        elif part.has_parts:
            for inner in part.parts():
                self.take(inner)
        elif part.kind in ("text/plain", "text/html"):
            self._take_text(part)

    def _take_one(self, versions: MimePart) -> None:
        """Take the first version of a text that is not blank. Plain text comes before HTML."""
        before = len(self.found)
        for is_plain in (True, False):
            for part in versions.parts():
                if (part.kind == "text/plain") is is_plain and len(self.found) == before:
                    self.take(part)

    def _take_text(self, part: MimePart) -> None:
        data = part.decode()
        is_page = part.kind == "text/html"
        decoded = decode(data, part.headers.get_content_charset(""), charset_in_page(data) if is_page else "")
        if decoded is None:
            self.undecodable = True
            return
        self.other_charset |= decoded.is_other
        self.num_replaced += decoded.num_replaced
        text = extract(decoded.text, main_content=False)[1] if is_page else decoded.text
        if text and not text.isspace():
            self.found.append(text)


def _subject(message: Message) -> str:
    """Return the subject in one line. A subject that cannot be decoded is returned unchanged."""
    raw = message.get("Subject", "")
    try:
        subject = "".join(_decode_word(*word) for word in email.header.decode_header(raw))
    except (ValueError, email.errors.HeaderParseError):
        subject = str(raw)
    subject = " ".join(subject.split())
    return subject if encodable(subject) else subject.encode("utf-8", "replace").decode()


def _decode_word(word: str | bytes, charset: str | None) -> str:
    if isinstance(word, str):
        return word
    decoded = decode(word, "" if charset in (None, "unknown-8bit") else charset)
    return decoded.text if decoded else word.decode("cp1252", "replace")
