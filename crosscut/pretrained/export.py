"""Export of a run's checkpoint, or of a model in memory on any layout, to a folder that `transformers` loads.

Only one whole tensor at a time is in memory. The folder gets its final name only when all files are complete.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from crosscut.checkpoint import AVERAGE, MODEL, Folder, folder_at
from crosscut.checkpoint.storage import storage_errors_told
from crosscut.checkpoint.stored import StoredTensors
from crosscut.config import CheckpointError, ConfigError, ModelConfig
from crosscut.config.published.folders import (
    GENERATION_FILE,
    MODEL_FILE,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    begin_id,
    published_table,
    require_exportable,
)
from crosscut.config.published.sentences import MODULES_FILE, module_files
from crosscut.config.system.files import read_json
from crosscut.config.system.terminal import echo
from crosscut.data import Tokenizer
from crosscut.data.tokenization.inner import read_inner
from crosscut.model import GPT
from crosscut.parallel import reshard
from crosscut.parallel.collectives import share_from_first
from crosscut.parallel.state.parameters import whole
from crosscut.pretrained.adapter_settings import CONFIG_NAME
from crosscut.pretrained.adapters import read_adapter, with_adapters, write_adapter
from crosscut.pretrained.companions import COMPANIONS, TEMPLATE_FILE, speech, with_ends
from crosscut.pretrained.families import Weight, published_forms, published_shapes, weights_of
from crosscut.pretrained.finite import count_not_finite, not_finite
from crosscut.pretrained.loading import require_weights
from crosscut.pretrained.source import ModelSource
from crosscut.pretrained.task_files import Rows, TaskFiles, task_files, with_class
from crosscut.pretrained.tensors import DTYPES, read_whole
from crosscut.pretrained.writing import json_bytes, num_bytes, plan_files, write_tensors

_REMEDY = "Free some space, grant access, or choose another folder."
MAX_FILE_BYTES = 5 * 10**9
"""Default maximum size of one file, in bytes."""


@dataclass(frozen=True)
class Exported:
    """Summary of an exported model."""

    folder: str
    num_tensors: int
    files: list[str]
    """Names of the files that hold tensors."""
    num_bytes: int
    """Total size of the tensors in bytes."""
    is_averaged: bool = False
    """Whether the tensors are the moving average in a checkpoint instead of the weights of the last step."""


@dataclass(frozen=True, kw_only=True)
class _ExportFolder:
    """Destination folder of an export, with the contents of the files other than the tensors."""

    folder: Folder
    config: ModelConfig
    dtype: torch.dtype
    tokenizer: Path
    ends: tuple[int, ...]
    """Ids that end a text."""
    labels: tuple[str, ...]
    max_file_bytes: int
    is_published: bool = True
    """Whether the files beside the tokenizer are those of the model itself, and not of a model from which it was
    trained."""
    rows: Rows | None = None
    """Rows of a model that was fine-tuned for a task. None if the tokenizer's files stay as they are."""

    def check(self) -> None:
        """Make the files other than the tensors. Raises `ConfigError` for a model that no published family can express,
        for a sentence encoder with a step that Crosscut does not compute, and for rows that `transformers` could not
        make.
        """
        assert self.files

    @cached_property
    def files(self) -> dict[str, bytes]:
        """Contents of the files other than the tensors, by name. The last file makes the folder complete."""
        return {**self.beside, MODEL_FILE: json_bytes(self.table)}

    @property
    def table(self) -> dict[str, object]:
        """Content of `config.json`, with the id of the padding token of a model that reads the label from the last
        token of a text. `transformers` needs this id to find the last token.
        """
        if self.config.solves_task and self.config.is_causal:
            return {**self._shape, "pad_token_id": self.for_task.padding if self.rows else _padding(self.tokenizer)}
        return self._shape

    @cached_property
    def _shape(self) -> dict[str, object]:
        """Content of `config.json` without the id of the padding token.

        If the run started from a published model, the model's config gives the begin-of-text id. Otherwise, this id is
        the end-of-text id, which precedes every text in training.
        """
        begin = begin_id(self.tokenizer.parent)
        return published_table(
            self.config.without_adapters,
            dtype=str(self.dtype).removeprefix("torch."),
            begin=self.ends[0] if begin is None or begin >= self.config.vocab_size else begin,
            stops=self.ends,
            labels=self.labels,
        )

    @cached_property
    def for_task(self) -> TaskFiles:
        """Tokenizer's files of a model that was fine-tuned for a task."""
        assert self.rows is not None
        return task_files(self.tokenizer, self.config, self.rows, model_type=str(self._shape["model_type"]))

    @property
    def beside(self) -> dict[str, bytes]:
        """Contents of the tokenizer's file, of the files that `transformers` needs to load it, and of the files of a
        sentence encoder, by name.
        """
        if self.rows is not None:
            return self.for_task.files
        folder = self.tokenizer.parent
        modules = (folder / name for name in module_files(folder)) if self.is_published else ()
        return self._own[0] | {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in modules if path.is_file()
        }

    @cached_property
    def _own(self) -> tuple[dict[str, bytes], str]:
        """Files of the tokenizer, and a line for the user about tokens that `transformers` may read differently."""
        files = _beside(self.tokenizer, self.ends)
        return with_class(files, self.tokenizer, str(self._shape["model_type"]))

    def write(self, tensors: Iterator[Tensor]) -> Exported:
        """Write the whole folder atomically. Each tensor is converted to its type in the files."""
        if self.rows is None and self._own[1]:
            echo(f"crosscut: {self._own[1]}", err=True)
        forms = published_forms(self.config, self.dtype)
        planned = plan_files(forms, max_bytes=self.max_file_bytes)
        with _new_folder(self.folder, MODEL_FILE) as draft:
            write_tensors(draft, planned, map(lambda tensor, form: tensor.to(form.dtype), tensors, forms.values()))
            for name, content in self.files.items():
                draft.write(name, content)
        return Exported(str(self.folder), len(forms), [file.name for file in planned], num_bytes(forms))


