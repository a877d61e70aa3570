"""The stage `packing`: write the tokens of all parts as a token folder, which `crosscut train` reads (paper, 4.1.3).

Documents are split at random into training and validation. The weight of a source is the number of times that each of
its training documents is written. With weight 2, each document is written twice. With weight 0.25, a quarter of the
documents is written once; the seed and the id of a document determine whether it is written. Weights apply after the
split, so validation documents are never in training and never repeated. All pieces of one document go to the same side
of the split.

The task writes the token folder's files into the stage's folder. `publish` then links the files into place, all at
once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, repeat
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from crosscut.config.corpora import CorpusConfig, TokensConfig
from crosscut.config.data import Objective
from crosscut.config.errors import DamagedDataError, DataError
from crosscut.config.system.deletion import remove_file, why_kept
from crosscut.config.system.markers import MARKER_FILE
from crosscut.corpus.documents import Part, read_table
from crosscut.corpus.execution.stages import (
    CorpusStage,
    Counts,
    Output,
    PlannedStage,
    StageTask,
    TaskRecord,
    read_records,
)
from crosscut.corpus.parts import find_parts
from crosscut.corpus.tokens.encoding import INDEX_SUFFIX, SENTENCES_SUFFIX, TOKENS, TOKENS_SUFFIX
from crosscut.data.folders import beside, exchange, is_taken, unwritable
from crosscut.data.hashing import sha256, sha256_of_all, sha256_of_each
from crosscut.data.manifest import MANIFEST_NAME, TOKENIZER_NAME, Settings, SourceEntry, TokenManifest
from crosscut.data.progress import ProgressBar, ProgressPhase
from crosscut.data.shards.array_file import ArrayFile
from crosscut.data.shards.megatron import write_index
from crosscut.data.shards.writing import INDEX_DTYPE, TokenDocument, split_at_random, write_shards
from crosscut.data.text.sources import unreadable
from crosscut.data.tokenization.document_encoder import token_dtype
from crosscut.data.tokenization.tokenizer import Tokenizer

PACKING = "packing"
"""Name of the stage that this module implements."""

_INDEX = ".idx"


class TooFewDocuments(DataError):  # noqa: N818 - the name says what happened
    """Error that is raised if the filters leave too few documents for training and validation."""


def packing_stage(config: CorpusConfig, tokenizer: Path) -> CorpusStage:
    """Make the stage `packing`, whose single task packs all parts. `tokenizer` is the `tokenizer.json` that an earlier
    stage wrote.
    """
    return PlannedStage(name=PACKING, version=1, plan=partial(_plan, config, tokenizer))


def _plan(config: CorpusConfig, tokenizer: Path, work: Path) -> Sequence[StageTask]:
    parts = [part for part, _ in find_parts(work)]
    tokens = [part.file(TOKENS, TOKENS_SUFFIX) for part in parts]
    settings = config.tokens
    return [
        StageTask(
            name=PACKING,
            function=partial(pack, parts, tokenizer, config),
            inputs=(
                *tokens,
                *(part.file(TOKENS, INDEX_SUFFIX) for part in parts),
                *(part.file(TOKENS, SENTENCES_SUFFIX) for part in parts if settings.has_sentences),
                tokenizer,
            ),
            settings={
                "weights": _weights(config),
                "seed": config.seed,
                "num_shards": settings.num_shards,
                "train_to_validation": settings.train_to_validation,
                "megatron": settings.megatron,
                "given": bool(settings.tokenizer),
                "vocab_size": settings.vocab_size,
                **objective_setting(settings),
            },
            size=sum(path.stat().st_size for path in tokens),
        )
    ]


def objective_setting(settings: TokensConfig) -> dict[str, str]:
    """Return the setting `objective` for a task whose result depends on the training objective. The returned
    dictionary is empty for the default objective, so that tasks of versions that lacked this setting stay valid.
    """
    return {"objective": settings.objective.value} if settings.objective is Objective.MASKED else {}


def _weights(config: CorpusConfig) -> dict[str, float]:
    return {source.name: source.weight for source in config.sources}


def pack(parts: Sequence[Part], tokenizer: Path, config: CorpusConfig, output: Output) -> Counts:
    """Run the stage's task: write the files of a token folder, with one document in memory at a time.

    Raises `TooFewDocuments` if fewer than two documents are left, and `DataError` if the weights leave no training
    document.
    """
    _check_enough(parts)
    settings, weights, seed = config.tokens, _weights(config), config.seed
    folder = output.path("")
    shutil.copyfile(tokenizer, folder / TOKENIZER_NAME)
    loaded = Tokenizer.load(tokenizer)
    dtype = token_dtype(loaded.vocab_size)
    packed = _WeightedReader(weights, seed, settings.has_sentences)
    split = split_at_random(
        packed.read(parts, dtype.itemsize), train_to_validation=settings.train_to_validation, seed=seed
    )
    train, validation = write_shards(
        packed.blend(split), folder, num_shards=settings.num_shards, sentences=settings.has_sentences
    )
    if not any(entry.documents for entry in train):
        raise DataError(
            "`sources.weight` must keep some training documents, but keeps none. Set a higher weight for a source."
        )
    TokenManifest(
        dtype=dtype.name,
        vocab_size=loaded.vocab_size,
        end_of_text=loaded.end_of_text,
        tokenizer_sha256=(digest := sha256(tokenizer)),
        settings=_settings(settings, seed, digest),
        sources=tuple(SourceEntry(name=name) for name in packed.files),
        train=tuple(train),
        validation=validation,
        corpus=weights,
    ).write(folder)
    shards = (*train, validation)
    for entry in shards if settings.megatron else ():
        _index_for_megatron(folder, entry.name, dtype)
    counts = {entry.name: {"documents": entry.documents, "tokens": entry.tokens} for entry in shards}
    return {"shards": counts, "sources": packed.counts}


def _settings(settings: TokensConfig, seed: int, digest: str) -> Settings:
    return Settings(
        seed=seed,
        text_key="",
        num_shards=settings.num_shards,
        train_to_validation=settings.train_to_validation,
        trained_vocab_size=0 if settings.tokenizer else settings.vocab_size,
        given_tokenizer=digest if settings.tokenizer else "",
        objective=settings.objective.value,
    )


def _check_enough(parts: Iterable[Part]) -> None:
    num_documents = 0
    for part in parts:
        num_documents += len(np.unique(read_table(part.file(TOKENS, INDEX_SUFFIX))["row"].to_numpy()))
        if num_documents > 1:
            return
    raise TooFewDocuments(
        f"The corpus must have at least 2 documents, one for training and one for validation, but its filters keep "
        f"{num_documents}. The report shows why the other documents were dropped. Relax the filters or add `sources`."
    )


def _index_for_megatron(folder: Path, shard: str, dtype: np.dtype[np.uint16 | np.uint32]) -> None:
    ends = np.fromfile(folder / f"{shard}.index", dtype=INDEX_DTYPE)["end"]
    sizes = np.diff(ends, prepend=np.uint64(0))
    # The format has no unsigned four-byte type. Token ids are far below the maximum of the signed type.
    write_index(folder / f"{shard}{_INDEX}", sizes, np.int32 if dtype.itemsize == 4 else dtype)


class _PackedDocument(NamedTuple):
    """A document with all of its pieces."""

    source: str
    id: str
    pieces: list[TokenDocument]


@dataclass
class _WeightedReader:
    """Reader of the documents in the parts. It repeats documents according to the weights of their sources, and counts
    the documents.
    """

    weights: Mapping[str, float]
    seed: int
    sentences: bool = False
    """Whether the parts have an index of sentences."""

    files: dict[str, int] = field(default_factory=dict)
    """Index of each file in the manifest, keyed by the name `source/file`."""

    counts: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    """Numbers of written documents and tokens, including copies, by source, and then by `train` or `validation`."""

    def read(self, parts: Iterable[Part], width: int) -> Iterator[_PackedDocument]:
        """Read the documents of the parts, in order. A token id has `width` bytes."""
        for part in parts:
            table = read_table(part.file(TOKENS, INDEX_SUFFIX))
            path = part.file(TOKENS, TOKENS_SUFFIX)
            data = ArrayFile(path, np.uint8, path.stat().st_size)
            columns = (table[name].to_pylist() for name in ("row", "tokens", "file", "record"))
            rows = zip(*columns, self._sentences(part, len(table)), strict=True)
            end = 0
            for _, pieces in groupby(rows, key=itemgetter(0)):
                texts = []
                for _, num_tokens, file, record, sentences in pieces:
                    start, end = end, end + num_tokens * width
                    source = self.files.setdefault(file, len(self.files))
                    texts.append(TokenDocument(data[start:end].data, num_tokens, source, record, sentences))
                yield _PackedDocument(file.partition("/")[0], f"{file}#{record}", texts)

    def _sentences(self, part: Part, num_texts: int) -> Iterator[npt.NDArray[np.uint32] | None]:
        """Yield the ends of the sentences of each text of a part, or None for each text if there is no index of
        sentences.
        """
        if not self.sentences:
            return repeat(None, num_texts)
        ends = read_table(part.file(TOKENS, SENTENCES_SUFFIX))["ends"]
        return (row.values.to_numpy() for row in ends)

    def blend(self, split: Iterable[tuple[bool, _PackedDocument]]) -> Iterator[tuple[bool, TokenDocument]]:
        """Repeat the texts of each training document as often as the weight of its source says.

        Yields pairs: whether the text is for validation, and the text.
        """
        for for_validation, document in split:
            copies = 1 if for_validation else self._copies(document)
            count = self.counts.setdefault(document.source, {}).setdefault(
                "validation" if for_validation else "train", {"documents": 0, "tokens": 0}
            )
            count["documents"] += copies
            count["tokens"] += copies * sum(piece.num_tokens for piece in document.pieces)
            for _ in range(copies):
                for piece in document.pieces:
                    yield for_validation, piece

    def _copies(self, document: _PackedDocument) -> int:
        whole, part = divmod(self.weights[document.source], 1)
        if not part:
            return int(whole)
        digest = hashlib.blake2b(f"{self.seed} {document.id}".encode("utf-8", "surrogatepass"), digest_size=8)
        return int(whole) + (int.from_bytes(digest.digest(), "little") < part * 2**64)


def publish(work: Path, target: Path, bar: ProgressBar) -> None:
    """Replace the token folder at `target` with the token folder that the stage `packing` wrote, all at once.

    All files are checked by their hashes first. If the folder at `target` is already complete and equal, it is not
    replaced. The files are hard links to the stage's files, or copies if the disk does not support links. Raises
    `DataError` if `target` holds anything other than token shards of a corpus, if a file of the stage is damaged, or if
    the files cannot be written.
    """
    folder = work / PACKING
    (record,) = read_records(work, PACKING)
    names = _published(record)
    _check_whole(folder, record, bar.phase("check", sum(record.sizes.values())))
    if is_taken(target) and _is_same(folder, target, names):
        return
    check_replaceable(target, work)
    try:
        written = _written_names(target, work).__contains__
        if left := why_kept(target.absolute().parent, target.name, only=written):
            raise DataError(f"`{target}` must be replaced, because the tokens have changed. {left} Then start again.")
        with beside(target, setting="folder", root=target.absolute().parent) as temporary:
            for name, source in names.items():
                _link(folder / source, temporary / name)
            exchange(temporary, target, written)
    except OSError as error:
        raise unwritable(target, error, setting="folder", kept="Finished tasks are kept.") from None


def _published(record: TaskRecord) -> dict[str, str]:
    """Map the name of each file in the published folder to the name of the stage's file with the same content."""
    names = {name: name for name in record.files}
    for name in record.files:
        if name.endswith(_INDEX):
            shard = name.removesuffix(_INDEX)
            names[f"{shard}.bin"] = f"{shard}.tokens"  # the `.bin` file of Megatron-LM has the same bytes
    return names


