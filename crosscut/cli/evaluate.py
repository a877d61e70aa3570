"""`crosscut evaluate`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from crosscut.cli.arguments import (
    TASKS,
    LocalPath,
    OptionValue,
    adapter_option,
    device_option,
    echo_json,
    last_weights_option,
    machinery,
    naming_options,
    precision_option,
    task_files,
    task_option,
    tensor_option,
)
from crosscut.config import ConfigError, EvaluationConfig
from crosscut.config.evaluation import Detokenizer
from crosscut.config.system.terminal import echo, new_console

if TYPE_CHECKING:
    from crosscut.evaluation.places import EvaluationReport
    from crosscut.harness.tasks import HarnessReport

_NAMES = {
    "layout.tensor": "--tensor",
    "layout.data": "--data",
    "data.text_key": "--text-key",
    **{f"evaluation.{name}": f"--{name}" for name in ("text", "window", "limit")},
    "evaluation.overlap": "--stride",
    "evaluation.batch_size": "--batch-size",
    **{f"evaluation.{name}": f"--task {name}" for name in TASKS},
}

_PROTOCOL = ("text", "text_key", "window", "overlap", "mask_seed", "detokenizer")
"""Options that are settings of `EvaluationConfig`."""

_FOR_HARNESS = ("folder", "limit", "shots", "batch_size")
"""Options that are settings of lm-eval's tasks. Two of them, the limit and the batch size, also apply to files."""


@click.command()
@click.argument("place")
@task_option
@click.option(
    "--text", type=LocalPath(), multiple=True, metavar="FILE", help="Your own text: a file, folder or glob; repeatable."
)
@click.option("--text-key", default="text", show_default=True, help="Key or column of the text (jsonl, parquet, tsv).")
@click.option("--window", default=0, help="Tokens per window.  [default: 1024, or the model's maximum if that is less]")
@click.option(
    "--stride",
    "--overlap",
    "overlap",
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
@click.option("--harness-folder", "folder", default="", help="Folder with your own lm-eval task files.")
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
@click.option("--output", type=LocalPath(path_type=Path), help="Write scores and settings to this JSON file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@naming_options(_NAMES)
def evaluate(
    place: str,
    tasks: tuple[str, ...],
    harness: str,
    output: Path | None,
    as_json: bool,
    **options: OptionValue,
) -> None:
    """Score a model on WikiText-103, LAMBADA or your own text.

    WikiText-103 and LAMBADA are scored by the protocols of the Megatron-LM paper (arXiv 1909.08053). PLACE is a run's
    folder, one of its checkpoints, or a Hugging Face folder. The score is the same on every layout.

    A BERT with a head for masked tokens is scored on your own text: some of the words are masked, and the score is the
    mean loss of the masked tokens.
    """
    given = {name: options.pop(name) for name in _FOR_HARNESS}
    protocol = {name: options.pop(name) for name in _PROTOCOL}
    limit = 0 if harness else given["limit"]
    config = EvaluationConfig(limit=limit, batch_size=given["batch_size"], **protocol, **task_files(tasks))
    if config.has_tasks == bool(harness):
        raise ConfigError(
            "Either files (`--task`, `--text`) or lm-eval tasks (`--harness`) must be given, not both, "
            f"but {'both are' if harness else 'neither is'} given."
        )
    on = machinery(**options)
    from crosscut.launch.processes import is_first_started

    report: EvaluationReport | HarnessReport
    if harness:
        from crosscut.harness import Harness, run_harness

        report = run_harness(place, Harness(tasks=tuple(harness.split(",")), **given), on, output=output)
    else:
        from crosscut.evaluation.places import evaluate_place

        report = evaluate_place(place, config, on, output=output)
    if is_first_started():
        _show(report, as_json=as_json)


def _show(report: "EvaluationReport | HarnessReport", *, as_json: bool) -> None:
    if as_json:
        echo_json(report)
    elif "harness" in report:
        from lm_eval.utils import make_table

        echo(make_table(report["harness"]))
    else:
        from crosscut.evaluation.score_table import print_report

        print_report(report, new_console())
