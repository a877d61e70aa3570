"""The stage `tokens`: encode the remaining documents as token ids. Passages that were cut from documents are left out.

    work/tokens/000002-0001.tokens         token ids of all texts, with an end-of-text token after each text
    work/tokens/000002-0001.index.arrow    row, piece, tokens, file, record: length and origin of each text

    work/tokens/000002-0001.sentences.arrow    ends: for masked language modelling, the ends of each text's sentences

If passages are cut from a document, each remaining piece becomes a separate text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from crosscut.config.published.folders import TOKENIZER_CONFIG_FILE
from crosscut.corpus.batches import batches
from crosscut.corpus.documents import Document, Drop, Lineage, Part, count_bytes, write_drops, write_rows, write_table
from crosscut.corpus.execution.stages import CorpusStage, Counts, Output, Yields
from crosscut.corpus.filters.judging import count_drops
from crosscut.corpus.leakage.passages import Span, pieces
from crosscut.corpus.leakage.removal import files_of_cuts, read_cuts
from crosscut.corpus.parts import PartStage
from crosscut.corpus.tokens.tokenizer import load_tokenizer
from crosscut.data.text.sentences import sentence_rules
from crosscut.data.tokenization.encoding import BATCH_CHARACTERS, encode

TOKENS = "tokens"
"""Name of the stage that this module implements."""

INDEX = pa.schema(
    [
        ("row", pa.uint32()),
        ("piece", pa.uint32()),
        ("tokens", pa.uint64()),
        ("file", pa.dictionary(pa.int32(), pa.string())),
        ("record", pa.uint64()),
    ]
)
"""Columns of the index, with one row per text in the order of the token ids. `piece` counts from 0 within a document,
`file` is `source/file` as in document ids, and `tokens` includes the end-of-text token."""


SENTENCES = pa.schema([("ends", pa.list_(pa.uint32()))])
"""Column of the index of sentences, with one row per text. The ends are in tokens from the start of the text."""


TOKENS_SUFFIX, INDEX_SUFFIX, SENTENCES_SUFFIX = ".tokens", ".index.arrow", ".sentences.arrow"
"""Suffixes of a part's files with the token ids, and with the columns `INDEX` and `SENTENCES`."""


def tokens_stage(*, tokenizer: Path, min_tokens: int, lineage: Lineage, sentences: bool = False) -> CorpusStage:
    """Make the stage `tokens`. If `leakage` is in the lineage, the passages that `leakage` marked are cut out.

    `tokenizer` is the `tokenizer.json` that an earlier stage wrote. Pieces of a cut document with fewer than
    `min_tokens` tokens, not counting the end-of-text token, are left out. `sentences` asks for an index of sentences.
    """
    return PartStage(
        name=TOKENS,
        version=1,
        function=encode_part,
        arguments=(tokenizer, min_tokens, sentences),
        settings={"min_tokens": min_tokens, "sentences": sentence_rules() if sentences else ""},
        inputs_of=partial(_inputs_of, tokenizer),
        lineage=lineage,
        yields=Yields.DROPS,
    )


def _inputs_of(tokenizer: Path, part: Part) -> tuple[Path, ...]:
    settings = tokenizer.with_name(TOKENIZER_CONFIG_FILE)  # a trained tokenizer does not have this file
    return (*files_of_cuts(part), tokenizer, *([settings] if settings.is_file() else []))


class _TextPiece(NamedTuple):
    """A text to encode: a whole document or a piece of a document."""

    document: Document
    piece: int
    text: str
    is_cut: bool


@dataclass
class _WrittenTexts:
    """Counts and index rows of the texts that were written for a part."""

    rows: list[tuple[int, int, int, str, int]] = field(default_factory=list)
    short_pieces: int = 0
    num_bytes: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    sentences: list[npt.NDArray[np.uint32]] = field(default_factory=list)

    def add(self, one: _TextPiece, length: int) -> None:
        """Count a text of `length` tokens."""
        name, _, record = one.document.id.rpartition("#")
        source = name.partition("/")[0]
        self.rows.append((one.document.row, one.piece, length, name, int(record)))
        self.num_bytes += count_bytes(one.text)
        self.tokens[source] = self.tokens.get(source, 0) + length


def encode_part(part: Part, tokenizer: Path, min_tokens: int, sentences: bool, output: Output) -> Counts:
    """Run a task: encode the documents of a part as token ids, in batches of texts.

    If all pieces of a document are too short, the rule `cut to pieces` drops the document.
    """
    documents = list(part.documents())
    cuts = read_cuts(part)
    encoder = load_tokenizer(tokenizer)
    written = _WrittenTexts()
    with output.path(f"{part.name}{TOKENS_SUFFIX}").open("wb") as file:
        for batch in batches(_texts(documents, cuts), lambda one: len(one.text), BATCH_CHARACTERS):
            ids, lengths, ends = encode(encoder, [one.text for one in batch], sentences=sentences)
            end = 0
            for number, (one, length) in enumerate(zip(batch, lengths.tolist(), strict=True)):
                start, end = end, end + length
                if one.is_cut and length - 1 < min_tokens:
                    written.short_pieces += 1
                else:
                    file.write(ids[start:end].data)
                    written.add(one, length)
                    written.sentences += ends[number : number + 1] if ends is not None else []
    write_rows(output.path(f"{part.name}{INDEX_SUFFIX}"), written.rows, INDEX)
    if sentences:
        write_table(output.path(f"{part.name}{SENTENCES_SUFFIX}"), {"ends": written.sentences}, SENTENCES)
    kept = {row for row, *_ in written.rows}
    drops = [
        Drop(document.row, "cut to pieces", f"{number} cut{'' if number == 1 else 's'}")
        for document in documents
        if document.row not in kept and (number := len(cuts[document.row]))
    ]
    write_drops(output, part.name, drops)
    return {
        **count_drops(documents, drops),
        "bytes_out": written.num_bytes,
        "texts": len(written.rows),
        "short_pieces": written.short_pieces,
        "tokens": written.tokens,
    }


def _texts(documents: Sequence[Document], cuts: dict[int, list[Span]]) -> Iterator[_TextPiece]:
    for document in documents:
        spans = cuts.get(document.row)
        for number, text in enumerate(pieces(document.text, spans) if spans else [document.text]):
            yield _TextPiece(document, number, text, bool(spans))
