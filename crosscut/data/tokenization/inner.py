"""Read a `tokenizer.json`, or BERT's `vocab.txt`, with the tokenizers library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from crosscut.config.checks import shown
from crosscut.config.errors import ConfigError, DataError
from crosscut.config.published.folders import TOKENIZER_CONFIG_FILE
from crosscut.config.system.files import read_json, read_small
from crosscut.data.tokenization.wordpiece import VOCABULARY_SUFFIX, read_vocabulary

if TYPE_CHECKING:
    import tokenizers


SPLIT_SPECIAL_TOKENS = "split_special_tokens"
_SLOW_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model")
"""Files from which transformers can make a `tokenizer.json`."""


def read_inner(path: Path, *, setting: str = "") -> tokenizers.Tokenizer:
    """Read a `tokenizer.json`, or a `vocab.txt` (any file that ends in `.txt`), as an object of the tokenizers library.
    Raises `DataError` if the file is invalid. `setting` is the name of the option that holds the path, for messages.
    It is empty if the path follows from the folder of a model or of tokens.
    """
    import tokenizers

    if not setting:
        require_tokenizer(path)

    if path.suffix == VOCABULARY_SUFFIX:
        return read_vocabulary(path, setting=setting)

    kind = "`tokenizer.json` of the tokenizers library"
    try:
        return tokenizers.Tokenizer.from_str(read_small(path))
    except (OSError, UnicodeDecodeError) as error:
        kind, reason = "readable `tokenizer.json`", str(getattr(error, "strerror", "it is not UTF-8"))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises plain Exception; a panic of Rust is no Exception
        reason = str(error)
    remedy = f"Check `{setting}`." if setting else "Copy the file again."
    raise DataError(f"`{path}` must be a {kind}, but is not: {reason}. {remedy}")


def splits_special_tokens(path: Path) -> bool:
    """Whether names of special tokens in every text are plain text, as `split_special_tokens` says in the
    `tokenizer_config.json` beside the `tokenizer.json` at `path`. Raises `ConfigError` if the file is invalid.
    """
    file, key = path.with_name(TOKENIZER_CONFIG_FILE), SPLIT_SPECIAL_TOKENS
    value = read_json(file).get(key) if file.is_file() else None
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"`{key}` in `{file}` must be true or false, but is {shown(value)}. Correct the file.")
    return bool(value)


def require_tokenizer(path: Path) -> None:
    """Raise `DataError` if the tokenizer in the folder of a model or of tokens is missing."""
    if path.exists():
        return
    folder, remedy = path.parent, f"Copy `{path.name}` from the place where the folder comes from."
    if any((folder / name).is_file() for name in _SLOW_FILES):
        remedy = (
            "Make the file from the folder's other files with transformers: "
            f'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}").'
        )
    raise DataError(f"`{path}` must exist, but is missing. The folder must hold the tokenizer of the model. {remedy}")
