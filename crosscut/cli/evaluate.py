"""`crosscut evaluate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from crosscut.cli.arguments import (
    adapter_option,
    device_option,
    echo_json,
    gathered,
    last_weights_option,
    naming_options,
    precision_option,
    tensor_option,
)
from crosscut.config import ConfigError, EvaluationConfig, Layout
from crosscut.config.checks import Settings, listed
from crosscut.config.evaluation import Detokenizer
from crosscut.config.system.terminal import echo, new_console

if TYPE_CHECKING:
    from crosscut.evaluation.places import EvaluationReport
    from crosscut.evaluation.ranks import Machinery
    from crosscut.harness.tasks import HarnessReport

_TASKS = ("wikitext103", "lambada")
_NAMES = {
    "layout.tensor": "--tensor",
    "layout.data": "--data",
    "data.text_key": "--text-key",
    **{f"evaluation.{name}": f"--{name}" for name in ("text", "window", "limit")},
    "evaluation.overlap": "--stride",
    "evaluation.batch_size": "--batch-size",
    **{f"evaluation.{name}": f"--task {name}" for name in _TASKS},
}


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of `crosscut evaluate`."""

    place: str
    tasks: tuple[str, ...]
    """Values of `--task`, each in the form `NAME=FILE`."""
    text: tuple[str, ...]
    text_key: str
    window: int
    stride: int
    mask_seed: int
    detokenizer: Detokenizer
    harness: str
    """Names of lm-eval tasks, separated by commas."""
    harness_folder: str
    limit: int
    shots: int
    batch_size: int
    tensor: int
    data: int
    device: str
    precision: str
    last_weights: bool
    adapter: str
    output: Path | None
    as_json: bool

    def protocol(self) -> EvaluationConfig:
        """Settings for the scores of texts: files, window, detokenizer and batch size. If only lm-eval tasks are given,
        the settings contain no file. Raises `ConfigError` for an invalid option.
        """
        return EvaluationConfig(
            text=self.text,
            text_key=self.text_key,
            window=self.window,
            overlap=self.stride,
            mask_seed=self.mask_seed,
            detokenizer=self.detokenizer,
            limit=0 if self.harness else self.limit,
            batch_size=self.batch_size,
            **_files(self.tasks),
        )


@click.command()
@click.argument("place")
@click.option(
    "--task", "tasks", multiple=True, metavar="NAME=FILE", help="Test set to score: wikitext103=FILE or lambada=FILE."
)
@click.option("--text", multiple=True, metavar="FILE", help="Your own text: a file, folder or glob; repeatable.")
@click.option("--text-key", default="text", show_default=True, help="Key or column of the text (jsonl, parquet, tsv).")
@click.option("--window", default=0, help="Tokens per window.  [default: 1024, or the model's maximum if that is less]")
@click.option(
    "--stride",
    "--overlap",
    default=0,
    help="Tokens by which the window moves each time; the Megatron-LM paper calls this number the overlap.  "
    "[default: 32 for WikiText-103, half a window for --text]",
)
@click.option(
    "--mask-seed",
    default=0,
    show_default=True,
    help="With a BERT: random seed that chooses which words of --text are masked.",
)
@click.option(
    "--detokenizer",
    type=click.Choice(Detokenizer.values()),
    default="paper",
    show_default=True,
    help="Rules that turn WikiText's separate words into normal text: the rules of the Megatron-LM paper, or "
    "reversible rules.",
)
@click.option("--harness", metavar="TASK,...", default="", help="Score tasks of EleutherAI's lm-eval instead of files.")
@click.option("--harness-folder", default="", help="Folder with your own lm-eval task files.")
@click.option(
    "--limit", default=0, help="Maximum number of passages of LAMBADA, or of examples per lm-eval task.  [default: all]"
)
@click.option("--shots", default=-1, help="Worked examples before each lm-eval question.  [default: the task's own]")
@click.option("--batch-size", default=8, show_default=True, help="Windows per forward pass on each data rank.")
@tensor_option
@click.option("--data", default=1, show_default=True, help="Number of data ranks: model copies that split the windows.")
@device_option
@precision_option
@last_weights_option
@adapter_option
@click.option("--output", type=click.Path(path_type=Path), help="Write scores and settings to this JSON file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@naming_options(_NAMES)
@gathered(EvaluateOptions)
def evaluate(options: EvaluateOptions) -> None:
    """Score a model on WikiText-103, LAMBADA or your own text.

    WikiText-103 and LAMBADA are scored by the protocols of the Megatron-LM paper (arXiv 1909.08053). PLACE is a run's
    folder, one of its checkpoints, or a Hugging Face folder. The score is the same on every layout.

    A BERT with a head for masked tokens is scored on your own text: some of the words are masked, and the score is the
    mean loss of the masked tokens.
    """
    config = options.protocol()
    if config.has_tasks == bool(options.harness):
        raise ConfigError(
            "Either files (`--task`, `--text`) or lm-eval tasks (`--harness`) must be given, not both, "
            f"but {'both are' if options.harness else 'neither is'} given."
        )
    layout = Layout(tensor=options.tensor, data=options.data)
    from crosscut.evaluation.ranks import Machinery
    from crosscut.launch.processes import is_first_started

    on = Machinery(
        layout=layout,
        device=options.device,
        precision=options.precision,
        last_weights=options.last_weights,
        adapter=options.adapter,
    )
    report = _run_harness(options, on) if options.harness else _evaluate(options, config, on)
    if is_first_started():
        _show(report, as_json=options.as_json)


def _run_harness(options: EvaluateOptions, on: "Machinery") -> "HarnessReport":
    from crosscut.harness import Harness, run_harness

    harness = Harness(
        tasks=tuple(options.harness.split(",")),
        folder=options.harness_folder,
        limit=options.limit,
        shots=options.shots,
        batch_size=options.batch_size,
    )
    return run_harness(options.place, harness, on, output=options.output)


def _evaluate(options: EvaluateOptions, config: EvaluationConfig, on: "Machinery") -> "EvaluationReport":
    from crosscut.evaluation.places import evaluate_place

    return evaluate_place(options.place, config, on, output=options.output)


def _show(report: "EvaluationReport | HarnessReport", *, as_json: bool) -> None:
    if as_json:
        echo_json(report)
    elif "harness" in report:
        from lm_eval.utils import make_table

        echo(make_table(report["harness"]))
    else:
        from crosscut.evaluation.score_table import print_report

        print_report(report, new_console())


def _files(tasks: tuple[str, ...]) -> Settings:
    """Map each task's name to its file. Raises `ConfigError` for an unknown task and for a task that is named twice."""
    files: dict[str, str] = {}
    for task in tasks:
        name, equals, file = task.partition("=")
        if name not in _TASKS or not equals or not file:
            ways = listed(f"`{known}=FILE`" for known in _TASKS)
            raise ConfigError(f"`--task` must be {ways}, but is `{task}`. To score another text, use `--text`.")
        if name in files:
            raise ConfigError(
                f"`--task {name}=FILE` must be given once, but names both `{files[name]}` and `{file}`. Remove one."
            )
        files[name] = file
    return files
