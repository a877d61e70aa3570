"""Files in the folder of a fine-tuned run.

| file | content |
|---|---|
| `task.json` | the task, the files of its parts, the seeds and the settings |
| `data/` | the encoded examples, and the texts to which predictions refer. A resumed run needs no other files |
| `seed-N/` | the run of one seed. If there is only one seed, the folder itself is the run |
| `outputs-dev.npy`, `outputs-test.npy` | outputs of the best checkpoint, in the folder of a seed |
| `summary.json` | scores of the best checkpoint, in the folder of a seed. The file marks a complete seed |
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from crosscut.checkpoint import Folder, list_checkpoints
from crosscut.checkpoint.folders import remove_checkpoint
from crosscut.checkpoint.format.manifest import step_of
from crosscut.config import CheckpointError, ConfigError, RunConfig, load_run, write_json, write_whole
from crosscut.config.errors import DataError
from crosscut.config.parts.head import HeadKind
from crosscut.config.system.deletion import make_folder
from crosscut.config.system.files import open_own, parse_json, read_json, read_lines
from crosscut.config.system.records import from_json, to_json
from crosscut.config.system.terminal import echo
from crosscut.finetuning.downstream.predictions import Outputs
from crosscut.finetuning.downstream.task import DEV, Example, TunedTask
from crosscut.finetuning.encoding.rows import EncodedRows
from crosscut.finetuning.tasks import ChoiceExample, SpanExample, TextExample
from crosscut.logbook.schema import SUMMARY_FILE

TASK_FILE, DATA_FOLDER = "task.json", "data"

_KINDS: Mapping[HeadKind, type[Example]] = {HeadKind.SPANS: SpanExample, HeadKind.CHOICE: ChoiceExample}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskRuns:
    """Description of a fine-tuning run, kept in `task.json`."""

    task: TunedTask
    run: RunConfig
    """Settings of the runs, with the seed of the first run and the folder of all runs."""
    model: str
    """Path of the model from which fine-tuning starts."""
    files: Mapping[str, str]
    """File with the examples of each part, keyed by the part's name (`PARTS`)."""
    padding: int
    """Token id that fills up short rows."""
    num_seeds: int = 1
    ensemble: bool = False

    @property
    def folder(self) -> Path:
        """Folder of all runs."""
        return Path(self.run.output.folder)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds of the runs."""
        return tuple(self.run.training.seed + number for number in range(self.num_seeds))

    def run_of(self, seed: int) -> RunConfig:
        """Return the settings of the run of a seed."""
        run = dataclasses.replace(self.run, training=dataclasses.replace(self.run.training, seed=seed))
        if self.num_seeds == 1:
            return run
        output = dataclasses.replace(run.output, folder=f"{run.output.folder}/seed-{seed}")
        place = f"{run.checkpoint.folder}/seed-{seed}" if run.checkpoint.folder else ""
        return dataclasses.replace(run, output=output, checkpoint=dataclasses.replace(run.checkpoint, folder=place))

    def save(self) -> None:
        """Write the description."""
        write_json(self.folder / TASK_FILE, self)

    @classmethod
    def load(cls, folder: Path, overrides: Sequence[str] = ()) -> "TaskRuns":
        """Read the description in a folder. `overrides` replace settings of the runs. Raises `ConfigError` if the
        folder has no description, or if the description or a setting is invalid.
        """
        path = folder / TASK_FILE
        if not path.is_file():
            raise ConfigError(
                f"`{folder}` must be the folder of a run of `crosscut finetune TASK`, but has no `{TASK_FILE}`. Check "
                "the path."
            )
        table = read_json(path)
        try:
            settings = load_run(table["run"], (*overrides, f"output.folder={json.dumps(str(folder))}"))
            return dataclasses.replace(from_json(cls, table), run=settings)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"`{path}` must describe a fine-tuning run, but cannot be read: {error}. Restore the file."
            ) from None

    def rows(self, part: str) -> EncodedRows:
        """Read the encoded examples of a part."""
        return EncodedRows.load(self.folder / DATA_FOLDER / f"{part}.npz")

    def examples(self, part: str) -> tuple[Example, ...]:
        """Read the texts of a part's examples, which `save_part` wrote with `is_predicted`. Raises `DataError` if the
        file is damaged.
        """
        path = self.folder / DATA_FOLDER / f"{part}.jsonl"
        kind: type[Example] = _KINDS.get(self.task.head, TextExample)
        try:
            return tuple(from_json(kind, parse_json(line)) for line in read_lines(path) if line)
        except (OSError, ValueError) as error:
            raise DataError(
                f"`{path}` must hold the examples of the run, but cannot be read: {error}. Remove the folder, and "
                "start the run again."
            ) from None

    def save_part(self, part: str, rows: EncodedRows, examples: Sequence[Example], *, is_predicted: bool) -> None:
        """Write the encoded examples of a part. Also write their texts if `is_predicted` says that the run makes
        predictions for this part.
        """
        folder = make_folder(self.folder, DATA_FOLDER)
        rows.save(folder / f"{part}.npz")
        if is_predicted:
            lines = (json.dumps(to_json(example)) for example in examples)
            write_whole(folder / f"{part}.jsonl", "".join(f"{line}\n" for line in lines))


def save_outputs(run: RunConfig, part: str, outputs: Outputs) -> None:
    """Write the outputs of a run's best checkpoint for one part of the examples."""
    with open_own(Path(run.output.folder) / f"outputs-{part}.npy", "wb") as file:
        np.save(file, outputs.astype(np.float32), allow_pickle=False)


