"""Read token files of Megatron-LM (an `.idx` file with its `.bin` file), and decode their documents to text."""

from collections.abc import Iterator
from pathlib import Path

from crosscut.config.errors import DataError
from crosscut.corpus.readers.files import File
from crosscut.corpus.readers.record import Item, RawText, ReaderSettings, unless_blank
from crosscut.corpus.tokens.tokenizer import load_tokenizer
from crosscut.data.shards.megatron import IndexedTokens
from crosscut.data.text.records import DAMAGED, Reject, too_long


def read_megatron(file: File, reading: ReaderSettings) -> Iterator[Item]:
    """Yield the texts of the documents in a pair of files. End-of-text tokens are left out.

    The tokenizer `reading.tokenizer` decodes the token ids. A document with token ids outside the tokenizer's
    vocabulary is rejected, because another tokenizer made it.
    """
    tokenizer = load_tokenizer(Path(reading.tokenizer))
    try:
        tokens = IndexedTokens.open(Path(file.url))
    except DataError as error:
        yield Reject("byte 0", DAMAGED, str(error), lost=max(file.size, 1))
        return
    for number in range(tokens.num_documents):
        ids = tokens.document(number)
        place, position = f"document {number + 1}", file.size * (number + 1) // tokens.num_documents
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
            reason = (
                f"the token ids go from {ids.min()} to {ids.max()}, but the tokenizer has ids 0 to "
                f"{tokenizer.vocab_size - 1}"
            )
            yield Reject(place, "other tokenizer", reason)
            continue
        text = tokenizer.decode(ids[ids != tokenizer.end_of_text].tolist())
        if len(text) > reading.max_bytes:
            yield too_long(place, "the text", text, reading.max_bytes)
        else:
            yield unless_blank(RawText(text, number + 1, position))
