"""Read .txt files. Each file is one document of at most `ingest.max_document_mb`."""

from collections.abc import Iterator

from crosscut.corpus.readers.charsets import marked_charset
from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.record import Item, RawText, ReaderSettings, unless_blank
from crosscut.data.text.records import Reject, broken_off, excerpt, too_long
from crosscut.data.text.sources import BrokenOffError


def read_text(file: File, reading: ReaderSettings) -> Iterator[Item]:
    """Yield the document of a file in UTF-8, or in UTF-16 or UTF-32 with a byte-order mark. The mark is removed."""
    data = read_whole(file, reading.max_bytes)
    if isinstance(data, Reject):
        yield data
        return
    charset = marked_charset(data)
    try:
        text = data.decode(charset.codec if charset else "utf-8")
    except UnicodeDecodeError as error:
        near = excerpt(data[max(error.start - 40, 0) :])
        name = "UTF-8" if charset is None else charset.codec.removesuffix("-sig").upper()
        yield Reject(f"byte {error.start}", f"not {name}", f"the file is not {name}: {error.reason}", near)
        return
    yield unless_blank(RawText(text, 1, file.size))


def read_whole(file: File, max_bytes: int) -> bytes | Reject:
    """Read all bytes of a file. Return a reject if the file is longer than `max_bytes` or damaged."""
    held, length = [], 0
    try:
        for chunk, _ in file.chunks():
            held.append(chunk)
            length += len(chunk)
            if length > max_bytes:
                return too_long("byte 0", "the file", held[0], max_bytes)
    except BrokenOffError as error:
        return broken_off(file.size, error, "the file")
    return b"".join(held)
