"""Files that are needed to prompt a published model: tokenizer, end-of-text ids and chat template.

A run that starts from a published model keeps a copy of these files. The run can therefore generate text, be evaluated
and be exported even if the model's folder is moved.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

from crosscut.config import ConfigError, RunConfig, write_json
from crosscut.config.conventions import INITIAL_FOLDER, LABELS_FILE, SPECIAL_FILE
from crosscut.config.published.folders import (
    GENERATION_FILE,
    MODEL_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Published,
    begin_id,
    end_ids,
    read_published,
)
from crosscut.config.published.sentences import MODULES_FILE
from crosscut.config.published.tokenizers import check_tokenizer
from crosscut.config.system.deletion import make_folder, remove_folder
from crosscut.config.system.files import copy_file, json_or_none, read_json
from crosscut.data import Tokenizer
from crosscut.data.hashing import sha256
from crosscut.data.manifest import MANIFEST_NAME
from crosscut.data.tokenization.decoder_rows import Special
from crosscut.data.tokenization.end_of_text import end_named_by_settings
from crosscut.data.tokenization.inner import read_inner
from crosscut.pretrained.adapter_settings import CONFIG_NAME

TEMPLATE_FILE = "chat_template.jinja"
COMPANIONS = (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE, TEMPLATE_FILE, GENERATION_FILE)
"""Names of the optional files that belong to a tokenizer and are stored in the tokenizer's folder."""
KEPT = (*COMPANIONS, MODULES_FILE)
"""Names of the optional files that a run keeps. The list of modules tells that the run started from a sentence encoder;
the files that it names are not kept."""


def read_checked(folder: Path, adapter: str | Path = "") -> Published:
    """Read the configuration of a published model, and check the files beside its weights. The lines for the user are
    in `notices`. `adapter` is the folder of the adapter that is merged into the model.

    Raises `ConfigError` for a value that Crosscut does not support, and for an adapter in the model's folder that is
    not `adapter`.
    """
    beside = folder / CONFIG_NAME
    if beside.is_file() and not (adapter and Path(adapter).resolve() == folder.resolve()):
        raise ConfigError(
            f"`{beside}` must not be beside `{MODEL_FILE}`, but is. `transformers` merges such an adapter into the "
            f"model. Give `--adapter {folder}` to merge it, or move it to another folder to leave it out."
        )
    published = read_published(folder)
    return replace(published, notices=(*published.notices, *check_tokenizer(folder)))


def notices_of(folder: Path) -> tuple[str, ...]:
    """Lines for the user about the files beside a published model's weights, such as a line that names unknown keys.
    Raises the errors of `read_checked`.
    """
    return read_checked(folder).notices


def keep_companions(published: Path, folder: Path) -> None:
    """Copy the config, the tokenizer and the tokenizer's optional files (`KEPT`) of a published model to
    `folder`. An existing `folder` is replaced. Raises `ConfigError` if Crosscut did not write it.
    """
    names = (MODEL_FILE, TOKENIZER_FILE, *KEPT)
    if left := remove_folder(folder.parent, folder.name, only=lambda name: name in names):
        raise ConfigError(f"The run must be able to write `{folder}`. {left}")
    make_folder(folder.parent, folder.name)
    for name in names:
        if (published / name).is_file():
            copy_file(published / name, folder / name)


def keep_stop(folder: Path, stop: int) -> None:
    """Add a token id to the ids that end a text of the model in `folder`, in its `generation_config.json`."""
    spoken = speech(folder / TOKENIZER_FILE, [folder])
    content = with_ends(folder / GENERATION_FILE, (*spoken.ends, stop))
    write_json(folder / GENERATION_FILE, content)


def with_ends(path: Path, ends: Sequence[int]) -> dict[str, object]:
    """Content of the `generation_config.json` at `path`, with `ends` as the ids that end a text. `transformers` reads
    these ids from this file and, only if there is no such file, from `config.json`.
    """
    table = read_json(path) if path.is_file() else {"bos_token_id": begin_id(path.parent)}
    return {**table, "eos_token_id": ends[0] if len(ends) == 1 else list(ends)}


def keep_labels(folder: Path, labels: Sequence[str]) -> None:
    """Write the names of a run's classes, in the order of their logits, to the folder of the run."""
    write_json(folder / LABELS_FILE, labels, indent=None, ensure_ascii=False)


def labels_of(folders: Iterable[Path], num_classes: int) -> tuple[str, ...]:
    """Return the names of a run's classes, from the first folder that has a file of names. Returns no names if no
    folder has such a file. Raises `ConfigError` for a file that does not hold one name for each class.
    """
    path = next((folder / LABELS_FILE for folder in folders if (folder / LABELS_FILE).is_file()), None)
    if path is None or not num_classes:
        return ()
    labels = json_or_none(path)
    is_list = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    if not is_list or len(set(labels)) != len(labels) or len(labels) != num_classes:
        raise ConfigError(
            f"`{path}` must hold a JSON list of {num_classes} different names, one for each class, but does not. "
            "Restore or remove the file."
        )
    return tuple(labels)


