"""Task `text`: the loss of a model on a user's own text, per token, per byte and per document."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from crosscut.config.errors import DataError
from crosscut.data import read_documents
from crosscut.data.text.documents import TextDocument
from crosscut.data.text.sources import find_sources
from crosscut.evaluation.perplexity import bits_per_byte
from crosscut.evaluation.scoring import Ids, WindowScores
from crosscut.evaluation.task import Encoder, Figures, as_ids, exponential, hashed
from crosscut.evaluation.windows import Window, sliding_windows

MOST_CHARACTERS = 1 << 28
"""Maximum number of characters in a document."""


class Text:
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
        self.windows: list[Window] = []
        self._documents: list[dict[str, Any]] = []
        self._num_blank = 0
        for source, record, text in whole_documents(patterns, text_key):
            if not text or text.isspace():
                self._num_blank += 1
                continue
            ids = tokenizer.encode(text)
            self.windows += sliding_windows(len(self.texts), len(ids) + 1, window=window, overlap=overlap)
            self.texts.append(as_ids([start, *ids]))
            size = {"tokens": len(ids), "bytes": len(text.encode("utf-8"))}
            self._documents.append({"source": source, "record": record, **size})
        self.protocol: dict[str, Any] = {"window": window, "stride": overlap, "first_id": start}
        self.data = [hashed(source.name, source.path) for source in find_sources(patterns, setting="evaluation.text")]

    def figures(self, scores: WindowScores) -> Figures:
        """Return the figures of all documents together, and of each document."""
        losses = np.zeros(len(self.texts))
        np.add.at(losses, [window.text for window in self.windows], scores.losses)
        documents = [
            {**document, **_figures(float(loss), document["tokens"], document["bytes"])}
            for document, loss in zip(self._documents, losses, strict=True)
        ]
        tokens, size = (sum(document[name] for document in self._documents) for name in ("tokens", "bytes"))
        return Figures(
            figures=_figures(float(losses.sum()), tokens, size),
            counts={
                "documents": len(documents),
                "tokens": tokens,
                "bytes": size,
                "windows": len(self.windows),
                "documents_blank": self._num_blank,
            },
            documents=documents,
        )


def _figures(loss: float, num_tokens: int, num_bytes: int) -> dict[str, float]:
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
