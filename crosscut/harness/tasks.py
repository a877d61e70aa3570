"""Evaluation on lm-eval's tasks. The tasks are looked up before the ranks start. Then every rank runs all tasks."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, final

from crosscut.config import ConfigError
from crosscut.config.checks import require_at_least
from crosscut.config.system.extras import install_command
from crosscut.evaluation.places import ModelReport, described, require_writable, write_report
from crosscut.evaluation.ranks import Machinery, find_scored, with_model
from crosscut.model import GPT
from crosscut.pretrained import ModelSource

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

_KEPT = ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better")
"""Keys of lm-eval's results that the report keeps."""


@dataclass(frozen=True, kw_only=True)
class Harness:
    """Tasks for lm-eval and their options. Raises `ConfigError` for an option that is out of range."""

    tasks: tuple[str, ...]
    folder: str = ""
    """Folder with the user's own task files; empty if there are none."""
    limit: int = 0
    """Maximum number of examples per task; 0 means all examples."""
    shots: int = -1
    """Number of worked examples before each question; -1 means the number in the task's file."""
    batch_size: int = 8

    def __post_init__(self) -> None:
        require_at_least("--limit", self.limit, 0)
        require_at_least("--shots", self.shots, -1)
        require_at_least("--batch-size", self.batch_size, 1)


@final
class HarnessReport(ModelReport):
    """Report of lm-eval's tasks, as values for JSON."""

    batch_size: int
    harness: Mapping[str, object]


def run_harness(place: str, harness: Harness, on: Machinery, *, output: Path | None = None) -> HarnessReport:
    """Run lm-eval's tasks with the model at `place`. Returns the report, and writes the report to `output` as JSON
    unless `output` is None.

    Raises `ConfigError` if lm-eval is not installed or does not know a task, and the errors of `evaluate_place`.
    """
    require_writable(output)
    require_installed("`--harness`")

    def prepare() -> tuple[ModelSource, Harness]:
        source = find_scored(place, on)
        _require_tasks(harness)
        return source, harness

    source, found = with_model(on, prepare, _run)
    report: HarnessReport = {
        **described(place, source, on),
        "batch_size": harness.batch_size,
        "harness": {"lm-eval": version("lm-eval"), "limit": harness.limit or None, **found},
    }
    write_report(report, output)
    return report


def _run(model: GPT, source: ModelSource, harness: Harness) -> dict[str, object]:
    from lm_eval import simple_evaluate

    from crosscut.harness.adapter import CrosscutLM

    first = model.mesh.is_first_rank
    if not first:
        logging.getLogger("lm_eval").setLevel(logging.CRITICAL)
    found = simple_evaluate(
        model=CrosscutLM(model, source, batch_size=harness.batch_size),
        tasks=list(harness.tasks),
        num_fewshot=None if harness.shots < 0 else harness.shots,
        limit=harness.limit or None,
        bootstrap_iters=100_000 if first else 0,
        log_samples=False,
        task_manager=_task_manager(harness),
    )
    kept = {key: found[key] for key in _KEPT if key in found} if found else {}
    report: dict[str, object] = json.loads(json.dumps(kept, default=str))
    return report


def _task_manager(harness: Harness) -> "TaskManager":
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=harness.folder or None)


def require_installed(asked: str) -> None:
    """Raise `ConfigError` if lm-eval is not installed. The message begins with the command or option in `asked`."""
    if find_spec("lm_eval") is None:
        raise ConfigError(f"{asked} needs lm-eval, but lm-eval is not installed. Run `{install_command('harness')}`.")


def _require_tasks(harness: Harness) -> None:
    """Raise `ConfigError` for a task that lm-eval does not know. The message names the task."""
    if harness.folder and not Path(harness.folder).is_dir():
        raise ConfigError(
            f"`--harness-folder` must be a folder with task files, but `{harness.folder}` is not a folder."
        )
    known = _task_manager(harness).all_tasks
    for task in harness.tasks:
        if task not in known:
            close = get_close_matches(task, known, n=1)
            hint = f"The nearest is `{close[0]}`." if close else "`lm-eval ls tasks` lists all tasks."
            raise ConfigError(f"`--harness` must name tasks of lm-eval, but `{task}` is unknown. {hint}")
