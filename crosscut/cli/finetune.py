"""`crosscut finetune`."""

from dataclasses import dataclass
from pathlib import Path

import click

from crosscut.cli.arguments import (
    OptionValue,
    RunCommand,
    all_of,
    device_option,
    has_file,
    naming_options,
    precision_option,
    run_arguments,
    tensor_option,
)
from crosscut.config import ConfigError

_TASKS = {
    "mnli": "judge whether a sentence follows from another sentence",
    "qqp": "judge whether two questions mean the same thing",
    "sst-2": "judge whether a sentence is positive",
    "rte": "judge whether a sentence follows from a text",
    "cola": "judge whether a sentence is grammatical",
    "qnli": "judge whether a sentence answers a question",
    "squad": "answer questions about a text (SQuAD 1.1 or 2.0)",
    "race": "answer multiple-choice questions about a text, with four options each",
    "table": "classify texts with your own labels, from a .tsv or .jsonl file with named columns",
}
"""Tasks with their descriptions."""

_SETTINGS = "[SETTINGS.toml]"


@click.group()
def finetune() -> None:
    """Fine-tune a trained model."""


@finetune.command()
@click.argument("arguments", nargs=-1, metavar="[FILE.jsonl ...] [section.key=value ...]")
@click.option("--model", default="", metavar="FOLDER", help="Hugging Face folder of the model, with a chat template.")
@click.option("--output", default="runs/chat", show_default=True, metavar="FOLDER", help="Folder of the run.")
@click.option(
    "--validation",
    default="",
    metavar="FILE",
    help="File with conversations for validation.  [default: every 20th conversation is held out]",
)
@click.option("--epochs", default=3.0, show_default=True, help="Number of times that all conversations are read.")
@click.option(
    "--lora-rank", default=0, show_default=True, help="Rank of low-rank adapters (LoRA); 0 trains all weights."
)
@click.option("--drop-long", is_flag=True, help="Leave out conversations that do not fit into a sequence.")
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


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options of `crosscut finetune TASK`."""

    arguments: tuple[str, ...]
    model: str
    output: str
    data: str
    train: str
    dev: str
    test: str
    seeds: int
    ensemble: bool
    epochs: float | None
    warmup: float | None
    resume: bool
    long: str = "cut"
    stride: int = 128
    threshold: float = 0.0
    text: str = ""
    pair: str = ""
    label: str = ""
    labels: str = ""

    @property
    def files(self) -> dict[str, str]:
        """Files with the examples, keyed by part: `train`, `dev` and `test`. An empty string means that the option was
        not given.
        """
        return {"train": self.train, "dev": self.dev, "test": self.test}

    def check(self, task: str) -> None:
        """Raise `ConfigError` for a missing or wrong option. A new run needs `--model`, the task `table` needs `--text`
        and `--label`, and `--seeds` has a minimum. A resumed run must not have options that it reads from its folder.
        """
        if self.resume:
            self._check_resumed()
            return
        if not self.model:
            raise ConfigError(
                f"`finetune {task}` must be given `--model`, but no model is given. Name a Hugging Face folder or a "
                "run, or pass --resume."
            )
        if self.seeds < 1:
            raise ConfigError(f"`--seeds` must be at least 1, but is {self.seeds}. Try 5.")
        if self.ensemble and self.seeds < 2:
            raise ConfigError(f"`--seeds` must be at least 2 with `--ensemble`, but is {self.seeds}. Try 5.")
        if task == "table" and not (self.text and self.label):
            missing = "text" if not self.text else "label"
            raise ConfigError(
                f"`finetune table` must be given the columns of the texts and the labels, but `--{missing}` is not "
                f"given. Pass --{missing} COLUMN."
            )

    def _check_resumed(self) -> None:
        """Raise `ConfigError` for options that a resumed run reads from its folder."""
        given = {
            "--seeds": self.seeds != 1,
            "SETTINGS.toml": has_file(self.arguments),
            **{f"--{name}": bool(getattr(self, name)) for name in ("model", "data", "train", "dev", "test", "labels")},
            **{f"--{name}": getattr(self, name) is not None for name in ("epochs", "warmup")},
        }
        if named := next((name for name, is_given in given.items() if is_given), ""):
            raise ConfigError(
                f"`{named}` must not be given with `--resume`, but is given. The run's folder already holds this "
                f"value. Remove `{named}`. You can still change settings such as layout.tensor=2."
            )


@finetune.command()
@click.argument("run", metavar="RUN")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--batch-size", default=32, show_default=True, help="Examples per forward pass.")
@tensor_option
@device_option
@precision_option
@naming_options({"layout.tensor": "--tensor", "batch_size": "--batch-size"})
def predict(run: str, file: Path, **options: OptionValue) -> None:
    """Print the predictions of a fine-tuned model for the examples in FILE.

    RUN is the folder of a run of `crosscut finetune TASK`, and FILE has the format of the task. Labels are not needed.
    Each prediction is a line of JSON.
    """
    from crosscut.finetuning.downstream.inference import print_predictions

    print_predictions(run, file, **options)


_COMMON = (
    click.option("--model", default="", metavar="PLACE", help="Hugging Face folder, run or checkpoint to start from."),
    click.option("--output", default="", metavar="FOLDER", help="Folder of the run.  [default: runs/TASK]"),
    click.option("--data", default="", metavar="FOLDER", help="Folder with the published files of the task."),
    click.option("--train", default="", metavar="FILE", help="Examples to train on, instead of those in --data."),
    click.option("--dev", default="", metavar="FILE", help="Examples that decide which checkpoint is the best."),
    click.option("--test", default="", metavar="FILE", help="Examples on which the best checkpoint is scored."),
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
        help="All labels, in the order of the class ids.  [default: the labels in the file, in alphabetical order]",
    ),
)


def _add_task(name: str, description: str) -> None:
    """Add the command of a task."""

    def command(**parameters: OptionValue) -> None:
        options = TaskOptions(**parameters)
        options.check(name)
        _finetune_task(name, options)

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


def _finetune_task(name: str, options: TaskOptions) -> None:
    """Fine-tune a model for a task, as the options say."""
    from crosscut.finetuning.downstream.job import finetune_task
    from crosscut.finetuning.downstream.settings import TaskOrder, require_course
    from crosscut.finetuning.downstream.task import TunedTask
    from crosscut.finetuning.encoding.texts import Long
    from crosscut.finetuning.tasks import TableColumns

    course = {"epochs": options.epochs, "warmup": options.warmup}
    require_course({key: value for key, value in course.items() if value is not None})
    is_file = has_file(options.arguments)
    finetune_task(
        TaskOrder(
            task=TunedTask(
                name=name,
                labels=tuple(label for label in options.labels.split(",") if label),
                columns=TableColumns(options.text, options.pair, options.label),
                threshold=options.threshold,
                stride=options.stride,
                long=Long(options.long),
            ),
            model=options.model,
            output=options.output or f"runs/{name}",
            data=options.data,
            files=options.files,
            seeds=options.seeds,
            ensemble=options.ensemble,
            epochs=options.epochs,
            warmup=options.warmup,
            resume=options.resume,
            settings=options.arguments[0] if is_file else "",
            overrides=options.arguments[is_file:],
        )
    )
