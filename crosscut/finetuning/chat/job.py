"""Fine-tune a decoder on conversations: read and pack them, start or join the ranks, train, and write the report.

Fine-tuning uses the training loop of `crosscut train`, with its checkpoints and metrics. The run's folder is therefore
an ordinary run: `generate`, `evaluate`, `serve` and `checkpoint` read it. The packed conversations are kept in the
run's folder, so a resumed run does not need the original files.
"""

import dataclasses
import json
import math
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from crosscut.checkpoint import mark_passed_over
from crosscut.checkpoint.storage import LocalFolder
from crosscut.config import (
    ConfigError,
    DataError,
    ResolvedRun,
    RunConfig,
    load_run,
    write_toml,
)
from crosscut.config.conventions import CHAT_FOLDER, CONFIG_FILE, INITIAL_FOLDER, TOKENS_FOLDER
from crosscut.config.published.folders import GENERATION_FILE, TOKENIZER_FILE, is_published
from crosscut.config.recipes import steps_between_validations
from crosscut.config.system.console import facts_panel
from crosscut.config.system.deletion import make_folder
from crosscut.config.system.files import copy_file
from crosscut.config.system.terminal import echo, new_console, typed_command
from crosscut.config.system.wording import counted, short
from crosscut.data import Tokenizer
from crosscut.finetuning.chat.batches import ChatBatches
from crosscut.finetuning.chat.checking import Allowed, AnswerCheck
from crosscut.finetuning.chat.conversations import read_conversations
from crosscut.finetuning.chat.masking import EncodedConversation, Masker
from crosscut.finetuning.chat.packing import PackedChats, pack
from crosscut.launch.processes import choose_device, is_first_started
from crosscut.logbook.objects import write_object
from crosscut.logbook.schema import SUMMARY_FILE
from crosscut.pretrained import export_adapter, find_model, keep_companions, notices_of, require_weights
from crosscut.pretrained.adapter_settings import CONFIG_NAME
from crosscut.pretrained.adapters import TENSORS_NAME
from crosscut.pretrained.companions import keep_stop, speech
from crosscut.training.driving.driver import Driver, PreparedRun, RunParts, load_initial_weights
from crosscut.training.in_memory import InMemory
from crosscut.training.loads.picture import plot_loads
from crosscut.training.loop import Loop, RunOutcome
from crosscut.training.precision import resolve_on
from crosscut.training.requirements import require_capabilities, require_for_tuning, require_own_names
from crosscut.training.resuming import (
    Resume,
    choose_checkpoint,
    describe_changes,
    identity_of_settings,
    require_resumable,
)
from crosscut.training.step import Trainer
from crosscut.training.teachers.record import teacher_record
from crosscut.training.teachers.requirements import find_teacher
from crosscut.training.watching.banner import COUNTS, device_name, model_rows
from crosscut.training.watching.run_report import plot_losses, summarize

