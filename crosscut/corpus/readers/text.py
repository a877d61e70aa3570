"""Read .txt files. Each file is one document of at most `ingest.max_document_mb`."""

from collections.abc import Iterator

from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.record import Item, RawText, ReaderSettings, unless_blank
from crosscut.data.text.records import Reject, broken_off, excerpt, too_long
from crosscut.data.text.sources import BrokenOffError


def read_text(file: File, reading: ReaderSettings) -> Iterator[Item]:
    """Yield the document of a UTF-8 file. A byte-order mark is removed."""
    data = read_whole(file, reading.max_bytes)
    if isinstance(data, Reject):
        yield data
        return
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        near = excerpt(data[max(error.start - 40, 0) :])
        yield Reject(f"byte {error.start}", "not UTF-8", f"the file is not UTF-8: {error.reason}", near)
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
