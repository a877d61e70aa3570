"""Read a `tokenizer.json`, or BERT's `vocab.txt`, with the tokenizers library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from crosscut.config.errors import DataError
from crosscut.config.system.files import read_small
from crosscut.data.tokenization.wordpiece import VOCABULARY_SUFFIX, read_vocabulary

if TYPE_CHECKING:
    import tokenizers


def read_inner(path: Path, *, setting: str = "data.tokenizer") -> tokenizers.Tokenizer:
    """Read a `tokenizer.json`, or a `vocab.txt` (any file that ends in `.txt`), as an object of the tokenizers library.
    Raises `DataError` if the file is invalid. `setting` is the name of the option that holds the path, for messages.
    """
    import tokenizers

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
    raise DataError(f"`{path}` must be a {kind}, but is not: {reason}. Check `{setting}`.")