ADAPTER_FOLDER = "adapter"
"""Folder of the trained adapter in a run's folder, in PEFT's format."""
_PARTS = ("training", "validation")
_HELD_OUT = 20
"""If no validation file is given, one conversation in this many is held out for validation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOrder:
    """Arguments of one `crosscut finetune chat` command."""

    files: tuple[str, ...]
    """Files with the conversations to train on; empty for a resumed run."""
    validation: str = ""
    """File with the conversations to validate on. If empty, every 20th conversation is held out for validation."""
    model: str = ""
    """Hugging Face folder of the model."""
    output: str
    """Folder of the run."""
    epochs: float = 3.0
    """Number of times that the run reads all conversations."""
    lora_rank: int = 0
    """Rank of the adapters; 0 trains all weights."""
    drop_long: bool = False
    """Whether to leave out conversations that do not fit into a sequence."""
    allow_endless: bool = False
    """Whether to train on answers that end without a token that stops generation."""
    allow_changed: bool = False
    """Whether to train on messages that the chat template or the tokenizer changes."""
    resume: bool = False
    overrides: tuple[str, ...] = ()
    """Settings of the run, `section.key=value`, which replace the defaults."""


def finetune_chat(order: ChatOrder) -> None:
    """Fine-tune a model on conversations, on the ranks of the layout.

    Conversations, model and settings are checked before any process starts. Raises `ConfigError`, `LayoutError`,
    `DataError`, `CheckpointError` or `TrainingError`, and the errors of `Driver.drive`.
    """
    run = _run_of(order)
    run.layout.require_one_stage("finetune")
    resolved = resolve_on(run, choose_device(run.training.device))
    require_capabilities(resolved)
    require_for_tuning(run)
    again = f"{typed_command()} finetune chat --resume --output {shlex.quote(order.output)}"
    Driver(
        run=resolved.config,
        checkpoints=lambda: [run.checkpoints_folder],
        again=again,
        prepare=partial(_prepare, order, resolved),
    ).drive(order.resume)
    if is_first_started():
        _finish(run)


def _run_of(order: ChatOrder, num_sequences: int = 0) -> RunConfig:
    """Return the run that the command asks for. With `num_sequences`, the number of packed training sequences, the run
    has as many steps as the epochs of `order` need.
    """
    output = Path(order.output)
    if order.resume:
        if not (output / CONFIG_FILE).is_file():
            raise ConfigError(
                f"`--output` must name the folder of a run to resume, but `{output}` has no `{CONFIG_FILE}`. Check the "
                "path, or start the run without --resume."
            )
        return load_run(output / CONFIG_FILE, (*order.overrides, f"output.folder={json.dumps(order.output)}"))
    if not is_published(Path(order.model)):
        raise ConfigError(
            f"`--model` must name a Hugging Face folder, but `{order.model}` has no `config.json`. Check the path. "
            "To start from a run of Crosscut, first export the run with `crosscut checkpoint export`."
        )
    run = load_run(_settings(order), order.overrides)
    _require_supported(run, order.overrides)
    if not num_sequences or any(override.startswith("training.steps=") for override in order.overrides):
        return run
    steps = max(1, math.ceil(order.epochs * num_sequences / run.training.batch_size))
    return load_run(_settings(order, steps), order.overrides)


def _settings(order: ChatOrder, steps: int = 0) -> dict[str, dict[str, object]]:
    """Return the default settings. `steps` is the number of steps; 0 means that the number is not known yet."""
    return {
        "model": {"dropout": 0.0, "lora_rank": order.lora_rank},
        "training": {
            "initialize_from": order.model, "document_mask": True, "batch_size": 8, "sequence_length": 1024,
            "validate_every": steps and steps_between_validations(steps), "steps": max(1, steps), "seed": 1234,
        },
        "optimizer": {
            "learning_rate": 2e-4 if order.lora_rank else 2e-5, "min_learning_rate": 0.0, "schedule": "linear",
            "warmup_steps": steps // 30, "weight_decay": 0.0,
        },
        "output": {"folder": order.output, "sample_tokens": 0},
    }  # fmt: skip


def _require_supported(run: RunConfig, overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for settings that have no effect, or are not allowed, when fine-tuning on conversations."""
    if told := next((each for each in overrides if each.startswith("data.")), ""):
        raise ConfigError(
            f"`data` must not be set for `finetune chat`, but `{told}` is given. The command reads conversations only "
            f"from the files in its arguments. Remove `{told}`."
        )
    if not run.training.document_mask:
        raise ConfigError(
            "`training.document_mask` must be true for `finetune chat`, but is false. Conversations in the "
            "same sequence must not see each other. Remove `training.document_mask`."
        )
    if run.teacher.cache:
        raise ConfigError(
            f"`teacher.cache` must be empty for `finetune chat`, but is `{run.teacher.cache}`. Logits are stored for "
            "the token shards of `crosscut train`. Remove `teacher.cache`."
        )
    if run.evaluation.has_tasks:
        raise ConfigError(
            "`evaluation` must name no files for `finetune chat`, but names some. Remove these settings, and score "
            "the tuned model with `crosscut evaluate`."
        )