@contextmanager
def _new_folder(folder: Folder, last: str) -> Iterator[Folder]:
    """Context in which the files of a folder are written. The folder is published at the end, and nothing stays of it
    after an error. `last` is the file that makes the folder complete.
    """
    draft = folder.draft()
    with storage_errors_told(folder, "writable", remedy=_REMEDY):
        draft.begin(last)
        try:
            yield draft
            folder.publish(draft, last, lambda _: False)  # no file may be removed, because a new folder is empty
        except BaseException:
            draft.remove(last, lambda _: True)
            raise


def _padding(tokenizer: Path) -> object:
    """Id of the padding token in the `config.json` beside the tokenizer of a published model. None if there is none."""
    path = tokenizer.with_name(MODEL_FILE)
    return read_json(path).get("pad_token_id") if path.is_file() else None


def require_new(folder: Folder) -> None:
    """Raise `ConfigError` if the folder is not empty."""
    if folder.files() or folder.folders():
        raise ConfigError(f"`{folder}` must be a new folder, but is not empty. Choose another name.")


def export_checkpoint(
    source: ModelSource,
    out: str | Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    advance: Callable[[str], None] = lambda _: None,
) -> Exported:
    """Write the model of a checkpoint to a new Hugging Face folder. Any layout may have written the checkpoint. The
    export runs in one process and does not build the model. Adapters of the run, and the adapter of the source, are
    merged into the weights.

    `advance` is called with the name of each tensor. Raises `ConfigError` for a model that no published family can
    express, for a folder that is not empty, and for a published model without an adapter. Raises `CheckpointError` if a
    file cannot be read or written, or if a weight is not finite.
    """
    if source.is_published:
        dtype, tensors = _of_published(source, advance)
    else:
        require_exportable(source.model.without_adapters)
        dtype, read = _reader(source)
        tensors = _published(source.model, with_adapters(source.model, read), advance)
    target = _ExportFolder(
        folder=folder_at(out).alone,
        config=source.model,
        dtype=dtype,
        tokenizer=source.tokenizer,
        ends=source.ends,
        labels=source.labels,
        max_file_bytes=max_file_bytes,
        is_published=source.is_published,
        rows=Rows(source.special, source.row_length) if source.model.solves_task and not source.is_published else None,
    )
    target.check()
    require_new(target.folder)
    _tell_of_modules(source, target.folder)
    if source.adapter:
        tensors = _with_adapter(source, tensors)
    return replace(target.write(tensors), is_averaged=source.is_averaged)


def _tell_of_modules(source: ModelSource, folder: Folder) -> None:
    """Print a line if the model lost the modules of a sentence encoder in its training."""
    if source.was_sentence_encoder:
        echo(
            f"crosscut: `{folder}` has no `{MODULES_FILE}`. The files of sentence-transformers beside the model "
            "from which the run started describe that model; copy them if they still apply.",
            err=True,
        )