def keep_special(folder: Path, special: Special) -> None:
    """Write the token ids around the texts of a decoder that solves a task to the folder of its run."""
    write_json(folder / SPECIAL_FILE, special._asdict(), indent=None)


def special_of(folders: Iterable[Path]) -> Special | None:
    """Return the token ids around the texts of a decoder that solves a task, from the first folder that has a file of
    them. None if no folder has such a file. Raises `ConfigError` for a file that does not hold these ids.
    """
    path = next((folder / SPECIAL_FILE for folder in folders if (folder / SPECIAL_FILE).is_file()), None)
    if path is None:
        return None
    table = json_or_none(path)
    begin, end = (table.get("begin"), table.get("end")) if isinstance(table, dict) else (None, None)
    if not _is_id(end) or not (begin is None or _is_id(begin)):
        raise ConfigError(
            f"`{path}` must hold the ids `begin` (or null) and `end` of the tokens around a text, but does not. "
            "Restore the file."
        )
    return Special(begin, end)


def _is_id(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


class TextEnds:
    """Token ids that begin and end texts, as methods of what holds them."""

    end_of_text: int
    stops: tuple[int, ...]
    begin_of_text: int | None

    @property
    def ends(self) -> tuple[int, ...]:
        """All token ids that end a text."""
        return self.end_of_text, *self.stops

    @property
    def special(self) -> Special:
        """Token ids around a text."""
        return Special(self.begin_of_text, self.end_of_text)


@dataclass(frozen=True)
class Speech(TextEnds):
    """Tokenizer and special token ids for prompting a model."""

    tokenizer: Path
    """Path of the `tokenizer.json`. The chat template, if any, is in the same folder."""
    end_of_text: int
    stops: tuple[int, ...]
    """Additional token ids that end the generated text."""
    begin_of_text: int | None
    """Token id that the tokenizer's template puts at the start of a text. None if the template starts a text with no
    special token, or with a token that also ends a text.
    """


def speech(tokenizer: Path, models: Iterable[Path]) -> Speech:
    """Find the special token ids for a tokenizer. A model's own files may name further ids. They are read from the
    first folder in `models` that has this tokenizer.

    If the tokenizer is in a folder of token shards, the shards' manifest gives the end-of-text id. If the model's
    folder gives a different end-of-text id, that id becomes an additional stop. Raises `DataError` for a tokenizer that
    cannot be read, and `ConfigError` for a model that Crosscut does not support.
    """
    model = next((folder for folder in models if _is_same_file(folder / TOKENIZER_FILE, tokenizer)), None)
    kept = tokenizer if model is None else model / TOKENIZER_FILE
    tokens_say = tokenizer.with_name(MANIFEST_NAME).is_file()
    told = dict.fromkeys((tokenizer if tokens_say else kept, kept))
    stops = () if model is None else tuple(end for ends in end_ids(model).values() for end in ends)
    end, *others = dict.fromkeys((*(Tokenizer.load(file).end_of_text for file in told), *stops))
    return Speech(kept, end, tuple(others), _begin(kept, {end, *others}))


def stops_of_adapter(folder: Path, tokenizer: Path) -> tuple[int, ...]:
    """Return the token ids that end a text, from the `generation_config.json` and the settings of the tokenizer beside
    an adapter. There are no such ids if the adapter's folder has none of these files. `tokenizer` is that of the model.

    Raises `DataError` if the settings name a token that the model does not have, and `ConfigError` for a file that
    cannot be read.
    """
    ends = [end for path, ids in end_ids(folder).items() if path.name == GENERATION_FILE for end in ids]
    named = end_named_by_settings(folder, tokenizer, read_inner(tokenizer))
    return tuple(ends if named is None else (*ends, named))


def speech_of_run(run: RunConfig, tokens: Path) -> Speech | None:
    """Return the special token ids for prompting a run's model, as in the published model from which the run starts.
    `tokens` is the folder of the run's token shards. Returns None if the run starts from random weights.
    """
    if not run.training.initialize_from:
        return None
    models = (Path(run.output.folder) / INITIAL_FOLDER, Path(run.training.initialize_from))
    return speech(tokens / TOKENIZER_FILE, models)


def _begin(tokenizer: Path, ends: Container[int]) -> int | None:
    ids = read_inner(tokenizer).encode("").ids
    return ids[0] if ids and ids[0] not in ends else None


def _is_same_file(one: Path, other: Path) -> bool:
    """Whether two files have the same content. The files are read only if they have equal sizes and different paths."""
    if not one.is_file() or one.stat().st_size != other.stat().st_size:
        return False
    return one.samefile(other) or sha256(one) == sha256(other)
