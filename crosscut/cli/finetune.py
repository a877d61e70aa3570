"""`crosscut finetune`."""

import json
from collections.abc import Mapping
from pathlib import Path

import click

from crosscut.cli.arguments import (
    LocalPath,
    OptionValue,
    RunCommand,
    all_of,
    device_option,
    has_file,
    machinery,
    naming_options,
    precision_option,
    run_arguments,
    tensor_option,
)
from crosscut.config import ConfigError
from crosscut.config.parts.head import HeadKind
from crosscut.config.system.terminal import echo

_TASKS = {
    "mnli": "judge whether a sentence follows from another sentence",
    "qqp": "judge whether two questions mean the same thing",
    "sst-2": "judge whether a sentence is positive",
    "rte": "judge whether a sentence follows from a text",
    "cola": "judge whether a sentence is grammatical",
    "qnli": "judge whether a sentence answers a question",
    "stsb": "predict how similar two sentences are, as a number from 0 to 5",
    "squad": "answer questions about a text (SQuAD 1.1 or 2.0)",
    "race": "answer multiple-choice questions about a text, with four options each",
    "table": "predict your own labels or numbers for texts, from a .tsv or .jsonl file with named columns",
}
"""Tasks with their descriptions."""

_SETTINGS = "[SETTINGS.toml]"


@click.group()
def finetune() -> None:
    """Fine-tune a trained model."""


@finetune.command()
@click.argument("arguments", nargs=-1, metavar="[FILE.jsonl ...] [section.key=value ...]")
@click.option(
    "--model",
    type=LocalPath(),
    default="",
    metavar="FOLDER",
    help="Hugging Face folder of the model, with a chat template.",
)
@click.option(
    "--output", type=LocalPath(), default="runs/chat", show_default=True, metavar="FOLDER", help="Folder of the run."
)
@click.option(
    "--validation",
    type=LocalPath(),
    default="",
    metavar="FILE",
    help="File with conversations for validation.  [default: every 20th conversation is held out]",
)
@click.option("--epochs", default=3.0, show_default=True, help="Number of times that all conversations are read.")
@click.option(
    "--lora-rank", default=0, show_default=True, help="Rank of low-rank adapters (LoRA); 0 trains all weights."
)
@click.option("--drop-long", is_flag=True, help="Leave out conversations that do not fit into a sequence.")
@click.option(
    "--allow-endless", is_flag=True, help="Also train on answers that end without a token that stops generation."
)
@click.option(
    "--allow-changed", is_flag=True, help="Also train on messages that the chat template or the tokenizer changes."
)
@click.option("--resume", is_flag=True, help="Continue the run in the folder --output, on any layout.")
def chat(arguments: tuple[str, ...], model: str, epochs: float, resume: bool, **options: OptionValue) -> None:
    """Fine-tune a model on conversations.

    Each line of a FILE is a JSON object with `messages`, in OpenAI's format. The loss covers only the assistant's
    answers. The model's own chat template turns the messages into tokens. Settings of a run, such as layout.tensor=2 or
    training.batch_size=16, replace the defaults (docs/finetuning.md).
    """
    files = tuple(word for word in arguments if "=" not in word)
    if not resume and not (files and model):
        given = "no file" if model else "no `--model`" if files else "neither"
        raise ConfigError(
            f"`finetune chat` must be given files with conversations and `--model`, but {given} is given. Name both, "
            "or pass --resume."
        )
    if not epochs > 0:
        raise ConfigError(f"`--epochs` must be above 0, but is {epochs:g}. Try 3.")
    from crosscut.finetuning.chat.job import ChatOrder, finetune_chat

    overrides = tuple(word for word in arguments if "=" in word)
    finetune_chat(ChatOrder(files=files, model=model, epochs=epochs, resume=resume, overrides=overrides, **options))


def _check(task: str, options: Mapping[str, OptionValue]) -> None:
    """Raise `ConfigError` for options of `crosscut finetune TASK` that are missing or contradict each other."""
    seeds = options["seeds"]
    if options["resume"]:
        _check_resumed(options)
        return
    if not options["model"]:
        raise ConfigError(
            f"`finetune {task}` must be given `--model`, but no model is given. Name a Hugging Face folder or a "
            "run, or pass --resume."
        )
    if seeds < 1:
        raise ConfigError(f"`--seeds` must be at least 1, but is {seeds}. Try 5.")
    if options["ensemble"] and seeds < 2:
        raise ConfigError(f"`--seeds` must be at least 2 with `--ensemble`, but is {seeds}. Try 5.")
    if task == "table" and (missing := next((name for name in ("text", "label") if not options[name]), "")):
        raise ConfigError(
            f"`finetune table` must be given the columns of the texts and the labels, but `--{missing}` is not "
            f"given. Pass --{missing} COLUMN."
        )
    if options.get("regression") and options["labels"]:
        raise ConfigError(
            "`--labels` must not be given with `--regression`, but is given. Numbers have no names. Remove one "
            "of the two."
        )


def _check_resumed(options: Mapping[str, OptionValue]) -> None:
    """Raise `ConfigError` for options that a resumed run reads from its folder."""
    given = {
        "--seeds": options["seeds"] != 1,
        "SETTINGS.toml": has_file(options["arguments"]),
        **{f"--{name}": bool(options.get(name)) for name in ("model", "data", "train", "dev", "test", "labels")},
        "--regression": bool(options.get("regression")),
        **{f"--{name}": options[name] is not None for name in ("epochs", "warmup")},
    }
    if named := next((name for name, is_given in given.items() if is_given), ""):
        raise ConfigError(
            f"`{named}` must not be given with `--resume`, but is given. The run's folder already holds this "
            f"value. Remove `{named}`. You can still change settings such as layout.tensor=2."
        )


