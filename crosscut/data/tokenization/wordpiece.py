"""WordPiece, the tokenizer of BERT: training on a corpus, and reading of BERT's older file `vocab.txt`.

A normalizer first cleans the text: control characters are dropped, blanks are put around Chinese characters, and an
uncased tokenizer also converts letters to lower case and removes accents. The text is then split at blanks and
punctuation. Each word is spelled by the longest entries that match; an entry that continues a word begins with `##`.
The tokenizers library does the work.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from crosscut.config.checks import shown
from crosscut.config.errors import ConfigError, DataError
from crosscut.config.published.folders import TOKENIZER_CONFIG_FILE
from crosscut.config.system.files import read_json, read_small, require_regular
from crosscut.data.hashing import sha256

if TYPE_CHECKING:
    import tokenizers

VOCABULARY_SUFFIX = ".txt"
"""Suffix of a file that lists a vocabulary, one entry per line. The line numbers, counted from 0, are the ids."""

PADDING, UNKNOWN, BEGIN, SEPARATOR, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Special tokens of BERT. They are the first entries of a trained vocabulary, in this order."""

CONTINUATION = "##"
"""Prefix of an entry that continues a word."""

MOST_CHARACTERS = 1000
"""Maximum number of different characters in a trained vocabulary, as in BERT's vocabulary. Words with rarer characters
become `[UNK]`."""

_CHARACTERS_AT_ONCE = 1 << 12
"""Maximum number of characters in a training text that repeats a single word."""


def train_wordpiece(texts: Iterable[str], *, vocab_size: int) -> tokenizers.Tokenizer:
    """Train an uncased WordPiece of at most `vocab_size` entries. The special tokens of BERT are the first entries.

    A character takes up to two entries, because it may begin some words and continue others. Characters take at most
    half of the vocabulary. The same texts always give the same vocabulary.
    """
    from tokenizers import trainers

    inner = _new({}, is_uncased=True)
    words = _count_words(texts, inner)
    most = min(MOST_CHARACTERS, (vocab_size - len(SPECIAL)) // 4)
    alphabet, continuing = _alphabet(words, inner, most)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        # The trainer numbers the first entries in the order of this list, and other characters in the order of a hash.
        special_tokens=[*SPECIAL, *alphabet, *(f"{CONTINUATION}{character}" for character in continuing)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    inner.train_from_iterator(_repeated(words), trainer)
    trained = _new(inner.get_vocab(), is_uncased=True)
    trained.add_special_tokens(list(SPECIAL))
    return _with_template(trained)


def _count_words(texts: Iterable[str], inner: tokenizers.Tokenizer) -> Counter[str]:
    """Count the normalized words. Words are separated by blanks, and include their punctuation."""
    assert inner.normalizer is not None
    raw: Counter[str] = Counter()
    for text in texts:
        raw.update(text.split())
    words: Counter[str] = Counter()
    for word, count in raw.items():
        for part in inner.normalizer.normalize_str(word).split():
            words[part] += count
    return words


def _alphabet(words: Mapping[str, int], inner: tokenizers.Tokenizer, most: int) -> tuple[list[str], list[str]]:
    """Return the most frequent characters (at most `most` of them), and those of these characters that continue a word.
    Both lists are in ascending order.
    """
    assert inner.pre_tokenizer is not None
    counts: Counter[str] = Counter()
    continuing: set[str] = set()
    for word, count in words.items():
        for part, _ in inner.pre_tokenizer.pre_tokenize_str(word):
            continuing.update(part[1:])
            for character in part:
                counts[character] += count
    kept = sorted(counts, key=lambda character: (-counts[character], character))[:most]
    return sorted(kept), sorted(continuing.intersection(kept))


def _repeated(words: Mapping[str, int]) -> Iterator[str]:
    """Yield texts in which each word occurs as often as it was counted."""
    for word, count in words.items():
        at_once = max(1, _CHARACTERS_AT_ONCE // (len(word) + 1))
        for start in range(0, count, at_once):
            yield f"{word} " * min(at_once, count - start)


def read_vocabulary(path: Path, *, setting: str = "") -> tokenizers.Tokenizer:
    """Make a WordPiece from BERT's `vocab.txt`. The tokenizer is uncased unless `do_lower_case` in a
    `tokenizer_config.json` in the same folder is false, as in `transformers`.

    Raises `DataError` if the file cannot be read, names an entry twice, or lacks a special token of BERT. `setting` is
    the option that holds the path, for messages. Raises `ConfigError` if `do_lower_case` is not true or false.
    """
    remedy = f"Check `{setting}`." if setting else "Copy the file again."
    try:
        entries = read_small(path).removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is not UTF-8")
        raise DataError(f"`{path}` must be a readable vocabulary, but is not: {reason}. {remedy}") from None
    vocabulary = {entry.removesuffix("\r"): number for number, entry in enumerate(entries)}
    missing = [token for token in SPECIAL if token not in vocabulary]
    if missing or len(vocabulary) < len(entries):
        reason = f"it lacks `{missing[0]}`" if missing else "it lists an entry twice"
        raise DataError(
            f"`{path}` must be the vocabulary of a BERT, with one entry per line and the entries "
            f"{', '.join(SPECIAL)}, but {reason}. {remedy}"
        )
    inner = _new(vocabulary, is_uncased=is_uncased(path))
    inner.add_special_tokens(list(SPECIAL))
    return _with_template(inner)


def is_uncased(path: Path) -> bool:
    """Whether the tokenizer of the `vocab.txt` at `path` converts texts to lower case. Raises `ConfigError` if
    `do_lower_case` is not true or false.
    """
    file = path.with_name(TOKENIZER_CONFIG_FILE)
    answer = read_json(file).get("do_lower_case", True) if file.is_file() else True
    if not isinstance(answer, bool):
        raise ConfigError(
            f"`do_lower_case` in `{file}` must be true or false, but is {shown(answer)}. Correct the file."
        )
    return answer


def digest_of_given(path: Path) -> str:
    """SHA-256 of a given tokenizer, in hexadecimal. The hash covers the file (`tokenizer.json` or `vocab.txt`) and, for
    a `vocab.txt`, whether the tokenizer is uncased. Raises `OSError` if the file is not a regular file or cannot be
    read.
    """
    if path.suffix != VOCABULARY_SUFFIX:
        return sha256(path)
    require_regular(path)
    return hashlib.sha256(path.read_bytes() + (b"uncased" if is_uncased(path) else b"cased")).hexdigest()


def _new(vocabulary: dict[str, int], *, is_uncased: bool) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    model = models.WordPiece(vocabulary, unk_token=UNKNOWN, continuing_subword_prefix=CONTINUATION)
    inner = Tokenizer(model)
    inner.normalizer = normalizers.BertNormalizer(lowercase=is_uncased)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(prefix=CONTINUATION)
    return inner


def _with_template(inner: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Add a template to the tokenizer, so that other programs put a text, or a pair of texts, between BERT's special
    tokens.
    """
    from tokenizers import processors

    ids = inner.get_vocab()
    inner.post_processor = processors.BertProcessing((SEPARATOR, ids[SEPARATOR]), (BEGIN, ids[BEGIN]))
    return inner