def export_adapter(source: ModelSource, out: str | Path | Folder, *, base: str = "") -> list[str]:
    """Write the adapters of a checkpoint to a new folder in PEFT's format. A `Folder` belongs to a run; a path is one
    that the user named. `base` names the published model to which the adapters belong. Returns the names of the
    published weights that the adapters change.

    Raises `ConfigError` if the source has no adapters of its own, or if the folder is not empty, and `CheckpointError`
    if a file cannot be read or written.
    """
    if source.is_published or not source.model.lora_rank:
        raise ConfigError(
            f"`{source.folder}` must be a checkpoint of a run with adapters (`model.lora_rank`), but has no adapters. "
            "Export the whole model instead."
        )
    folder = out if isinstance(out, Folder) else folder_at(out).alone
    require_new(folder)
    _, read = _reader(source)
    with _new_folder(folder, CONFIG_NAME) as draft:
        draft.write(GENERATION_FILE, json_bytes(with_ends(source.tokenizer.with_name(GENERATION_FILE), source.ends)))
        return write_adapter(draft, source.model, read, base=base)


def _reader(source: ModelSource) -> tuple[torch.dtype, Callable[[str], Tensor]]:
    """Return the type of a checkpoint's weights, and a function that returns a parameter by name. The function raises
    `CheckpointError` for a parameter that is not finite.
    """
    stored = StoredTensors(source.folder)
    group = AVERAGE if source.is_averaged else MODEL
    dtype = stored.entry(f"{group}.tokens.weight").dtype
    _require_tensors(stored, source.model, dtype, group)

    def read(name: str) -> Tensor:
        tensor = stored.read(f"{group}.{name}")
        if count := count_not_finite(tensor):
            raise not_finite(source.folder, name, count, "Use an earlier checkpoint.")
        return tensor

    return dtype, read


def _of_published(source: ModelSource, advance: Callable[[str], None]) -> tuple[torch.dtype, Iterator[Tensor]]:
    """Return the type and the tensors of a published model into which an adapter will be merged."""
    if not source.adapter:
        raise ConfigError(
            f"`{source.folder}` must be a run or a checkpoint, but is already a Hugging Face folder. Copy this "
            "folder instead, or pass an adapter to merge."
        )
    found = require_weights(source.model, Path(str(source.folder)))
    shapes = published_shapes(source.model)
    dtype = DTYPES[found[next(iter(shapes))].dtype]

    def tensors() -> Iterator[Tensor]:
        for name, (num_rows, *_) in shapes.items():
            advance(name)
            yield read_whole(found[name])[-num_rows:]  # RoBERTa's first positions belong to no token

    return dtype, tensors()


def _with_adapter(source: ModelSource, tensors: Iterator[Tensor]) -> Iterator[Tensor]:
    """Merge the adapter of the source into published tensors."""
    adapter = read_adapter(source.adapter, source.model)
    return (adapter.merged(name, each) for name, each in zip(published_shapes(source.model), tensors, strict=True))


def _require_tensors(stored: StoredTensors, config: ModelConfig, dtype: torch.dtype, group: str) -> None:
    """Check that the checkpoint's `group` of tensors holds all tensors of the model, with the model's shapes and the
    type `dtype`. Raises `CheckpointError` if it does not.
    """
    for weight in weights_of(config):
        entry, (rows, *columns) = stored.entry(f"{group}.{weight.name}"), weight.shape
        if entry.shape[:1] < (rows,) or list(entry.shape[1:]) != columns or entry.dtype != dtype:
            raise CheckpointError(
                f"`{group}.{weight.name}` in `{stored.folder}` must have the shape {list(weight.shape)} and the type "
                f"{dtype} of the model, but has {list(entry.shape)} and {entry.dtype}."
            )


