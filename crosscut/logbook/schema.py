"""Schema of the files in a run's folder: their names, and the keys of those that hold rows or an object.

`VERSION` counts the changes after which an older reader would misread a file. A file of rows states its version in its
first row (`rows.RowFile`), and a file with an object under the key `version`. A file without a version has version 1.
`docs/tables/run-files.md` is made from `RUN_FILES`, and tests hold the files of real runs against it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

from crosscut.config import ConfigError
from crosscut.config.conventions import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    INITIAL_FOLDER,
    LABELS_FILE,
    SPECIAL_FILE,
    TOKENS_FOLDER,
)

VERSION = 1

METRICS_FILE, LOADS_FILE, RESTARTS_FILE = "metrics.jsonl", "experts.jsonl", "restarts.jsonl"
SAMPLES_FILE, MEASUREMENTS_FILE = "samples.jsonl", "measurements.jsonl"
PLAN_FILE, SUMMARY_FILE, SKIPS_FILE = "plan.json", "summary.json", "skips.json"
PLOT_FILE, LOADS_PLOT_FILE, SAMPLE_FILE = "loss.png", "experts.png", "sample.txt"
SPIKES_FOLDER, TENSORBOARD_FOLDER, PROFILE_FOLDER, WATCH_FOLDER = "spikes", "tensorboard", "profile", "watch"
PARTS_FILE = f"{PROFILE_FOLDER}/parts.json"
KEY_FILE = ".in-memory"
HANG_REPORTS = "hang-*.txt"


class Lifetime(Enum):
    """Time until which a file stays in the folder of a run, the shortest first."""

    RESULT = "until the run trains further, or another run begins"
    STEPS = "until the run, or another run, begins with its first step"
    RUN = "until another run begins in the folder"
    FOLDER = "no run removes the file"


class Form(Enum):
    """Form of a file."""

    ROWS = "JSON objects, one per line"
    OBJECT = "a JSON object"
    FILE = "a file"
    FOLDER = "a folder"


@dataclass(frozen=True)
class Key:
    """Key of a row or of an object."""

    name: str
    """Name. A dot leads to a key of an inner object, or of the objects in a list. `*` stands for any name."""
    meaning: str
    unit: str = ""
    is_optional: bool = False
    """Whether the key is missing in some runs."""


@dataclass(frozen=True)
class Kind:
    """Kind of the rows or objects in a file."""

    name: str
    keys: tuple[Key, ...]

    def fits(self, found: Sequence[str]) -> bool:
        """Whether `found` has every key that is not optional, and no unknown key."""
        known = all(any(_matches(key.name, name) for key in self.keys) for name in found)
        return known and all(key.is_optional or any(_matches(key.name, name) for name in found) for key in self.keys)


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """File or folder in the folder of a run."""

    name: str
    """Name. `*` stands for a step, and for a number that tells files of one step apart."""
    form: Form
    meaning: str
    kinds: tuple[Kind, ...] = ()
    is_listed: bool = True
    """Whether the report of a run lists the file."""
    is_own: bool = True
    """Whether no run starts while something else, such as a link, has this name."""
    lifetime: Lifetime = Lifetime.FOLDER

    def paths(self, folder: Path) -> list[Path]:
        """Return the sorted paths of this name in the folder of a run. Without `*`, nothing need exist there."""
        if "*" not in self.name:
            return [folder / self.name]
        name = re.compile(re.escape(self.name).replace(r"\*", r"\d+(-\d+)?"))
        return sorted(path for path in folder.glob(self.name) if name.fullmatch(path.name))

    def require_known(self, table: Mapping[str, object]) -> str:
        """Return the name of the kind to which a row or an object belongs. Raises `ValueError` if no kind has exactly
        its keys.
        """
        found = sorted(set(_flattened(table)) - {"version"})
        kinds = [kind.name for kind in self.kinds if kind.fits(found)]
        if not kinds:
            raise ValueError(f"no kind of `{self.name}` has the keys {', '.join(found)}")
        return kinds[0]


class NewerFileError(ConfigError):
    """Error for a file that a newer version of Crosscut wrote."""


def require_version(version: object, name: object) -> None:
    """Raise `NewerFileError` if the version in the file `name` is newer than this program. None is version 1."""
    if isinstance(version, int | float) and version > VERSION:
        raise NewerFileError(
            f"`{name}` must have version {VERSION} or older, but has version {version:g}: a newer Crosscut wrote it. "
            "Use that Crosscut, or another folder."
        )


def _matches(name: str, found: str) -> bool:
    """Whether a key of the schema is meant by a key that was found. The key of an empty list matches its inner keys."""
    return fnmatchcase(found, name) or name.startswith(f"{found}.")


def _flattened(table: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        inner = value if isinstance(value, list) else [value]
        objects = [one for one in inner if isinstance(one, Mapping) and one]
        for one in objects:
            yield from _flattened(one, f"{prefix}{key}.")
        if not objects:
            yield f"{prefix}{key}"


_STEP = Key("step", "Number of steps done")
_ANY = Kind("first row", (
    Key("step", "Step to which the file was cut when it was last written anew, and 0 in a new file"),
    Key("version", "Version of the schema", is_optional=True),
    Key("written_at", "Time at which the file was last written anew", "seconds since 1970"),
))  # fmt: skip
_METRICS = (
    _ANY,
    Kind("step", (
        _STEP,
        Key("loss", "Mean over the target tokens (or examples) of the batch; null if it is not finite", "nats"),
        Key("gradient_norm", "Norm of the gradient of all parameters, before clipping"),
        Key("learning_rate", "Learning rate of the groups that have no rate of their own"),
        Key("data_loss", "Cross entropy of the data, before its share of this loss", "nats", is_optional=True),
        Key("distillation_loss", "Part of the teacher in this loss, before its share", "nats", is_optional=True),
        Key("loss_scale", "Factor of the loss before the backward pass", is_optional=True),
        Key("skipped", "1 if the step changed nothing, because its gradients overflowed", is_optional=True),
        Key("balance", "Loss that balances the experts; 1 is even", is_optional=True),
        Key("router_z", "Loss of the routers' logits", is_optional=True),
        Key("largest_load", "Largest load of an expert", "multiples of the mean load", is_optional=True),
        Key("router_entropy", "Mean entropy of the routers' scores over tokens and layers", "nats", is_optional=True),
        Key("seconds", "Time of the step on the device", "seconds"),
        Key("tokens_per_second", "Tokens of all ranks together", "1/second"),
        Key("model_flops_per_second", "Floating point operations of the model, of all ranks", "1/second"),
        Key("utilisation", "Share of the peak rate, from 0 to 1; null above the peak"),
        Key("samples", "Sequences that the run has trained on or left out"),
    )),
    Kind("validation", (
        _STEP,
        Key("validation_loss", "Mean over the target tokens (or examples) of the validation set", "nats"),
        Key("validation_perplexity", "Exponential of the loss per token; null for labels"),
        Key("validation_bits_per_byte", "Loss per byte of the text; null if the bytes are unknown", "bits"),
    )),
    Kind("evaluation", (
        _STEP,
        Key("wikitext103_*", "Scores of WikiText-103", is_optional=True),
        Key("lambada_*", "Scores of LAMBADA", is_optional=True),
        Key("text_*", "Scores of the run's own texts", is_optional=True),
        Key("masked_text_*", "Scores of masked tokens in the run's own texts", is_optional=True),
        Key("dev_*", "Scores of a task's development set", is_optional=True),
    )),
    Kind("collapse", (
        _STEP,
        Key("idle_layer", "Layer with an expert that gets no tokens, from 0"),
        Key("idle_expert", "Expert, from 0"),
        Key("idle_steps", "Number of steps without a token"),
    )),
    Kind("hang", (
        Key("step", "Step at which the run hangs, from 1"),
        Key("hang_seconds", "Time without progress", "seconds"),
        Key("hang_rank", "Rank that the others wait for; null if it is unknown"),
    )),
)  # fmt: skip
_RANKS = (
    Key("ranks.memory_bytes", "Largest memory of a rank so far: on a GPU, the memory of all tensors; on a CPU, the "
        "growth of the process since the model was made", "bytes"),
    Key("ranks.messages.*", "Messages of a rank in the step, by axis; in a pipeline, those that it sends",
        is_optional=True),
    Key("ranks.message_bytes.*", "Bytes of the tensors in these messages, by axis", "bytes", is_optional=True),
)  # fmt: skip
_PLANNED = (
    Key("layout", "Layout of this start"),
    Key("axes.*", "Number of ranks along an axis"),
    Key("ranks.rank", "Number of a rank"),
    Key("ranks.places.*", "Position of a rank along an axis, from 0"),
    Key("ranks.stage", "Index in `stages`"),
    Key("stages.memory_bytes", "Peak memory of a rank", "bytes"),
    Key("stages.memory.*", "Parts of this memory", "bytes"),
    Key("stages.messages.*", "Messages of a rank in a step, by axis", is_optional=True),
    Key("stages.message_bytes.*", "Bytes of the tensors in these messages, by axis", "bytes", is_optional=True),
)
_EVENT = (
    Key("spike_step", "Step of the spike, from 1"),
    Key("back_to", "Step to which the run returned"),
    Key("sequences", "Number of sequences that the run left out"),
    Key("reason", "Description of the spike"),
    Key("file", "File in `spikes` that lists these sequences"),
)
_SUMMARY = (
    Kind("training", (
        Key("parameters", "Number of parameters"),
        Key("vocab_size", "Size of the vocabulary"),
        Key("layout", "Layout of the last start"),
        Key("device", "Name of the device"),
        Key("versions.*", "Versions of the packages"),
        Key("first_step", "Steps that were done before the last start"),
        Key("steps", "Number of steps"),
        Key("averaged_weights", "Whether the scores are those of averaged weights"),
        Key("training_tokens", "Number of tokens"),
        Key("training_seconds", "Time of the steps of the last start", "seconds"),
        Key("validation_loss_*", "Validation loss before the last start and at the end", "nats"),
        Key("validation_perplexity_*", "Exponential of this loss"),
        Key("validation_bits_per_byte_*", "This loss per byte of the text", "bits"),
        Key("validation_tokens", "Number of tokens that were validated"),
        Key("validation_bytes", "Number of bytes of their text"),
        Key("tokens_per_second", "Mean over the last start", "1/second"),
        Key("model_flops_per_second", "Mean over the last start", "1/second"),
        Key("utilisation", "Share of the peak rate, from 0 to 1"),
        Key("peak", "Name of the peak rate"),
        Key("peak_flops_per_second", "Peak rate of all ranks together", "1/second"),
        Key("gain_of_one_rank", "Forecast speed of one rank, as a multiple of all ranks' speed"),
        Key("mixture.folder", "Token folder of a mixture", is_optional=True),
        Key("mixture.share", "Share of the training tokens", is_optional=True),
        Key("mixture.training_tokens", "Number of tokens", is_optional=True),
        Key("mixture.epochs", "Number of passes over the folder", is_optional=True),
        Key("evaluation.*", "Last evaluation, as in `metrics.jsonl`", is_optional=True),
        Key("experts.*", "Means over the last tenth of the steps, and the number of collapses", is_optional=True),
        *(Key(f"spikes.{key.name}", key.meaning, key.unit, is_optional=True) for key in _EVENT),
    )),
    Kind("task", (
        Key("seed", "Seed of the run"),
        Key("steps", "Number of steps"),
        Key("best_step", "Step with the best development score"),
        Key("scores.*", "Scores of the best step's checkpoint, by part and name"),
        Key("dev_loss_*", "Development loss before the last start and at the end", "nats"),
        Key("layout", "Layout of the last start"),
        Key("device", "Name of the device"),
        Key("versions.*", "Versions of the packages"),
        Key("training_seconds", "Time of the training since its last start", "seconds"),
        Key("constant.*", "Prediction that all examples of a part get", is_optional=True),
    )),
)  # fmt: skip
_LOADS = Kind("step", (
    _STEP,
    Key("loads.*", "Number of tokens of each expert of a layer"),
    Key("entropy.*", "Mean entropy of the router's scores of a layer", "nats"),
))  # fmt: skip
_SAMPLE = Kind("sample", (
    _STEP,
    Key("prompt", "Text that the model continues; empty for a new document"),
    Key("text", "The prompt and its continuation"),
))  # fmt: skip
_MEASURED = Kind("measurement", (
    _STEP,
    Key("layout", "Layout of this start"),
    Key("device", "Kind of the device of the ranks: `cpu` or `cuda`", is_optional=True),
    Key("learning_rates.*", "Learning rate of each group of parameters"),
    *_RANKS,
))  # fmt: skip
_RESTART = Kind("restart", (
    Key("step", "Step from which the run continues"),
    Key("before", "Layout that wrote the checkpoint; empty without one"),
    Key("after", "Layout of this start"),
    Key("restored_from", "`disk` or `memory`; empty without a checkpoint"),
    Key("ranks", "Number of ranks that torchrun started"),
    Key("idle_ranks", "Number of ranks without work"),
    Key("steps_lost", "Number of steps to repeat"),
    Key("seconds_of_steps_lost", "Time that these steps took", "seconds"),
    Key("seconds_lost", "Time until the first new step, in all; null if it is unknown", "seconds"),
))  # fmt: skip
_SKIPS = Kind("record", (
    Key("skips.step", "Number of steps done before the sequences"),
    Key("skips.sequences", "Number of sequences that are left out"),
    *(Key(f"events.{key.name}", key.meaning, key.unit) for key in _EVENT),
))  # fmt: skip
_PARTS = Kind("profile", (
    Key("peak", "Name of the peak rate"),
    Key("peak_flops_per_second", "Peak rate of one rank", "1/second"),
    Key("ranks.rank", "Number of the rank that computes for the longest time at a place of the pipeline"),
    Key("ranks.pipeline", "Position of the rank along the pipeline, from 0"),
    Key("ranks.seconds", "Time of the step, which is the sum of the times of all parts", "seconds"),
    Key("ranks.parts.layer", "Layer of the part, from 0; null outside of the layers"),
    Key("ranks.parts.part", "Name of a part of the model, or of a phase of the step"),
    Key("ranks.parts.kind", "Kind of the part, such as `mamba2`"),
    Key("ranks.parts.forward_seconds", "Time of the forward pass, or of a phase outside of the passes", "seconds"),
    Key("ranks.parts.backward_seconds", "Time of the backward pass", "seconds"),
    Key("ranks.parts.repeated_seconds", "Part of this time in which recomputation repeats the forward pass", "seconds"),
    Key("ranks.parts.message_seconds", "Part of both times for messages; null on a GPU", "seconds"),
    Key("ranks.parts.forward_flops", "Floating point operations of the forward pass, by the planner's count"),
    Key("ranks.parts.backward_flops", "Floating point operations of the gradients, without repeated ones"),
    Key("ranks.parts.parameters", "Number of parameters that the rank holds"),
    Key("ranks.parts.utilisation", "Share of the peak rate, from 0 to 1; null without operations or above the peak"),
))  # fmt: skip

RUN_FILES = (
    RunFile(name=PLOT_FILE, form=Form.FILE, lifetime=Lifetime.STEPS, meaning="losses over the steps"),
    RunFile(name=LOADS_PLOT_FILE, form=Form.FILE, lifetime=Lifetime.STEPS,
            meaning="loads of the experts over the steps"),
    RunFile(name=SAMPLE_FILE, form=Form.FILE, lifetime=Lifetime.STEPS, meaning="texts of the trained model"),
    RunFile(name=METRICS_FILE, form=Form.ROWS, lifetime=Lifetime.STEPS, kinds=_METRICS,
            meaning="figures of every step, of validations and evaluations, and events"),
    RunFile(name=LOADS_FILE, form=Form.ROWS, lifetime=Lifetime.STEPS, kinds=(_ANY, _LOADS),
            meaning="loads of the experts, in about 500 steps"),
    RunFile(name=SAMPLES_FILE, form=Form.ROWS, lifetime=Lifetime.STEPS, kinds=(_ANY, _SAMPLE),
            meaning="texts of `output.sample_every`"),
    RunFile(name=SUMMARY_FILE, form=Form.OBJECT, lifetime=Lifetime.RESULT, kinds=_SUMMARY,
            meaning="result of a run that has made all of its steps; a start that trains further removes it"),
    RunFile(name=CONFIG_FILE, form=Form.FILE, meaning="all settings ([configuration](../configuration.md))"),
    RunFile(name=PLAN_FILE, form=Form.OBJECT, lifetime=Lifetime.STEPS, kinds=(Kind("plan", _PLANNED),), is_listed=False,
            meaning="the planner's forecast for each rank of this start's layout"),
    RunFile(name=MEASUREMENTS_FILE, form=Form.ROWS, lifetime=Lifetime.STEPS, kinds=(_ANY, _MEASURED), is_listed=False,
            meaning="figures of each rank in the third step of every start"),
    RunFile(name=RESTARTS_FILE, form=Form.ROWS, lifetime=Lifetime.RUN, kinds=(_ANY, _RESTART), is_listed=False,
            meaning="starts that continued an [elastic](../elastic.md) run"),
    RunFile(name=TENSORBOARD_FOLDER, form=Form.FOLDER, meaning="the figures for TensorBoard"),
    RunFile(name=PROFILE_FOLDER, form=Form.FOLDER, meaning="result of `--profile` ([profiling](../profiling.md))"),
    RunFile(name=PARTS_FILE, form=Form.OBJECT, kinds=(_PARTS,), is_listed=False, is_own=False,
            meaning="time, operations and parameters of each part of the model"),
    RunFile(name=SPIKES_FOLDER, form=Form.FOLDER, meaning="record and evidence of [loss spikes](../spikes.md)"),
    RunFile(name=f"{SPIKES_FOLDER}/{SKIPS_FILE}", form=Form.OBJECT, kinds=(_SKIPS,), is_listed=False, is_own=False,
            meaning="sequences that the run left out, and why"),
    RunFile(name=INITIAL_FOLDER, form=Form.FOLDER, meaning="files of the published model that the run started from"),
    RunFile(name=TOKENS_FOLDER, form=Form.FOLDER, is_own=False, meaning="token shards ([data](../data.md))"),
    RunFile(name=CHECKPOINTS_FOLDER, form=Form.FOLDER, is_listed=False,
            meaning="a folder `step-N` per checkpoint ([checkpoints](../checkpoints.md))"),
    RunFile(name=WATCH_FOLDER, form=Form.FOLDER, is_listed=False, meaning="records of the ranks while the run trains"),
    RunFile(name=HANG_REPORTS, form=Form.FILE, lifetime=Lifetime.RUN, is_listed=False, is_own=False,
            meaning="reports about [hangs](../hangs.md), by step"),
    RunFile(name=LABELS_FILE, form=Form.FILE, is_listed=False, meaning="names of the classes of a task"),
    RunFile(name=SPECIAL_FILE, form=Form.FILE, is_listed=False, meaning="token ids around the texts of a task"),
    RunFile(name=KEY_FILE, form=Form.FILE, is_listed=False, meaning="key of the checkpoints in memory"),
)  # fmt: skip
"""All files of a run's folder, in the order of the report."""

BY_NAME = {file.name: file for file in RUN_FILES}
