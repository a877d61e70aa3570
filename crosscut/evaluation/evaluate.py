"""Evaluation of a model on the tasks in a config."""

import time
from collections.abc import Collection, Iterable, Sequence

from crosscut.architecture import Ability
from crosscut.config import ConfigError, EvaluationConfig
from crosscut.data import Tokenizer
from crosscut.evaluation.lambada import Lambada
from crosscut.evaluation.own_text.masked_text import MaskedText
from crosscut.evaluation.own_text.text import OwnText
from crosscut.evaluation.progress import Bar, rounds_shown
from crosscut.evaluation.scoring import Follow, Ids, MaskedTexts, WindowScores, score_windows
from crosscut.evaluation.task import Result, Task
from crosscut.evaluation.wikitext import WikiText103
from crosscut.evaluation.windows import Window
from crosscut.model import GPT


def make_tasks(
    config: EvaluationConfig,
    tokenizer: Tokenizer,
    *,
    longest: int,
    vocab_size: int,
    begin_of_text: int | None = None,
    abilities: Collection[Ability] = (Ability.WRITE,),
) -> list[Task]:
    """Create the tasks of a config and read their files. The model has `vocab_size` tokens and reads at most `longest`
    tokens at once.

    `begin_of_text` is the token id that the model expects at the start of every text; each text then starts with this
    id. If `begin_of_text` is None, texts start with the end-of-text id, as in training, and LAMBADA's passages start
    without an additional id. `abilities` are those of the model: a model that predicts masked tokens (`FILL`) is scored
    only on the user's own text (`evaluation.text`). Raises `ConfigError` or `DataError`.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"The tokenizer must have at most as many tokens as the model ({vocab_size:,}), but has "
            f"{tokenizer.vocab_size:,}. Use the tokenizer with which the model was trained."
        )
    window = config.window_for(longest)
    if Ability.FILL in abilities:
        config.require_masked()
        return [MaskedText(config.text, tokenizer, window=window, seed=config.mask_seed, text_key=config.text_key)]
    return _tasks_of_next_tokens(config, tokenizer, window, begin_of_text)


def _tasks_of_next_tokens(
    config: EvaluationConfig, tokenizer: Tokenizer, window: int, begin_of_text: int | None
) -> list[Task]:
    start = tokenizer.end_of_text if begin_of_text is None else begin_of_text
    before = () if begin_of_text is None else (begin_of_text,)
    sliding = {"start": start, "window": window}
    tasks: list[Task] = []
    if config.wikitext103:
        stride = config.papers_stride(window)
        tasks.append(
            WikiText103(config.wikitext103, tokenizer, overlap=stride, detokenizer=config.detokenizer, **sliding)
        )
    if config.lambada:
        tasks.append(Lambada(config.lambada, tokenizer, before=before, window=window, limit=config.limit))
    if config.text:
        stride = config.own_stride(window)
        tasks.append(OwnText(config.text, tokenizer, overlap=stride, text_key=config.text_key, **sliding))
    return tasks


def evaluate(
    model: GPT,
    tasks: Iterable[Task],
    *,
    batch_size: int,
    shown: bool = False,
    forecast: bool = False,
    around: Follow = iter,
) -> list[Result]:
    """Evaluate a model on tasks, on any layout. Every rank must call this function and gets the same figures.

    If `shown` is true, the first rank shows a progress bar. If `forecast` is also true, the first rank prints the size
    and the expected time of each task before the bar. A rank reads the windows of a task in rounds, and every rank has
    the same number of rounds. `around` is a generator function that yields each round that it receives, and can act
    before and after the round. It can, for example, end the evaluation early.
    """
    return [_done(model, task, batch_size, shown=shown, forecast=forecast, around=around) for task in tasks]


def _done(model: GPT, task: Task, batch_size: int, *, shown: bool, forecast: bool, around: Follow) -> Result:
    began = time.perf_counter()
    bar = Bar(task.name, shown, _size_of(task) if forecast else "")
    scores = score_with_progress(model, task.texts, task.windows, batch_size=batch_size, bar=bar, around=around)
    return Result(
        task=task.name,
        found=task.figures(scores),
        protocol=task.protocol,
        data=task.data,
        seconds=time.perf_counter() - began,
        tokens_read=sum(window.length for window in task.windows),
    )


def _size_of(task: Task) -> str:
    """Describe the size of a task, with its window and its stride."""
    num_tokens = sum(window.num_targets for window in task.windows)
    settings = ", ".join(f"{name} {task.protocol[name]:,}" for name in ("window", "stride") if name in task.protocol)
    return f"{num_tokens:,} tokens to score in {len(task.windows):,} windows ({settings})"


def score_with_progress(
    model: GPT,
    texts: Sequence[Ids] | MaskedTexts,
    windows: Sequence[Window],
    *,
    batch_size: int,
    bar: Bar,
    around: Follow = iter,
) -> WindowScores:
    """Score windows with `score_windows`, and show the progress bar `bar` on the first rank. `around` acts
    before and after each round of windows that this rank reads, as in `evaluate`.
    """
    bar = bar._replace(shown=bar.shown and model.mesh.is_first_rank)
    lengths = [window.length for window in windows]
    with rounds_shown(bar, lengths, around, size=model.mesh.tokens.size) as follow:
        return score_windows(model, texts, windows, batch_size=batch_size, follow=follow)
