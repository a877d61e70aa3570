"""`crosscut finetune`."""

from dataclasses import dataclass

import click

from crosscut.cli.arguments import gathered, require_serving
from crosscut.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of `crosscut finetune chat`."""

    arguments: tuple[str, ...]
    model: str
    output: str
    validation: str
    epochs: float
    lora_rank: int
    drop_long: bool
    resume: bool

    @property
    def files(self) -> tuple[str, ...]:
        """Files with conversations."""
        return tuple(word for word in self.arguments if "=" not in word)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Settings of the run, `section.key=value`."""
        return tuple(word for word in self.arguments if "=" in word)


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
@gathered(ChatOptions)
def chat(options: ChatOptions) -> None:
    """Fine-tune a model on conversations.

    Each line of a FILE is a JSON object with `messages`, in OpenAI's format. The loss covers the answers of the
    assistant only. The model's own chat template turns the messages into tokens. Settings of a run, such as
    layout.tensor=2 or training.batch_size=16, replace the defaults (docs/finetuning.md).
    """
    if not options.resume and not (options.files and options.model):
        given = "no file" if options.model else "no `--model`" if options.files else "neither"
        raise ConfigError(
            f"`finetune chat` must be given files with conversations and `--model`, but {given} is given. Name both, "
            "or pass --resume."
        )
    if not options.epochs > 0:
        raise ConfigError(f"`--epochs` must be above 0, but is {options.epochs:g}. Try 3.")
    require_serving("finetune chat")
    from crosscut.finetuning.chat.job import ChatOrder, finetune_chat

    finetune_chat(
        ChatOrder(
            files=options.files,
            validation=options.validation,
            model=options.model,
            output=options.output,
            epochs=options.epochs,
            lora_rank=options.lora_rank,
            drop_long=options.drop_long,
            resume=options.resume,
            overrides=options.overrides,
        )
    )
