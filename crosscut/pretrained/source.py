"""Find a model in a run's folder, a checkpoint or a Hugging Face folder, and load it on each rank."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from crosscut.architecture import Ability, describe
from crosscut.checkpoint import (
    AVERAGE,
    MODEL,
    Folder,
    holds_average,
    latest_good_checkpoint,
    list_checkpoints,
    load_model,
    require_undamaged,
)
from crosscut.checkpoint.format.manifest import Manifest, step_of
from crosscut.checkpoint.maintenance.inspection import root_of
from crosscut.checkpoint.storage import LocalFolder, folder_at
from crosscut.config import CheckpointError, ConfigError, ModelConfig, RunConfig, load_run
from crosscut.config.checks import require_one_of
from crosscut.config.conventions import CONFIG_FILE, INITIAL_FOLDER, MANIFEST_FILE, TOKENS_FOLDER
from crosscut.config.precision import OF_MODELS, PRECISIONS
from crosscut.config.published.folders import MODEL_FILE, TOKENIZER_FILE
from crosscut.config.published.sentences import is_sentence_encoder
from crosscut.config.system.terminal import echo
from crosscut.data import Tokenizer
from crosscut.model import GPT
from crosscut.parallel import ParallelMesh, RandomStreams, shard_model
from crosscut.pretrained.adapters import read_adapter
from crosscut.pretrained.companions import TextEnds, labels_of, read_checked, special_of, speech, stops_of_adapter
from crosscut.pretrained.finite import require_finite
from crosscut.pretrained.loading import heads_left_out, load_weights, require_weights


@dataclass(frozen=True, kw_only=True)
class ModelSource(TextEnds):
    """A model that can be loaded, with the tokenizer and the special token ids that prompts need. The object is small
    and can be sent to other processes.
    """

    name: str
    """Name of the model in reports."""
    folder: Folder
    """Folder of a checkpoint or of a published model."""
    model: ModelConfig
    tokenizer: Path
    """Path of the `tokenizer.json`. The chat template, if any, is in the same folder."""
    end_of_text: int
    """Token id that ends a document. If `begin_of_text` is None, the same id also starts a document."""
    stops: tuple[int, ...] = ()
    """Additional token ids that end the generated text, such as the end of a turn."""
    begin_of_text: int | None = None
    """Token id that the model expects at the start of every text. None if the model expects no such id."""
    is_published: bool = False
    """Whether `folder` holds a published model. If not, the folder is a checkpoint."""
    is_averaged: bool = False
    """Whether the weights are the moving average in the checkpoint instead of the weights of the last step."""
    adapter: str = ""
    """Folder of an adapter in PEFT's format that is merged into the weights; empty for none."""
    left_out: tuple[str, ...] = ()
    """Names of the tensors of a published encoder that are not loaded, such as its pooler or a head that the model
    lacks."""
    labels: tuple[str, ...] = ()
    """Names of the classes of a model with `head = "classes"`; empty if they have no names."""
    row_length: int = 0
    """Maximum number of tokens of the rows on which a model for a task was fine-tuned. 0 if it is not known."""

    @property
    def settings_folders(self) -> tuple[Path, ...]:
        """Folders whose `generation_config.json` belongs to the model: that of the tokenizer, and the adapter's."""
        return tuple(dict.fromkeys((self.tokenizer.parent, *([Path(self.adapter)] if self.adapter else []))))

    @property
    def was_sentence_encoder(self) -> bool:
        """Whether the model is that of a run that started from a sentence encoder, whose list of modules describes the
        model before the run.
        """
        return not self.is_published and is_sentence_encoder(self.tokenizer.parent)

    @property
    def lasting_name(self) -> str:
        """Name of the model for clients, which stays the same when the run continues: without the checkpoint's step."""
        return self.name.partition("/")[0]

    @property
    def title(self) -> str:
        """Name of the model, with the words "averaged weights" if the weights are an average, and with the name of the
        adapter.
        """
        name = f"{self.name}, averaged weights" if self.is_averaged else self.name
        return f"{name}, adapter {Path(self.adapter).name}" if self.adapter else name

    def to_json(self) -> dict[str, object]:
        """Encode the source for other ranks, without pickle."""
        return {**vars(self), "folder": str(self.folder), "model": asdict(self.model), "tokenizer": str(self.tokenizer)}

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> "ModelSource":
        """Decode a source that `to_json` encoded."""
        places = {"folder": folder_at(table["folder"]), "tokenizer": Path(table["tokenizer"])}
        lists = {name: tuple(table[name]) for name in ("stops", "left_out", "labels")}
        return cls(**{**table, **places, **lists, "model": ModelConfig(**table["model"])})

    @property
    def abilities(self) -> frozenset[Ability]:
        """Abilities of the model."""
        return describe(self.model).head.abilities

    def require_encoder(self, place: str | Path) -> None:
        """Raise `ConfigError` for a model that cannot turn texts into vectors, because no token sees the whole text.
        `place` is the path of the model, for the message.
        """
        if Ability.EMBED not in self.abilities:
            raise ConfigError(
                f"`{place}` must hold an encoder, but holds {self._held}. Choose a BERT or a model made from one, such "
                "as all-MiniLM-L6-v2."
            )

    def require_decoder(self, place: str | Path) -> None:
        """Raise `ConfigError` for a model that does not predict the next token: an encoder, in which each token also
        sees the next token, or a model that solves a task. `place` is the path of the model, for the message.
        """
        if Ability.WRITE in self.abilities:
            return
        remedy = (
            "Choose a model with causal attention, such as a GPT-2 or a Llama. `crosscut embed` computes embeddings "
            "with an encoder, and `crosscut generate` fills in masked words with an encoder that has a head for masked "
            "tokens, such as a BertForMaskedLM."
        )
        if Ability.SOLVE in self.abilities:
            remedy = "Choose the model from which it was fine-tuned."
        raise ConfigError(f"`{place}` must hold a model that predicts the next token, but holds {self._held}. {remedy}")

    @property
    def _held(self) -> str:
        """Words for the model in messages about its abilities."""
        if Ability.SOLVE in self.abilities:
            return f'a model for a task (`model.head` is "{self.model.head}")'
        if Ability.EMBED in self.abilities:
            return 'an encoder (`model.attention` is "bidirectional")'
        return f"a model that predicts the next token ({self.model.family})"

    def load(self, mesh: ParallelMesh, *, precision: str = "float32") -> GPT:
        """Load the model on one rank of any layout, in evaluation mode. The weights have the element type of
        `precision`.

        Every rank must call this method. Raises `ConfigError` for a precision in which no model can run inference, such
        as "float8", and `CheckpointError` if the weights cannot be read or are not finite.
        """
        require_one_of("precision", precision, OF_MODELS)
        dtype = getattr(torch, PRECISIONS[precision].compute)
        model = GPT(self.model, mesh=mesh, streams=RandomStreams(mesh, seed=0), dtype=dtype)
        shard_model(model, mesh, units=model.blocks, always_used=True)
        self.fill(model)
        return model.eval()

    def fill(self, model: GPT) -> None:
        """Load the weights into a model, or into the stages of a model that a rank has. Every rank of the model's mesh
        must call this method. Raises `CheckpointError` if the weights cannot be read or are not finite.
        """
        if self.is_published:
            load_weights(model, self.model, Path(str(self.folder)))
        else:
            group = AVERAGE if self.is_averaged else MODEL
            load_model(self.folder, model=model, padded=model.padded_rows, group=group)
        self.finish(model)

    def finish(self, model: GPT) -> None:
        """Check weights that were loaded from the source, and merge the adapter. Every rank must call this method.
        Raises `CheckpointError` if the weights are not finite.
        """
        require_finite(model, self.folder, is_published=self.is_published)
        if self.adapter:
            read_adapter(self.adapter, self.model).merge(model)
            require_finite(model, self.adapter, is_published=True)

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer with the model's end-of-text id."""
        return Tokenizer.load(self.tokenizer, end_of_text=self.end_of_text)


