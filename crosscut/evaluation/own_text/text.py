"""Task `text`: the loss of a model on a user's own text, per token, per byte and per document."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np

from crosscut.config.errors import DataError
from crosscut.data import read_documents
from crosscut.data.text.documents import TextDocument
from crosscut.data.text.sources import find_sources
from crosscut.evaluation.perplexity import bits_per_byte
from crosscut.evaluation.scoring import Ids, WindowScores
from crosscut.evaluation.task import Encoder, Figures, Setting, as_ids, exponential, hashed
from crosscut.evaluation.windows import Window, sliding_windows

MOST_CHARACTERS = 1 << 28
"""Maximum number of characters in a document."""


class OwnDocuments:
    """Documents of a user's files, except blank ones, and the windows over their tokens."""

    def __init__(self, patterns: Sequence[str], text_key: str) -> None:
        self.windows: list[Window] = []
        self.data = [hashed(source.name, source.path) for source in find_sources(patterns, setting="evaluation.text")]
        self._patterns, self._text_key = patterns, text_key
        self._places: list[tuple[str, int]] = []
        """Source and record of each document."""
        self._sizes: list[Counter[str]] = []
        """Numbers of tokens and the like of each document."""
        self._document_of: list[int] = []
        """Index of each window's document."""
        self._num_blank = 0

    def encoded(self, tokenizer: Encoder) -> Iterator[tuple[str, list[int]]]:
        """Yield the text and the ids of each document. Call `add` for each of them."""
        for source, record, text in whole_documents(self._patterns, self._text_key):
            if ids := tokenizer.encode(text) if text and not text.isspace() else []:
                self._places.append((source, record))
                yield text, ids
            else:
                self._num_blank += 1

    def add(self, windows: Iterable[Window], **sizes: int) -> None:
        """Add the windows of the next document, and its numbers of tokens and the like."""
        self._sizes.append(Counter(sizes))
        before = len(self.windows)
        self.windows += windows
        self._document_of += [len(self._sizes) - 1] * (len(self.windows) - before)

    def figures(self, scores: WindowScores, of: Callable[[float, int, Counter[str]], dict[str, float]]) -> Figures:
        """Return the figures of all documents together, and of each document. `of` computes figures from a loss, a
        number of hits and the sizes.
        """
        losses, hits = np.zeros(len(self._sizes)), np.zeros(len(self._sizes), dtype=np.int64)
        np.add.at(losses, self._document_of, scores.losses)
        np.add.at(hits, self._document_of, scores.hits)
        documents: list[dict[str, Setting]] = [
            {"source": source, "record": record, **sizes, **of(float(loss), int(hit), sizes)}
            for (source, record), sizes, loss, hit in zip(self._places, self._sizes, losses, hits, strict=True)
        ]
        total: Counter[str] = Counter()
        for sizes in self._sizes:
            total.update(sizes)
        counts = {"documents": len(documents), **total, "windows": len(self.windows)}
        return Figures(
            figures=of(float(losses.sum()), int(hits.sum()), total),
            counts=counts | {"documents_blank": self._num_blank},
            documents=documents,
        )


class OwnText:
    """Task that measures the perplexity of documents. Windows overlap in the same way as in `WikiText103`.

    A document is a .txt file, a line of a .jsonl file or a row of a .parquet file. The id `start` is put in front of
    each document, so that all tokens of the document are scored. Blank documents are skipped and counted. Models with
    different vocabularies can be compared by their bits per byte of the text in UTF-8. Raises `DataError` for files
    that cannot be read.
    """

    name = "text"

    def __init__(
        self,
        patterns: Sequence[str],
        tokenizer: Encoder,
        *,
        start: int,
        window: int,
        overlap: int,
        text_key: str,
    ) -> None:
        self.texts: list[Ids] = []
        self._documents = documents = OwnDocuments(patterns, text_key)
        for text, ids in documents.encoded(tokenizer):
            windows = sliding_windows(len(self.texts), len(ids) + 1, window=window, overlap=overlap)
            documents.add(windows, tokens=len(ids), bytes=len(text.encode("utf-8")))
            self.texts.append(as_ids([start, *ids]))
        self.windows, self.data = documents.windows, documents.data
        self.protocol: dict[str, Setting] = {"window": window, "stride": overlap, "first_id": start}

    def figures(self, scores: WindowScores) -> Figures:
        """Return the figures of all documents together, and of each document."""
        return self._documents.figures(scores, _figures)


def _figures(loss: float, _hits: int, sizes: Counter[str]) -> dict[str, float]:
    num_tokens, num_bytes = sizes["tokens"], sizes["bytes"]
    return {
        "perplexity": exponential(loss / num_tokens),
        "bits_per_byte": bits_per_byte(loss, num_bytes),
        "loss_per_token": loss / num_tokens,
    }


def whole_documents(patterns: Sequence[str], text_key: str) -> Iterator[tuple[str, int, str]]:
    """Yield the source, record and text of each document. A .txt file is read in pieces, which are joined to one
    document.

    Raises `DataError` for a document of more than `MOST_CHARACTERS` characters. The tokens of a document are held as a
    whole, so its length must be limited.
    """

    def place(document: TextDocument) -> tuple[int, int]:
        return document.source.index, 1 if document.source.format == "text" else document.record

    documents = read_documents(patterns, text_key=text_key, setting="evaluation.text", blank=True)
    for (_, record), pieces in groupby(documents, place):
        texts, source, size = [], "", 0
        for piece in pieces:
            texts.append(piece.text)
            source, size = piece.source.name, size + len(piece.text)
            if size > MOST_CHARACTERS:
                raise DataError(
                    f"A document of `evaluation.text` must have at most {MOST_CHARACTERS:,} characters, but `{source}` "
                    f"(record {record:,}) has more. Split this document into several documents."
                )
        yield source, record, "".join(texts)
