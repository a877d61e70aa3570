"""The command `crosscut plan`: search the layouts of a run, and print or write the plans."""

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from crosscut.cli.arguments import echo_json
from crosscut.cli.plan.asked import asked_device, asked_run, with_vocabulary
from crosscut.config import ConfigError, Layout, RunConfig, TrainingConfig, write_toml, write_whole
from crosscut.config.checks import listed
from crosscut.config.recipes import steps_between_checkpoints
from crosscut.config.run import CheckpointConfig
from crosscut.config.system.terminal import echo

if TYPE_CHECKING:
    from crosscut.planner.facts import Price
    from crosscut.planner.search import Plans

_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_MOST = 1e18
"""Upper limit for `--tokens` and for `--price`, so that their product is always finite."""


@dataclass(frozen=True, kw_only=True)
class ForecastOptions:
    """Options of `crosscut plan`. Raises `ConfigError` for an invalid `--price`."""

    arguments: tuple[str, ...]
    """RUN.toml and its overrides."""
    model: str | None
    gpus: int | None
    gpu: str | None
    expert_skew: float
    tokens: float | None
    price: "Price | None"
    top: int
    as_json: bool
    html: Path | None
    write: Path | None

    def __post_init__(self) -> None:
        if self.price is not None and self.tokens is None:
            raise ConfigError(
                f"`--price` ({self.price}) must be given together with `--tokens`, but `--tokens` is missing. The cost "
                "depends on the number of tokens. Add, for example, `--tokens 300B`."
            )