def _prepare(order: ChatOrder, resolved: ResolvedRun, resume: Resume, memory: InMemory) -> "list[_ChatRun]":
    """Pack the conversations of a new run, and find the checkpoint from which a resumed run continues."""
    if resume and not order.resume:  # the ranks start again after a hang
        order = dataclasses.replace(order, resume=True)
        resolved = resolved.with_config(_run_of(order))
    folder = Path(order.output)
    require_own_names(folder, is_new=not resume)
    resolved.config.require_objective()
    good = choose_checkpoint(resolved.config, resume, memory, option="--output")
    if good is not None:
        packed, run = _stored(folder), resolved.config
    else:
        require_weights(resolved.config.model, Path(order.model))
        for notice in notices_of(Path(order.model)):
            echo(f"crosscut: {notice}", err=True)
        packed, end = _packed(order, resolved.config)
        run = _run_of(order, packed[0].num_sequences)
    identity = {**identity_of_settings(run), "data.chat": [part.fingerprint for part in packed]}
    final, done = resolved.with_config(run), 0
    tokenizer = folder / TOKENS_FOLDER if good else Path(run.training.initialize_from)
    teacher = find_teacher(final, Tokenizer.load(tokenizer / TOKENIZER_FILE))
    record = teacher_record(teacher)
    if good is None:
        _fill_folder(run, folder, packed, end)
    else:
        done = require_resumable(run, good.folder, identity, may_be_all=resume == "auto").step
        mark_passed_over(good)
        for text in describe_changes(run, good.manifest, record):
            echo(text, err=True)
    _print_banner(final, packed, done)
    checkpoint = good.folder if good else None
    return [_ChatRun(run=final, identity=identity | record, checkpoint=checkpoint, done=done, teacher=teacher)]


def _packed(order: ChatOrder, run: RunConfig) -> tuple[tuple[PackedChats, PackedChats], int | None]:
    """Read, encode, check and pack the conversations to train on and to validate on. Also returns the id that ends all
    answers and becomes a stop of the run, or None if no id does.
    """
    path, length = Path(order.model) / TOKENIZER_FILE, run.training.sequence_length
    masker = Masker(path)
    encoded = [masker.encode(each) for each in read_conversations(order.files)]
    if order.validation:
        held_out = [masker.encode(each) for each in read_conversations([order.validation])]
    else:
        if len(encoded) < 2:
            raise DataError(
                f"`{order.files[0]}` must hold at least 2 conversations, because one is held out for validation, but "
                "holds 1. Add conversations, or pass --validation."
            )
        held_out = encoded[_HELD_OUT - 1 :: _HELD_OUT] or encoded[-1:]
        kept = {id(each) for each in held_out}
        encoded = [each for each in encoded if id(each) not in kept]
    if order.drop_long:
        encoded, held_out = (_short(part, length) for part in (encoded, held_out))
    spoken = speech(path, [path.parent])
    check = AnswerCheck((*encoded, *held_out), Tokenizer.load(path), spoken, run.model.vocab_size)
    end = check.run(Allowed(order.allow_endless, order.allow_changed), is_marked=masker.is_marked)
    training, validation = (pack(part, length=length, padding=spoken.end_of_text) for part in (encoded, held_out))
    return (training, validation), end


def _short(conversations: Sequence[EncodedConversation], length: int) -> list[EncodedConversation]:
    """Return the conversations that fit into a sequence. Raises `DataError` if none fits."""
    kept = [each for each in conversations if len(each.ids) - 1 <= length]
    if dropped := len(conversations) - len(kept):
        echo(f"{dropped} of {len(conversations)} conversations are too long and are left out.", err=True)
    if not kept:
        raise DataError(
            f"At least one conversation must fit into `training.sequence_length` ({length} tokens), but none does. "
            "Raise `training.sequence_length`."
        )
    return kept