def find_model(place: str | Path, *, last_weights: bool = False, adapter: str | Path = "") -> ModelSource:
    """Find the model at `place`: a run's folder (its newest good checkpoint is used), a checkpoint, or a Hugging Face
    folder. If a checkpoint holds a moving average of the weights, the model is the average; with `last_weights`, the
    model has the weights of the last step. `adapter` is the folder of an adapter in PEFT's format that belongs to the
    model (docs/lora.md). The ids that end a text, in the files beside the adapter, become stops of the model.

    One process calls this function before the ranks start. It checks a checkpoint's files against their hashes, a
    published model's tensors against its `config.json`, and an adapter's tensors against the model. Raises
    `ConfigError` if there is no model or Crosscut does not support the model, `CheckpointError` for missing or damaged
    weights, and `DataError` for a tokenizer that cannot be read. Lines on the error stream name keys of the
    model's and the adapter's files that Crosscut does not know.
    """
    source = _find(place, last_weights, adapter)
    if not adapter:
        return source
    read = read_adapter(adapter, source.model)
    for notice in filter(None, (read.notice, read.notice_of_base(Path(str(source.folder))))):
        echo(f"crosscut: {notice}", err=True)
    ends = dict.fromkeys((*source.stops, *stops_of_adapter(Path(adapter), source.tokenizer)))
    return replace(source, adapter=str(adapter), stops=tuple(end for end in ends if end != source.end_of_text))