def load_outputs(run: RunConfig, part: str) -> Outputs:
    """Read the outputs of a run's best checkpoint for one part of the examples. Raises `DataError` if the file is
    damaged.
    """
    path = Path(run.output.folder) / f"outputs-{part}.npy"
    try:
        with path.open("rb") as file:
            found: Outputs = np.load(file, allow_pickle=False).astype(np.float64)
            return found
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"`{path}` must hold the outputs of the run, but cannot be read: {error}. Remove `{SUMMARY_FILE}` in the "
            "same folder, and resume the run."
        ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedResult:
    """Result of a complete run of one seed, kept in `summary.json`."""

    seed: int
    steps: int
    best_step: int
    """Step with the best development score."""
    scores: Mapping[str, Mapping[str, float]]
    """Scores of the best step's checkpoint, by part and name."""
    layout: str
    device: str
    versions: Mapping[str, str]
    """Versions of the packages, by name."""
    training_seconds: float
    """Seconds of the training since its last start."""
    constant: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Prediction that all examples of a part get although their labels differ, by part (`constant_prediction`). Parts
    whose predictions differ are missing."""


def result_of(run: RunConfig) -> SeedResult | None:
    """Return the result of a seed's run, or None if the run is not complete."""
    path = Path(run.output.folder) / SUMMARY_FILE
    if not path.is_file():
        return None
    try:
        found = from_json(SeedResult, read_json(path))
    except ValueError:  # the summary of another kind of run
        return None
    return found if found.steps == run.training.steps else None


def results_of(kept: TaskRuns) -> dict[int, SeedResult]:
    """Return the results of the runs that are complete, by seed."""
    found = {seed: result_of(kept.run_of(seed)) for seed in kept.seeds}
    return {seed: result for seed, result in found.items() if result is not None}


def best_seed(kept: TaskRuns, results: Mapping[int, SeedResult]) -> int:
    """Return the seed with the best development score."""
    return max(results, key=lambda seed: results[seed].scores[DEV][kept.task.score_names[0]])


def keep_best(run: RunConfig, best: int) -> Folder:
    """Keep the checkpoint of a run's best step and remove all other checkpoints. Returns the folder of the kept
    checkpoint. Raises `CheckpointError` if the checkpoint of the best step is missing.
    """
    kept = None
    for checkpoint in list_checkpoints(run.checkpoints_folder):
        if step_of(checkpoint.name) == best:
            kept = checkpoint
        elif left := remove_checkpoint(checkpoint):
            echo(f"crosscut: {left}", err=True)
    if kept is None:
        raise CheckpointError(
            f"`{run.checkpoints_folder}` must hold the checkpoint of step {best}, the step with the best score, but "
            "does not. Start the run again."
        )
    return kept