@torch.no_grad()
def export_model(
    model: GPT,
    out: str | Path,
    *,
    tokenizer: Path,
    stops: tuple[int, ...] = (),
    labels: tuple[str, ...] = (),
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a model in memory, on any layout and sharding, to a new Hugging Face folder, with its `tokenizer.json`.

    The tokenizer's end-of-text id and the ids in `stops` are stored as ids that end a text. `labels` are stored as the
    names of the classes if the model has `head = "classes"`. If the tokenizer is in the folder of a sentence encoder,
    the files of sentence-transformers are copied, too. Every rank must call this function; the first rank writes.
    Communication: the tensors are gathered one after the other. On all ranks, raises `ConfigError` for a model that no
    published family can express and for a folder that is not empty, and `CheckpointError` if a file cannot be written.
    """
    reshard(model)
    parameters = dict(model.named_parameters())
    target = _ExportFolder(
        folder=folder_at(out).alone,
        config=model.config,
        dtype=model.embedding.weight.dtype,
        tokenizer=tokenizer,
        ends=(Tokenizer.load(tokenizer).end_of_text, *stops),
        labels=labels,
        max_file_bytes=max_file_bytes,
        rows=Rows(speech(tokenizer, ()).special, 0) if model.config.solves_task else None,
    )
    target.check()
    read = with_adapters(model.config, lambda name: whole(parameters[name]))
    tensors = _published(model.config, read)
    with _together():
        if model.mesh.is_first_rank:
            require_new(target.folder)
    with _together(tensors):
        if model.mesh.is_first_rank:
            target.write(tensors)


@contextmanager
def _together(tensors: Iterable[Tensor] = ()) -> Iterator[None]:
    """Raise the error that the block raises on the first rank on all ranks. Every rank must enter the block. After it,
    every rank contributes to the gathers of the remaining tensors, even if the first rank could not write.
    """
    failure = None
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        failure = error
    for _ in tensors:
        pass
    if failure := share_from_first(failure):
        raise failure


def _published(
    config: ModelConfig, read: Callable[[str], Tensor], advance: Callable[[str], None] = lambda _: None
) -> Iterator[Tensor]:
    """Yield the published tensors in the order of `published_shapes`, assembled from Crosscut's parameters. `read`
    returns a parameter by name.
    """
    made_of: dict[str, list[tuple[Weight, int]]] = {}
    for weight in weights_of(config):
        for index, source in enumerate(weight.sources):
            made_of.setdefault(source.name, []).append((weight, index))
    read_once = _keeping_last(read)
    for name, pieces in made_of.items():
        advance(name)
        yield _put_together(pieces, read_once)


def _keeping_last(read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Return a function that works like `read`, but keeps the last tensor. The tensors of all experts of a layer are
    made of one parameter.
    """
    last: dict[str, Tensor] = {}

    def again(name: str) -> Tensor:
        if name not in last:
            last.clear()  # before the next one is read
            last[name] = read(name)
        return last[name]

    return again


def _put_together(pieces: list[tuple[Weight, int]], read: Callable[[str], Tensor]) -> Tensor:
    """Assemble one published tensor. `pieces` lists the Crosscut parameters that contribute rows, each with the
    position of the published tensor in that parameter's list of sources.
    """
    found: Tensor | None = None
    for weight, index in pieces:
        source = weight.sources[index]
        ours = read(weight.name)[: weight.shape[0]]
        if weight.stacked and not source.of_all:
            weight, ours, index = weight.matrix(index), ours[index], 0
        if not weight.is_in_order:
            ours = ours[weight.rows(index).to(ours.device)]
        if weight.shape_of(source) == tuple(ours.shape) and not source.transposed:
            return ours
        if found is None:
            found = ours.new_empty(weight.shape_of(source))
        rows = found.t() if source.transposed and found.dim() == 2 else found
        if weight.stacked:
            weight, rows, ours = weight.matrix(0), rows.transpose(0, 1), ours.transpose(0, 1)
        rows[weight.places(index).to(ours.device)] = ours.reshape(-1, *rows.shape[1:])
    assert found is not None
    return found


def _beside(tokenizer: Path, ends: tuple[int, ...]) -> dict[str, bytes]:
    """Return the contents of the tokenizer's file and of the files that `transformers` needs to load it, keyed by name.

    - If there is no `tokenizer_config.json`, a minimal one is created.
    - The settings name `ends[0]`, which ends the documents of the run's tokens, as `eos_token`. They stay as they are
      if the chat template writes `eos_token`.
    - If there is a `generation_config.json`, it names all `ends`, because `transformers` then does not read them from
      `config.json`.
    """
    files = {TOKENIZER_FILE: tokenizer.read_bytes()}
    files |= {name: path.read_bytes() for name in COMPANIONS if (path := tokenizer.with_name(name)).is_file()}
    if GENERATION_FILE in files:
        files[GENERATION_FILE] = json_bytes(with_ends(tokenizer.with_name(GENERATION_FILE), ends))
    if TOKENIZER_CONFIG_FILE not in files:
        files[TOKENIZER_CONFIG_FILE] = json_bytes(Tokenizer.load(tokenizer, end_of_text=ends[0]).settings())
    if Tokenizer.load(tokenizer).end_of_text != ends[0] and not _template_writes_end(files):
        for name in {TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE} & files.keys():
            end = {"eos_token": read_inner(tokenizer).id_to_token(ends[0])}
            files[name] = json_bytes(json.loads(files[name]) | end)
    return files


def _template_writes_end(files: Mapping[str, bytes]) -> bool:
    """Whether a chat template writes `eos_token`, so that another token would change what the model reads."""
    template = json.loads(files[TOKENIZER_CONFIG_FILE]).get("chat_template")
    return b"eos_token" in files.get(TEMPLATE_FILE, str(template).encode())
