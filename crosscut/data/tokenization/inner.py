"""Read a `tokenizer.json`, or BERT's `vocab.txt`, with the tokenizers library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from crosscut.config.errors import DataError
from crosscut.config.system.files import read_small
from crosscut.data.tokenization.wordpiece import VOCABULARY_SUFFIX, read_vocabulary

if TYPE_CHECKING:
    import tokenizers


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