def number_of_tokens(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """Convert the value of `--tokens`, such as 300B, to a number; None if the option is not given.

    Raises `ConfigError` unless the number is above 0 and at most 1e18.
    """
    return None if text is None else read_number("--tokens", text, "300B or 1.5T")


def read_number(option: str, text: str, example: str) -> float:
    """Convert a number such as 300B to a float. The messages name the option and an example.

    Raises `ConfigError` unless the number is above 0 and at most 1e18.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    number = 0.0 if match is None else float(match[1]) * _SCALES[match[2].upper()]
    if not number:
        raise ConfigError(f"`{option}` must be a number above 0 such as {example}, but is `{text}`.")
    if number > _MOST:
        raise ConfigError(f"`{option}` must be at most {_MOST:g}, but is `{text}`. Try {example}.")
    return number


def price_per_hour(_context: click.Context, _option: click.Parameter, text: str | None) -> "Price | None":
    """Convert the value of `--price`, such as 2.5 or 2.5USD, to a price; None if the option is not given.

    Raises `ConfigError` unless the price is a number from 0 to 1e18, with or without a currency.
    """
    if text is None:
        return None
    match = re.fullmatch(r"([^\d\s.+-]*)\s*([+-]?\d*\.?\d+(?:e\d+)?)\s*([^\d\s.+-]*)", text.strip())
    if match is None or (match[1] and match[3]):
        raise ConfigError(
            f"`--price` must be a number, with or without a currency, such as 2.5 or 2.5USD, but is `{text}`."
        )
    if not 0 <= float(match[2]) <= _MOST:
        raise ConfigError(f"`--price` must be at least 0 and at most {_MOST:g}, but is {float(match[2]):g}.")
    from crosscut.planner.facts import Price

    return Price(float(match[2]), match[1] or match[3])


def show_forecast(options: ForecastOptions) -> None:
    """Search the layouts, print the plans, and write the files that `--html` and `--write` name."""
    asked = _asked(options)
    plans = _search(asked, options)
    if options.write is not None:
        plans = _with_checkpoints(plans)
        _write_best(plans, options.write, asked, options.tokens)
    if options.html is not None:
        from crosscut.planner.paper.figures import page

        write_whole(options.html, page(plans, tokens=options.tokens, price=options.price))
    if options.as_json:
        from crosscut.planner.facts import to_json

        echo_json(to_json(plans, top=options.top, tokens=options.tokens, price=options.price))
    else:
        from crosscut.cli.plan.table import show_plans

        show_plans(plans, options, asked)
    _show_written(plans, options, asked)


def _asked(options: ForecastOptions) -> RunConfig:
    """Load the run to plan. The run's own layout need not suit it if the plan is for another number of ranks."""

    def without_ranks(layout: Layout) -> Layout:
        if options.gpus in (None, layout.world_size) or layout.elastic is not Layout.elastic:
            return layout
        return Layout(context=layout.context, context_attention=layout.context_attention)

    try:
        return asked_run(options.arguments, options.model)
    except ConfigError:
        with suppress(ConfigError):
            return asked_run(options.arguments, options.model, change_layout=without_ranks)
        raise


def _show_written(plans: "Plans", options: ForecastOptions, asked: RunConfig) -> None:
    """Print which files were written and how to use them. With `--json`, print to the error stream."""
    if options.write is not None:
        row = plans.fitting.index(plans.best) + 1
        which = "the first layout" if row == 1 else f"layout {row}, the first without a star"
        echo(
            f"{options.write}: the run with {which}. To train it: crosscut train {options.write}{_missing_data(asked)}",
            err=options.as_json,
        )
    if options.html is not None:
        echo(f"{options.html}: a page with figures of this run. Open it in a browser.", err=options.as_json)


def _missing_data(asked: RunConfig) -> str:
    """Return the overrides, such as `data.text=FILE`, that a user must add to `crosscut train` to complete the run's
    data settings. If the model has a larger vocabulary than `data.vocab_size`, the run also needs the model's own
    tokenizer. Without it, the run would train a smaller tokenizer.
    """
    data = asked.data
    if data.tokens or data.mixture:
        return ""
    text = "" if data.text else " data.text=FILE"
    needs_tokenizer = not data.tokenizer and asked.model.vocab_size > data.vocab_size
    return f"{text} data.tokenizer=FILE" if needs_tokenizer else text


def _search(asked: RunConfig, options: ForecastOptions) -> "Plans":
    from crosscut.planner.hardware import KNOWN_HARDWARE
    from crosscut.planner.search import search_layouts

    if options.gpu is None:
        known = listed(f"`{key}`" for key in KNOWN_HARDWARE)
        raise ConfigError(f"`--gpu` must name the device to plan for, but is missing. Choose {known}, or a .toml file.")
    num_ranks = asked.layout.world_size if options.gpus is None else options.gpus
    device = asked_device(options.gpu, as_json=options.as_json)
    return search_layouts(with_vocabulary(asked), device, num_ranks, expert_skew=options.expert_skew)


def _with_checkpoints(plans: "Plans") -> "Plans":
    """Return the plans of the run that `--write` writes: it has at most an hour of steps between checkpoints, unless
    the user has chosen another number. Raises `ConfigError` if no layout fits.
    """
    require_fitting(plans, "`--write` needs", "Try more devices with `--gpus`, or other devices with `--gpu`.")
    checkpoint = plans.asked.checkpoint
    if checkpoint.every != CheckpointConfig.every:
        return plans
    every = steps_between_checkpoints(plans.best.time.total, most=checkpoint.every)
    return replace(plans, asked=replace(plans.asked, checkpoint=replace(checkpoint, every=every)))


def _write_best(plans: "Plans", path: Path, asked: RunConfig, tokens: float | None) -> None:
    """Write a run with the fastest layout that leaves some memory free. The run has the model of `asked`, and enough
    steps for `tokens` tokens unless `tokens` is None.
    """
    run = replace(plans.best.run(plans.asked), model=asked.model)
    write_toml(run if tokens is None else _with_steps_for(run, tokens), path)


def require_fitting(plans: "Plans", needs: str, remedy: str) -> None:
    """Raise `ConfigError` if no layout fits. The message begins with `needs` and ends with `remedy`."""
    if not plans.fitting:
        raise ConfigError(
            f"{needs} a layout that fits, but none does. In the closest layout, {plans.leanest[0].reason}. {remedy}"
        )


def steps_for(training: TrainingConfig, tokens: float) -> tuple[int, TrainingConfig]:
    """Number of steps for `tokens` tokens, and the settings with a ramp of at most a tenth of these steps."""
    steps = max(1, round(tokens / (training.batch_size * training.sequence_length)))
    if training.initial_batch_size:
        ramp = min(training.ramp_steps, steps // 10)
        training = replace(training, ramp_steps=ramp, initial_batch_size=training.initial_batch_size if ramp else 0)
        steps += round((ramp * training.batch_size - training.samples_before(ramp)) / training.batch_size)
    return steps, training


def _with_steps_for(run: RunConfig, tokens: float) -> RunConfig:
    """Return the run with enough steps for `tokens` tokens. Warm-up and ramp are limited to a tenth of the steps."""
    steps, training = steps_for(run.training, tokens)
    warmup = min(run.optimizer.warmup_steps, steps // 10)
    decay = min(run.optimizer.decay_steps, steps - warmup)
    return replace(
        run,
        training=replace(training, steps=steps),
        optimizer=replace(run.optimizer, warmup_steps=warmup, decay_steps=decay),
    )
