"""Preparation of a training run on texts: its tokens and vocabulary, its folder, and notes about its settings."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from crosscut.checkpoint import GoodCheckpoint, mark_passed_over
from crosscut.config import ConfigError, ModelConfig, RunConfig, write_toml
from crosscut.config.conventions import CONFIG_FILE, INITIAL_FOLDER
from crosscut.config.published.folders import TOKENIZER_FILE, is_published, reason_against_export
from crosscut.config.system.deletion import claim
from crosscut.data import Tokenizer, Tokens, open_tokens, prepare
from crosscut.logbook.schema import WATCH_FOLDER
from crosscut.planner.messages.traffic import reason_against_halves
from crosscut.planner.time import bubble_share
from crosscut.pretrained import keep_companions, model_in, notices_of, require_weights


def fill_folder(run: RunConfig, good: GoodCheckpoint | None) -> None:
    """Create the run's folder. For a new run, also write its config. For a resumed run, mark the damaged checkpoints
    that the run skips.
    """
    folder = Path(run.output.folder)
    folder.mkdir(parents=True, exist_ok=True)
    claim(folder, WATCH_FOLDER)
    if good is not None:  # the old config stays until this run has written its first checkpoint
        mark_passed_over(good)
        return
    if run.training.initialize_from:
        keep_companions(Path(run.training.initialize_from), folder / INITIAL_FOLDER)
    write_toml(run, folder / CONFIG_FILE)


def tokens_of(run: RunConfig, *, is_resumed: bool) -> Tokens:
    """Return the tokens of the run. A new run prepares its tokens."""
    folder = Path(run.tokens_folder)
    if is_resumed and folder.exists():  # the raw text may be gone by now
        return open_tokens(run.data, folder, verify=run.data.verify)
    return prepare(run.data, folder, seed=run.training.seed)


def describe_vocabulary(run: RunConfig, tokens: Tokens) -> Iterator[str]:
    """Yield a note if the trained tokenizer has fewer entries than `data.vocab_size`, so that the model is smaller than
    planned. Yield another note if `model.vocab_size` is more than twice the size of the tokenizer's vocabulary, and
    more than twice the size that was requested for a trained tokenizer.
    """
    size, requested = run.model.vocab_size, tokens.manifest.settings.trained_vocab_size
    if run.data.text and requested and tokens.vocab_size < requested and not size:
        yield (
            f"The tokenizer has {tokens.vocab_size:,} entries instead of the {requested:,} of `data.vocab_size`, "
            "because no further pair of tokens occurs more than once in the text. The model gets the smaller "
            f"vocabulary. To keep the planned size, set model.vocab_size={requested}."
        )
    if size > 2 * max(tokens.vocab_size, requested):
        is_ready = run.data.tokens or run.data.mixture
        remedy = "Prepare the tokens with" if is_ready else "Set `data.tokenizer` to"
        yield (
            f"`model.vocab_size` is {size:,}, but the tokenizer has only {tokens.vocab_size:,} entries. The other "
            f"{size - tokens.vocab_size:,} rows of the embedding and of the output projection cost memory and time, "
            f"but no text uses them. {remedy} the tokenizer of the model, or set model.vocab_size=0 to use the "
            "tokenizer's size."
        )


def with_vocabulary(run: RunConfig, tokens: Tokens) -> RunConfig:
    """Return the run with `model.vocab_size` filled in: 0 is replaced by the vocabulary size of the tokens. Raises
    `ConfigError` if `model.vocab_size` is smaller than the vocabulary of the tokens.
    """
    size = run.model.vocab_size or tokens.vocab_size
    if size < tokens.vocab_size:
        raise ConfigError(
            f"`model.vocab_size` must be at least the size of the tokenizer's vocabulary ({tokens.vocab_size}), but is "
            f"{size}. Remove `model.vocab_size` to use the tokenizer's size."
        )
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=size))


def require_initial_weights(run: RunConfig, tokens: Tokens) -> tuple[str, ...]:
    """Check `training.initialize_from`: it must be a Hugging Face folder with weights of this model and, if it has a
    tokenizer, the same token ids as `tokens`. Raises `ConfigError` or `CheckpointError`. Returns lines for the user
    about the folder's files.
    """
    folder = Path(run.training.initialize_from)
    if not is_published(folder):
        raise ConfigError(
            f"`training.initialize_from` must name a Hugging Face folder, but `{folder}` has no `config.json`. Check "
            "the path."
        )
    require_weights(run.model, folder)
    theirs = folder / TOKENIZER_FILE
    if theirs.is_file() and not tokens.tokenizer().has_ids_of(Tokenizer.load(theirs)):
        raise ConfigError(
            f"`data.tokens` must be made with the tokenizer of `training.initialize_from` (`{theirs}`), but "
            f"`{tokens.path}` was made with another tokenizer. Prepare the tokens again with data.tokenizer={theirs}."
        )
    return (*notices_of(folder), *_describe_copies(run.model, folder))


def _describe_copies(model: ModelConfig, folder: Path) -> Iterator[str]:
    """Yield notes about experts that start as copies of the MLPs in a folder."""
    sizes = model.experts
    if model_in(folder, model) == model:
        return
    yield (
        f"Each of the {sizes.number} experts of a layer starts as a copy of the layer's MLP in `{folder}`, and the "
        "routers start from random weights."
    )
    if not sizes.renormalise or sizes.scaling != 1.0:
        yield (
            "The weights of a token's experts do not add up to 1, so the run does not start with the results of the "
            f"model in `{folder}`. To start with them, set model.experts.renormalise=true model.experts.scaling=1."
        )


def describe_settings(run: RunConfig, device: str, *, is_new: bool) -> Iterator[str]:
    """Yield notes about settings that make ranks wait and, for a new run, about a model that cannot be exported."""
    if is_new and (reason := reason_against_export(run.model)):
        yield f"The model cannot be exported to the Hugging Face format: {reason}."
    number, stages = run.num_micro_batches, run.layout.pipeline
    if number < stages:
        waiting = bubble_share(stages, number)
        yield (
            f"A step has {number} micro-batch{'es' if number > 1 else ''} and the pipeline has {stages} ranks, so each "
            f"rank waits {waiting:.1f} times as long as it computes. Lower `training.micro_batch_size` "
            f"({run.micro_batch_size}) or raise `training.batch_size`. With {4 * stages} micro-batches, a rank would "
            f"wait {bubble_share(stages, 4 * stages):.2f} times as long as it computes."
        )
    if device == "cuda" and (reason := reason_against_halves(run)):
        yield f"Under sequence parallelism, the forward messages of this run overlap with no matrix product: {reason}."
