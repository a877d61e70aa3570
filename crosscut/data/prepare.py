"""Preparation of a token folder from raw text: find the text, train or load the tokenizer, encode, split, write.

The folder is created atomically, so a run that is killed leaves no incomplete token folder. An existing folder is
reused if it was made from the same text with the same settings. A folder with other content is an error.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from crosscut.config.data import DataConfig
from crosscut.config.errors import DataError
from crosscut.config.system.machine import available_cores
from crosscut.data.folders import beside, complete, is_taken, unwritable
from crosscut.data.hashing import sha256, sha256_of_all
from crosscut.data.manifest import TOKENIZER_NAME, Settings, SourceEntry, TokenManifest
from crosscut.data.mixture import Tokens, open_tokens
from crosscut.data.progress import ProgressBar, ProgressPhase
from crosscut.data.shards.reading import TokenFolder
from crosscut.data.shards.writing import TokenDocument, split_at_random, split_batch, write_shards
from crosscut.data.text.documents import TextDocument, read_sources
from crosscut.data.text.sources import TextSource, find_sources, unreadable
from crosscut.data.tokenization.document_encoder import token_dtype
from crosscut.data.tokenization.encoding import EncodedBatch, encode_documents
from crosscut.data.tokenization.tokenizer import Tokenizer

SMALL_CORPUS_BYTES = 16 << 20
"""Minimum size on disk, in bytes, for which several processes encode a corpus. For less text, starting the processes
takes longer than encoding in one process.
"""

LARGEST_WHOLE_FILE = 64 << 20
"""Maximum size on disk, in bytes, of a .txt file that the split treats as one document. The split keeps the tokens of
such a file in memory. A larger file usually holds many documents.
"""


def prepare(
    config: DataConfig, folder: Path, *, seed: int, workers: int | None = None, progress: bool = True
) -> Tokens:
    """Make the token folder of a run, or open the folder if it exists. For a mixture, open its folders.

    The path of the folder is `config.tokens`, or `folder` if `config.tokens` is empty. `seed` decides which documents
    are used for validation. `workers` is the number of encoding processes. By default, a small corpus is encoded by one
    process and a large corpus by one process per core. The number does not affect the result. If `config.text` is
    empty, the folder must already exist and is opened unchanged.

    Raises `DataError` for text that cannot be read (see `read_documents`), for an existing folder with other content or
    from other settings, and for a full disk. Also raises the errors of `TokenFolder.open`.
    """
    if config.mixture:
        return open_tokens(config, folder, verify=config.verify)
    target = Path(config.tokens) if config.tokens else folder
    if not config.text:
        if not config.tokens and not target.exists():
            raise DataError(
                "`data.text`, `data.tokens` or `data.mixture` must be given, but all three are empty. Name the text to "
                "train on."
            )
        return TokenFolder.open(target, verify=config.verify)
    sources = find_sources(config.text)
    settings = Settings.of(config, seed)
    if not is_taken(target):
        try:
            _make(config, target, sources, settings, workers=workers, progress=progress)
        except OSError as error:
            kept = "Nothing is left of the unfinished tokens."
            raise unwritable(target, error, setting="data.tokens", kept=kept) from None
        return TokenFolder.open(target, verify=False)
    _check_made_from(config, target, sources, settings)
    return TokenFolder.open(target, verify=config.verify)


def _check_made_from(config: DataConfig, target: Path, sources: Sequence[TextSource], settings: Settings) -> None:
    manifest = TokenManifest.read(target)
    differences = list(_differences(made=manifest.settings, wanted=settings))
    if settings.given_tokenizer and settings.given_tokenizer == manifest.settings.given_tokenizer:
        # A file beside the tokenizer may name this token. The hash of the tokenizer does not cover that file.
        end = Tokenizer.load(Path(config.tokenizer), setting="data.tokenizer").end_of_text
        if end != manifest.end_of_text:
            differences.append(f"documents that end with id {manifest.end_of_text} instead of {end}")
    if not _same_text(sources, manifest.sources):
        differences.insert(0, "a corpus of several sources" if manifest.corpus else "other text")
    if differences:
        raise DataError(
            f"`{target}` must hold the tokens of this text with these settings, but was made from "
            f"{', '.join(differences)}. Choose another `data.tokens`, delete the folder, or leave `data.text` empty "
            "to use the folder's tokens unchanged."
        )


def _differences(*, made: Settings, wanted: Settings) -> Iterator[str]:
    """Descriptions of the settings that differ between the existing tokens (`made`) and the run (`wanted`)."""
    for key, theirs, ours in (
        ("training.seed", made.seed, wanted.seed),
        ("data.objective", made.objective, wanted.objective),
        ("data.text_key", made.text_key, wanted.text_key),
        ("data.num_shards", made.num_shards, wanted.num_shards),
        ("data.train_to_validation", made.train_to_validation, wanted.train_to_validation),
    ):
        if theirs != ours:
            yield f"`{key}` {theirs!r} instead of {ours!r}"
    if made.objective == wanted.objective and made.sentences != wanted.sentences:
        yield "sentences that other rules found"
    if made.given_tokenizer and wanted.given_tokenizer:
        if made.given_tokenizer != wanted.given_tokenizer:
            yield "another `data.tokenizer`"
    elif made.given_tokenizer:
        yield f"a given `data.tokenizer` instead of one trained with `data.vocab_size` {wanted.trained_vocab_size}"
    elif wanted.given_tokenizer:
        yield f"a tokenizer trained with `data.vocab_size` {made.trained_vocab_size} instead of `data.tokenizer`"
    elif made.trained_vocab_size != wanted.trained_vocab_size:
        yield f"`data.vocab_size` {made.trained_vocab_size} instead of {wanted.trained_vocab_size}"


def _same_text(sources: Sequence[TextSource], entries: Sequence[SourceEntry]) -> bool:
    if [source.size for source in sources] != [entry.bytes for entry in entries]:
        return False
    # A file that was copied or moved still holds the same text. Its hash is computed only in this case.
    moved = [
        (source, entry)
        for source, entry in zip(sources, entries, strict=True)
        if (source.name, source.modified) != (entry.name, entry.modified)
    ]
    return _hash([source for source, _ in moved]) == [entry.sha256 for _, entry in moved]


def _hash(sources: Sequence[TextSource], *, shown: bool = False) -> list[str]:
    try:
        return sha256_of_all([source.path for source in sources], description="hash text" if shown else "")
    except OSError as error:
        raise unreadable(str(error.filename), error) from None


def _make(
    config: DataConfig,
    target: Path,
    sources: Sequence[TextSource],
    settings: Settings,
    *,
    workers: int | None,
    progress: bool,
) -> None:
    size, sentences = sum(source.size for source in sources), config.has_sentences
    workers = workers or (1 if size < SMALL_CORPUS_BYTES else available_cores())
    with ExitStack() as stack:
        temporary = stack.enter_context(beside(target, setting="data.tokens"))
        hashes = _hash(sources, shown=progress)
        bar = stack.enter_context(ProgressBar(shown=progress))
        tokenizer = _make_tokenizer(config, sources, temporary / TOKENIZER_NAME, bar)
        batches = encode_documents(
            read_sources(sources, text_key=config.text_key),
            temporary / TOKENIZER_NAME,
            workers=workers,
            end_of_text=tokenizer.end_of_text,
            sentences=sentences,
        )
        whole = _held_whole(sources, settings.train_to_validation)
        items = _whole_items(_counted(batches, bar.phase("Tokens", size)), whole)
        split = split_at_random(items, train_to_validation=settings.train_to_validation, seed=settings.seed)
        train, validation = write_shards(_pieces(split), temporary, num_shards=settings.num_shards, sentences=sentences)
        _check_unchanged(sources)
        TokenManifest(
            dtype=token_dtype(tokenizer.vocab_size).name,
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            tokenizer_sha256=sha256(temporary / TOKENIZER_NAME),
            settings=settings,
            sources=_entries(sources, hashes),
            train=tuple(train),
            validation=validation,
        ).write(temporary)
        _move(temporary, config, target, sources, settings)


def _entries(sources: Sequence[TextSource], hashes: Sequence[str]) -> tuple[SourceEntry, ...]:
    return tuple(
        SourceEntry(name=source.name, bytes=source.size, modified=source.modified, sha256=digest)
        for source, digest in zip(sources, hashes, strict=True)
    )


def _make_tokenizer(config: DataConfig, sources: Sequence[TextSource], path: Path, bar: ProgressBar) -> Tokenizer:
    if config.tokenizer:
        tokenizer = Tokenizer.load(Path(config.tokenizer), setting="data.tokenizer", objective=config.objective)
        tokenizer.copy_given(Path(config.tokenizer), path)
    else:
        documents = read_sources(sources, text_key=config.text_key)
        phase = bar.phase("Tokenizer", sum(source.size for source in sources))
        tokenizer = Tokenizer.train(_texts(documents, phase), vocab_size=config.vocab_size, objective=config.objective)
        tokenizer.save(path)
        phase.finish()
    return tokenizer


def _texts(documents: Iterable[TextDocument], phase: ProgressPhase) -> Iterator[str]:
    for text, _, _, position in documents:
        phase.advance(position)
        yield text


def _held_whole(sources: Sequence[TextSource], train_to_validation: int) -> frozenset[int]:
    """Return the indices of the .txt files whose pieces must all go to the same side of the split: files that are no
    larger than the corpus's share for validation and no larger than `LARGEST_WHOLE_FILE`. The pieces of a larger file,
    such as the only book of a corpus, are split like separate documents.
    """
    size = sum(source.size for source in sources)
    largest = min(size // (train_to_validation + 1), LARGEST_WHOLE_FILE)
    return frozenset(source.index for source in sources if source.format == "text" and source.size <= largest)


def _whole_items(documents: Iterable[TokenDocument], whole: frozenset[int]) -> Iterator[list[TokenDocument]]:
    """Yield the items of the split. An item consists of all pieces of a file in `whole`, or of one other document."""
    for source, pieces in groupby(documents, attrgetter("source")):
        if source in whole:
            yield list(pieces)
        else:
            yield from ([piece] for piece in pieces)


def _pieces(split: Iterable[tuple[bool, list[TokenDocument]]]) -> Iterator[tuple[bool, TokenDocument]]:
    for for_validation, item in split:
        for piece in item:
            yield for_validation, piece


def _counted(batches: Iterable[EncodedBatch], phase: ProgressPhase) -> Iterator[TokenDocument]:
    for batch in batches:
        yield from split_batch(batch)
        phase.advance(batch.position, batch.num_bytes)
    phase.finish()


def _check_unchanged(sources: Sequence[TextSource]) -> None:
    for source in sources:
        try:
            status = source.path.stat()
        except OSError as error:
            raise unreadable(source.name, error) from None
        if (status.st_size, status.st_mtime_ns) != (source.size, source.modified):
            raise DataError(f"`{source.name}` must not change while it is read, but changed. Prepare the tokens again.")


def _move(temporary: Path, config: DataConfig, target: Path, sources: Sequence[TextSource], settings: Settings) -> None:
    try:
        complete(temporary, target)
    except OSError:
        # Another process may have made the same folder in the meantime.
        if not is_taken(target):
            raise
        _check_made_from(config, target, sources, settings)