def _find(place: str | Path, last_weights: bool, adapter: str | Path) -> ModelSource:
    folder = folder_at(place)
    names = folder.files()
    if step_of(folder.name) is not None or MANIFEST_FILE in names:
        return _in_checkpoint(folder, require_undamaged(folder, progress=True), place, last_weights)
    if CONFIG_FILE in names or list_checkpoints(folder):
        good = latest_good_checkpoint(root_of(str(place)))
        return _in_checkpoint(good.folder, good.manifest, place, last_weights)
    if MODEL_FILE in names and isinstance(folder, LocalFolder):
        return _published(folder.path, adapter)
    raise ConfigError(
        f"`{place}` must be a run's folder, a checkpoint or a Hugging Face folder, but has no `{CONFIG_FILE}`, "
        f"`{MANIFEST_FILE}` or `{MODEL_FILE}`. Name another folder, or train a model first: `crosscut train` "
        "trains the demo into `runs/demo`."
    )


def _published(folder: Path, adapter: str | Path) -> ModelSource:
    published = read_checked(folder, adapter)
    for notice in published.notices:
        echo(f"crosscut: {notice}", err=True)
    tensors = require_weights(published.model, folder)
    spoken = speech(folder / TOKENIZER_FILE, [folder])
    return ModelSource(
        name=folder.resolve().name,
        folder=LocalFolder(folder),
        model=published.model,
        is_published=True,
        left_out=heads_left_out(published.model, tensors),
        labels=published.labels,
        **vars(spoken),
    )


def _in_checkpoint(folder: Folder, manifest: Manifest, place: str | Path, last_weights: bool) -> ModelSource:
    run, initial = _run_of(manifest.progress.config, folder)
    root = Path(place) if (Path(place) / CONFIG_FILE).is_file() else _root_of_checkpoint(folder)
    kept = [place / INITIAL_FOLDER for place in (root, Path(run.output.folder)) if place is not None]
    spoken = speech(_tokenizer(run, root), [*kept, initial] if initial else [])
    own = [place for place in (root, Path(run.output.folder)) if place is not None]
    if run.model.solves_task:
        special = special_of(own)
        spoken = replace(spoken, begin_of_text=special.begin, end_of_text=special.end) if special else spoken
    elif not initial:
        spoken = replace(spoken, begin_of_text=None)
    return ModelSource(
        name=f"{(root or Path(run.output.folder)).resolve().name}/{folder.name}",
        folder=folder,
        model=run.model,
        is_averaged=holds_average(manifest) and not last_weights,
        labels=labels_of(own, run.model.num_classes),
        row_length=run.training.sequence_length if run.model.solves_task else 0,
        **vars(spoken),
    )


def _run_of(config: Mapping[str, object], folder: Folder) -> tuple[RunConfig, Path | None]:
    """Return the run that wrote a checkpoint, and the folder of the published model from which the run started, or None
    if there is no such model.

    The model's shape comes from the checkpoint, because the published folder may have changed since.
    """
    if not config:
        raise CheckpointError(
            f"`{folder}` must be a checkpoint of a run, but contains no config of a run. Choose another checkpoint."
        )
    training = config.get("training")
    initial = training.get("initialize_from", "") if isinstance(training, dict) else None
    if not isinstance(training, dict) or not isinstance(initial, str):
        raise CheckpointError(f"`{folder}` must hold the config of its run, but `training` in its manifest is damaged.")
    run = load_run({**config, "training": {**training, "initialize_from": ""}})
    return run, Path(initial) if initial else None


def _root_of_checkpoint(folder: Folder) -> Path | None:
    """Return the folder of the run to which a checkpoint belongs, or None if the checkpoint is not in a run's
    folder.
    """
    root = folder.path.parent.parent if isinstance(folder, LocalFolder) else None
    return root if root is not None and (root / CONFIG_FILE).is_file() else None


def _tokenizer(run: RunConfig, root: Path | None) -> Path:
    """Path of the tokenizer in the folder of the run's tokens. `root` is the run's folder, which may have been
    moved.
    """
    folders = [Path(run.tokens_folder)]
    if root is not None and not (run.data.tokens or run.data.mixture):
        folders.insert(0, root / TOKENS_FOLDER)
    for folder in folders:
        if (folder / TOKENIZER_FILE).is_file():
            return folder / TOKENIZER_FILE
    raise CheckpointError(
        f"`{folders[0] / TOKENIZER_FILE}` must exist, but is missing. The model needs the tokenizer with which the "
        "run's tokens were made. Restore the folder of token shards."
    )
