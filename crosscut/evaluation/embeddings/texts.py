"""Texts to embed: read lines, encode them to token ids, and check the settings files that a sentence-transformers model
has beside its weights.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from crosscut.config import ConfigError, DataError
from crosscut.config.checks import require_at_least
from crosscut.config.model import require_tensor_axis
from crosscut.config.system import files
from crosscut.config.system.files import json_or_none, read_json
from crosscut.data.text.lines import lines_of
from crosscut.data.tokenization.inner import read_inner
from crosscut.data.tokenization.long_texts import batches
from crosscut.evaluation.ranks import Machinery
from crosscut.pretrained import ModelSource

LENGTH_FILE = "sentence_bert_config.json"
MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
"""Files of a sentence-transformers model beside its `config.json`."""

_MODULES = ("Transformer", "Pooling", "Normalize")


def read_lines(file: Path | None) -> list[str]:
    """Read the lines of a UTF-8 file, or of standard input if `file` is None. Raises `DataError` if the text cannot be
    read, or has no lines.
    """
    try:
        lines = lines_of(sys.stdin.buffer.read().decode()) if file is None else list(files.read_lines(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        name = "Standard input" if file is None else f"`{file}`"
        raise DataError(f"{name} must be readable text, but is not: {reason}. Give UTF-8 text.") from None
    if lines and not lines[-1]:
        lines.pop()
    if not lines:
        name = "Standard input" if file is None else f"`{file}`"
        raise DataError(f"{name} must hold one text per line, but is empty. Add a text.")
    return lines


def require_embeddings(source: ModelSource, tensor: int) -> None:
    """Raise `ConfigError` or `LayoutError` if this encoder cannot embed texts on `tensor` ranks."""
    require_tensor_axis(source.model, tensor)
    if source.is_published:
        _require_recipe(source.tokenizer.parent)


def encode_texts(
    place: str, read: Callable[[], Sequence[str]], on: Machinery, max_tokens: int, tell: Callable[[str], None]
) -> tuple[ModelSource, list[list[int]]]:
    """Find the model at `place`, and use its tokenizer to encode the texts that `read` returns. Returns the model and
    the ids of each text, with the tokens that the tokenizer puts around a text. `tell` is called with messages, and the
    errors are the same as those of `embed`.
    """
    source = on.find(place)
    if source.model.is_causal:
        raise ConfigError(
            f"`{place}` must hold an encoder, but holds a model that predicts the next token ({source.model.family}). "
            "Choose a BERT or a model made from one, such as all-MiniLM-L6-v2."
        )
    require_embeddings(source, on.layout.tensor)
    length = longest_text(source, max_tokens)
    inner = read_inner(source.tokenizer)
    inner.no_padding()
    inner.enable_truncation(length)
    texts = (text.strip() for text in read())
    ids, num_cut = [], 0
    for number, one in enumerate(chain.from_iterable(map(inner.encode_batch, batches(texts, "Text"))), 1):
        if not one.ids:
            raise DataError(f"Text {number} must have at least one token, but has none. Remove the text.")
        if max(one.ids) >= source.model.vocab_size:
            raise DataError(
                f"`{source.tokenizer}` must be the model's tokenizer, with ids below {source.model.vocab_size:,}, but "
                f"text {number} has the id {max(one.ids):,}. Restore the tokenizer."
            )
        ids.append(one.ids)
        num_cut += bool(one.overflowing)
    if source.left_out:
        tell(f"Not loaded, because embeddings do not need them: {', '.join(source.left_out)}.")
    if num_cut:
        tell(f"{num_cut} of {len(ids)} texts are longer than the maximum and were cut.")
    return source, ids


def longest_text(source: ModelSource, asked: int = 0) -> int:
    """Return the maximum number of tokens of a text to embed. `asked` is the maximum that the user requested. If
    `asked` is 0, the maximum is `max_seq_length` in the model's `sentence_bert_config.json` or, without this setting,
    the model's maximum sequence length. Raises `ConfigError` if `asked` exceeds the model's maximum sequence length, or
    if `max_seq_length` is not a whole number of at least 1.
    """
    most = source.model.max_sequence_length
    require_at_least("max_tokens", asked, 0, maximum=most)
    path = source.tokenizer.with_name(LENGTH_FILE)
    if asked or not path.is_file():
        return asked or most
    named = read_json(path).get("max_seq_length")
    if named is not None and not (type(named) is int and named >= 1):
        raise ConfigError(
            f"`max_seq_length` in `{path}` must be a whole number of at least 1, but is {named!r}. Correct the file."
        )
    return min(named or most, most)


def _require_recipe(folder: Path) -> None:
    """Raise `ConfigError` if the files of a sentence-transformers model require steps other than taking the mean of the
    tokens and scaling it to length 1.
    """
    modules = folder / MODULES_FILE
    if modules.is_file():
        kinds = [str(one.get("type")) if isinstance(one, dict) else str(one) for one in _listed(modules)]
        for kind in kinds:
            if kind.rpartition(".")[2] not in _MODULES:
                raise ConfigError(
                    f"`type` in `{modules}` must be one of {', '.join(_MODULES)}, but is {kind!r}. Choose a model "
                    "without this module."
                )
    pooling = folder / POOLING_FILE
    if pooling.is_file():
        table = read_json(pooling)
        on = sorted(key for key, value in table.items() if key.startswith("pooling_mode_") and value is True)
        if on != ["pooling_mode_mean_tokens"]:
            raise ConfigError(
                f"`{pooling}` must ask for the mean of the tokens (`pooling_mode_mean_tokens`), but asks for "
                f"{', '.join(on) or 'nothing'}. Choose a model with mean pooling."
            )


def _listed(path: Path) -> list[object]:
    """Return the list of modules in a JSON file."""
    found = json_or_none(path)
    if not isinstance(found, list):
        raise ConfigError(f"`{path}` must be a JSON list of modules, but is not. Download the file again.")
    return found