def _check_whole(folder: Path, record: TaskRecord, phase: ProgressPhase) -> None:
    """Raise `DamagedDataError` if a file of the stage has changed since it was written.

    A published file may be a link to the stage's file, so a program that changes the published file also changes the
    stage's file.
    """
    names = sorted(record.files)
    damaged, position = [], 0
    try:
        for name, digest in zip(names, sha256_of_each([folder / name for name in names]), strict=True):
            damaged += [name] if digest != record.files[name] else []
            position += record.sizes[name]
            phase.advance(position, record.sizes[name])
    except OSError as error:
        raise unreadable(str(error.filename), error) from None
    phase.finish()
    if damaged:
        for name in damaged:
            remove_file(folder / name)  # the task then counts as not done
        raise DamagedDataError(
            f"`{folder / damaged[0]}` must be unchanged since it was written, but is damaged. Start "
            "`crosscut prepare` again to rewrite the shards."
        )


def _is_same(folder: Path, target: Path, names: Mapping[str, str]) -> bool:
    """Whether the folder at `target` is complete and equal to the folder that would be published.

    `names` maps the names of the published files to the names of the stage's files. Only copies are compared, because a
    link is the same file.
    """
    if not target.is_dir() or _names_in(target) != set(names):
        return False
    pairs = [(target / name, folder / source) for name, source in names.items()]
    copies = [pair for pair in pairs if not pair[0].samefile(pair[1])]
    hashes = sha256_of_all([path for pair in copies for path in pair])
    return hashes[::2] == hashes[1::2]


def check_replaceable(target: Path, work: Path) -> None:
    """Raise `DataError` if `target` exists and holds anything other than token shards of a corpus.

    The names of the shards come from the manifest. If the manifest is damaged or missing, they come from the records of
    the stage `packing` in `work`.
    """
    if not is_taken(target):
        return
    if not (target.is_dir() and _names_in(target) <= _written_names(target, work)):
        raise DataError(
            f"`{target}` must not exist, or must hold only token shards of a corpus, but holds other files. Choose "
            f"another `folder`, or move the files away."
        )


def _written_names(target: Path, work: Path) -> set[str]:
    """Return the names of the files that Crosscut writes to the token folder `target`."""
    names = {name for record in read_records(work, PACKING) for name in _published(record)}
    try:
        manifest = TokenManifest.read(target)
    except DataError:
        return names
    if manifest.corpus:
        suffixes = (".tokens", ".index", ".sentences", ".bin", _INDEX)
        names |= {f"{entry.name}{suffix}" for entry in (*manifest.train, manifest.validation) for suffix in suffixes}
        names |= {MANIFEST_NAME, TOKENIZER_NAME}
    return names


def _names_in(target: Path) -> set[str]:
    return {path.name for path in target.iterdir()} - {MARKER_FILE}


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