@finetune.command()
@click.argument("run", metavar="RUN")
@click.argument("file", type=LocalPath(path_type=Path))
@click.option("--batch-size", default=32, show_default=True, help="Examples per forward pass.")
@tensor_option
@device_option
@precision_option
@naming_options({"layout.tensor": "--tensor", "batch_size": "--batch-size"})
def predict(run: str, file: Path, batch_size: int, **options: OptionValue) -> None:
    """Print the predictions of a fine-tuned model for the examples in FILE.

    RUN is the folder of a run of `crosscut finetune TASK`, and FILE has the format of the task. Labels are not needed.
    Each prediction is a line of JSON.
    """
    from crosscut.finetuning.downstream.inference import predict_file
    from crosscut.launch.processes import is_first_started

    task, predictions = predict_file(run, file, machinery(**options), batch_size=batch_size)
    name = "answer" if task.head is HeadKind.SPANS else "label"
    if is_first_started():
        for index, one in enumerate(predictions):
            found = {name: one.text, "probability": one.probability}
            row = {"index": index, **({"number": one.number} if task.head is HeadKind.NUMBER else found)}
            echo(json.dumps(row, ensure_ascii=False))


_COMMON = (
    click.option("--model", default="", metavar="PLACE", help="Hugging Face folder, run or checkpoint to start from."),
    click.option(
        "--output", type=LocalPath(), default="", metavar="FOLDER", help="Folder of the run.  [default: runs/TASK]"
    ),
    click.option(
        "--data", type=LocalPath(), default="", metavar="FOLDER", help="Folder with the published files of the task."
    ),
    click.option(
        "--train",
        type=LocalPath(),
        default="",
        metavar="FILE",
        help="Examples to train on, instead of those in --data.",
    ),
    click.option(
        "--dev", type=LocalPath(), default="", metavar="FILE", help="Examples that decide which checkpoint is the best."
    ),
    click.option(
        "--test", type=LocalPath(), default="", metavar="FILE", help="Examples on which the best checkpoint is scored."
    ),
    click.option("--seeds", default=1, show_default=True, help="Number of runs, each with a different seed."),
    click.option("--ensemble", is_flag=True, help="Also score the mean of the runs' probabilities."),
    click.option("--epochs", type=float, help="Number of times that all examples are read.  [default: 3]"),
    click.option("--warmup", type=float, help="Warm-up as a fraction of all steps.  [default: 0.06]"),
    click.option("--resume", is_flag=True, help="Continue the runs in the folder --output, on any layout."),
)
_LONG = click.option(
    "--long",
    type=click.Choice(["cut", "drop", "refuse"]),
    default="cut",
    show_default=True,
    help="For examples that are too long: cut them, leave them out of the training, or stop with an error.",
)
_OF_SPANS = (
    click.option(
        "--stride", default=128, show_default=True, help="Number of tokens that successive windows of a text share."
    ),
    click.option(
        "--threshold", default=0.0, help='Margin by which "no answer" must score higher than the best answer.'
    ),
)
_OF_TABLES = (
    click.option("--text", default="", metavar="COLUMN", help="Column of the text, or of the first of two texts."),
    click.option("--pair", default="", metavar="COLUMN", help="Column of the second text."),
    click.option("--label", default="", metavar="COLUMN", help="Column of the label."),
    click.option(
        "--labels",
        default="",
        metavar="A,B,...",
        help="All labels, in the order of the class ids.  [default: the labels in the file, in alphabetical order; "
        "numbers in numeric order]",
    ),
    click.option("--regression", is_flag=True, help="Predict the numbers in the column --label, instead of classes."),
)


def _add_task(name: str, description: str) -> None:
    """Add the command of a task."""

    def command(**options: OptionValue) -> None:
        _check(name, options)
        _finetune_task(name, **options)

    own = all_of(*_OF_SPANS) if name == "squad" else _LONG
    own = all_of(own, *_OF_TABLES) if name == "table" else own
    told = (
        f"Fine-tune a model for the task {name}: {description}.\n\nThe model may be an encoder or a decoder. "
        "SETTINGS.toml and section.key=value are settings of a run, which replace the defaults (docs/finetuning.md)."
    )
    named = finetune.command(name, cls=RunCommand, help=told, short_help=f"{description[:1].upper()}{description[1:]}.")
    named(run_arguments(_SETTINGS)(all_of(*_COMMON, own)(command)))


for _name, _description in _TASKS.items():
    _add_task(_name, _description)


def _finetune_task(name: str, arguments: tuple[str, ...], **options: OptionValue) -> None:
    """Fine-tune a model for a task, as the options say."""
    from crosscut.finetuning.downstream.job import finetune_task
    from crosscut.finetuning.downstream.settings import TaskOrder, require_course
    from crosscut.finetuning.downstream.task import TunedTask
    from crosscut.finetuning.encoding.texts import Long
    from crosscut.finetuning.tasks import TableColumns

    require_course({key: options[key] for key in ("epochs", "warmup") if options[key] is not None})
    task = TunedTask(
        name=name,
        labels=tuple(filter(None, options.pop("labels", "").split(","))),
        columns=TableColumns(*(options.pop(column, "") for column in ("text", "pair", "label"))),
        is_regression=options.pop("regression", False),
        long=Long(options.pop("long", Long.CUT)),
        **{key: options.pop(key) for key in ("threshold", "stride") if key in options},
    )
    files = {part: options.pop(part) for part in ("train", "dev", "test")}
    output = options.pop("output") or f"runs/{name}"
    is_file = has_file(arguments)
    settings = arguments[0] if is_file else ""
    overrides = arguments[is_file:]
    finetune_task(TaskOrder(task=task, files=files, output=output, settings=settings, overrides=overrides, **options))