def _fill_folder(run: RunConfig, folder: Path, packed: tuple[PackedChats, PackedChats], end: int | None) -> None:
    """Write the run's config, tokenizer, packed conversations, and `end`, a further stop of the model."""
    initial = Path(run.training.initialize_from)
    make_folder(folder, CHAT_FOLDER)
    for name, part in zip(_PARTS, packed, strict=True):
        part.save(folder / CHAT_FOLDER / f"{name}.npz")
    keep_companions(initial, folder / INITIAL_FOLDER)
    if end is not None:
        keep_stop(folder / INITIAL_FOLDER, end)
    make_folder(folder, TOKENS_FOLDER)
    copy_file(initial / TOKENIZER_FILE, folder / TOKENS_FOLDER / TOKENIZER_FILE)
    write_toml(run, folder / CONFIG_FILE)


def _stored(folder: Path) -> tuple[PackedChats, PackedChats]:
    training, validation = (PackedChats.load(folder / CHAT_FOLDER / f"{name}.npz") for name in _PARTS)
    return training, validation


def _print_banner(run: ResolvedRun, packed: tuple[PackedChats, PackedChats], done: int) -> None:
    training, (chats, held_out) = run.training, packed
    kind = f"adapters of rank {run.model.lora_rank}" if run.model.lora_rank else "all weights"
    steps = f"{training.steps:,} steps of {training.batch_size:,} x {training.sequence_length:,} tokens"
    rows = [
        *model_rows(run.config),
        ("trained", kind),
        ("answers", f"{_answers(chats)} for training, {_answers(held_out)} for validation"),
        ("training", f"{steps}{f', {done:,} of them done' if done else ''}"),
        ("folder", run.config.output.folder),
    ]
    new_console().print(facts_panel("finetune chat", rows))


def _answers(packed: PackedChats) -> str:
    return f"{short(packed.num_targets, COUNTS)} tokens in {counted(packed.num_sequences, 'sequence')}"


class _ChatRun(PreparedRun):
    """Fine-tuning run on conversations, ready to train."""

    def initialize(self, trainer: Trainer) -> None:
        """Load the weights of the model from which fine-tuning starts."""
        load_initial_weights(trainer)

    def parts(self, trainer: Trainer) -> RunParts:
        """Read the packed conversations, and make the run's parts on this rank."""
        run = self.run.config
        return RunParts(batches=ChatBatches(run, *_stored(Path(run.output.folder)), trainer.mesh), finish=_write_report)


def _write_report(loop: Loop, outcome: RunOutcome) -> str:
    """Write the plot and the summary of a run, on the first rank. Raises `CheckpointError` if the last checkpoint is
    not written.
    """
    run, folder, device = loop.run, loop.folder, loop.mesh.device
    loop.checkpoints.saver.require_saved()
    if not loop.mesh.is_first_rank:
        return ""
    summary = summarize(run, outcome, device)
    plot_losses(folder)
    plot_loads(folder)
    write_object(folder / SUMMARY_FILE, summary)
    rows = [
        *model_rows(run),
        ("device", device_name(device)),
        ("loss", f"{outcome.before.loss:.4f} before, {outcome.after.loss:.4f} after; per token of the answers"),
    ]
    new_console().print(facts_panel("done", rows))
    return ""


def _finish(run: RunConfig) -> None:
    """Write the adapter of a finished run, and print the commands to type next."""
    folder = Path(run.output.folder)
    if run.model.lora_rank:
        adapter = LocalFolder(folder / ADAPTER_FOLDER)
        if left := adapter.remove(CONFIG_NAME, lambda name: name in (CONFIG_NAME, TENSORS_NAME, GENERATION_FILE)):
            raise ConfigError(f"The trained adapter must be written to `{adapter}`. {left} Then resume the run.")
        export_adapter(find_model(folder), adapter, base=run.training.initialize_from)
    for line in _next(run):
        echo(line)


def _next(run: RunConfig) -> Iterator[str]:
    command, folder = typed_command(), shlex.quote(run.output.folder)
    yield f"next   {command} serve {folder}"
    yield f"       {command} checkpoint export {folder} {folder}-merged"
    if run.model.lora_rank:
        initial = shlex.quote(run.training.initialize_from)
        yield f"       {command} serve {initial} --adapter {folder}/{ADAPTER_FOLDER}"
