"""Learning rate of each size. The paper found that a rate tuned for each model improves it, but used one rate for all
sizes (section 4.1.1).

Each size is trained with each rate of a grid, for a share of the steps. A trial is a complete run: its warm-up and its
decay have the same share of its steps as in the whole run. The best rate has the lowest validation loss at the end of
its trial.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from crosscut.config import ConfigError, EvaluationConfig, RunConfig, write_json
from crosscut.config.optimizer import OptimizerConfig
from crosscut.scaling.quality.results import RateResults, SizeRates, read_rates, shared_by, size_rates
from crosscut.scaling.quality.runs import prepare_tokens, require_same, run_in, train_all
from crosscut.scaling.quality.sizes import Size, load_sizes

RATES_FILE = "rates.json"

_SHARE_FILE = "share"
"""File of a study's output with the share of the steps that its trials make."""

_ROUNDING = 1e-9
"""Number by which a product of a share and a number of steps may be too small in floating point."""

_RATES = tuple(field.name for field in fields(OptimizerConfig) if field.name.endswith("learning_rate"))


def rate_study(
    arguments: Sequence[str], *, rates: Sequence[float], share: float, at_once: int, output: Path
) -> RateResults:
    """Train every size with every rate, for `share` of the steps, and return the losses. `arguments` are run files and
    overrides (`load_sizes`). The results are also written to `RATES_FILE` in the folder `output`.

    Raises `ConfigError` before a run starts, and the errors of `train_all`.
    """
    sizes = load_sizes(arguments)
    _require_steps(sizes, share)
    tokens = prepare_tokens(sizes[0].run, output)
    rates = sorted(set(rates))
    trials = {
        name: [run_in(output, f"{name}-rate-{rate:g}", trial(run, rate, share), tokens) for rate in rates]
        for name, run in sizes
    }
    runs = [run for column in zip(*trials.values(), strict=True) for run in column]
    require_same(output / _SHARE_FILE, f"{share:g}", partial(_told_of_share, share, output))
    train_all(runs, at_once=at_once, may_diverge=True)
    found = [size_rates(name, of) for name, of in trials.items()]
    results = RateResults(
        **vars(shared_by(runs[0], text_of(sizes[0].run))),
        share=runs[0].training.steps / sizes[0].run.training.steps,
        sizes=tuple(sorted(found, key=lambda size: size.parameters)),
    )
    write_json(output / RATES_FILE, results)
    return results


def _require_steps(sizes: Sequence[Size], share: float) -> None:
    """Raise `ConfigError` for a share that leaves a trial too few steps to warm up, to train and to decay."""
    for _, run in sizes:
        least = 1 + (run.optimizer.warmup_steps > 0) + (run.optimizer.decay_steps > 0)
        if _short(share, run.training.steps) < least:
            lowest = math.ceil(least / run.training.steps * 1e4) / 1e4
            raise ConfigError(
                f"`--share` must be at least {lowest:g}, which makes {least} of `training.steps` "
                f"({run.training.steps}), but is {share:g}. Raise `--share`, or `training.steps`."
            )


def _short(share: float, steps: int) -> int:
    """Number of whole steps in a share of the steps."""
    return int(share * steps + _ROUNDING)


def _told_of_share(share: float, output: Path, known: str) -> str:
    """Return the message about a share that is not that of an earlier start."""
    return (
        f"`--share` must be {known}, as in an earlier start in `{output}`, but is {share:g}. Choose another `--output` "
        "for another share."
    )


def text_of(run: RunConfig) -> tuple[str, ...]:
    """Names of the files of a run's text, or of its token folder, without the folders above."""
    data = run.data
    places = data.text or ((data.tokens,) if data.tokens else [part.folder for part in data.mixture])
    return tuple(Path(place).name for place in places)


def with_rate(run: RunConfig, rate: float) -> RunConfig:
    """Return the run with another learning rate. Its other rates, such as the lowest one or that of the embeddings,
    keep their proportion to the learning rate.
    """
    optimizer, factor = run.optimizer, rate / run.optimizer.learning_rate
    changed = {name: getattr(optimizer, name) * factor for name in _RATES} | {"learning_rate": rate}
    return replace(run, optimizer=replace(optimizer, **changed))


def trial(run: RunConfig, rate: float, share: float) -> RunConfig:
    """Return the run with this learning rate and this share of the steps. Warm-up, decay and the ramp of the batch are
    shortened by the same share. Only the first and the last step are validated, and no task is scored.
    """
    run = with_rate(run, rate)
    training, optimizer, checkpoint = run.training, run.optimizer, run.checkpoint

    def short(steps: int) -> int:
        return max(1, _short(share, steps)) if steps else 0

    return replace(
        run,
        training=replace(
            training, steps=short(training.steps), ramp_steps=short(training.ramp_steps), validate_every=0
        ),
        optimizer=replace(
            optimizer, warmup_steps=short(optimizer.warmup_steps), decay_steps=short(optimizer.decay_steps)
        ),
        checkpoint=replace(checkpoint, every=short(checkpoint.every), keep_every=0),
        evaluation=EvaluationConfig(),
        output=replace(run.output, sample_every=0, sample_tokens=0),
    )


def describe_choice(size: SizeRates) -> str:
    """Describe the best rate of a size in words, and what to do if it stands at an end of the grid."""
    rates = [one.rate for one in size.trials]
    if size.best is None:
        return f"All runs of `{size.name}` diverged. Try smaller rates: --rates {rates[0] / 4:g},{rates[0] / 2:g}"
    told = f"The best learning rate of `{size.name}` is {size.best:g}"
    if size.best == rates[-1]:
        return f"{told}, the largest that was tried. Try larger rates, too: --rates {rates[-1]:g},{2 * rates[-1]:g}"
    if size.best == rates[0]:
        return f"{told}, the smallest that was tried. Try smaller rates, too: --rates {rates[0] / 2:g},{rates[0]:g}"
    return f"{told}."


def chosen_rates(path: Path, sizes: Sequence[Size], parameters: Sequence[int]) -> list[float]:
    """Return the best rate of each size in a file of `rate_study`. `parameters` are the numbers of parameters of the
    sizes. Raises `ConfigError` if the file has no rate for a size, or was made with another model of this name.
    """
    known = {size.name: size for size in read_rates(path).sizes}
    rates = []
    for (name, _), number in zip(sizes, parameters, strict=True):
        found = known.get(name)
        if found is None or found.best is None:
            has = ", ".join(one.name for one in known.values() if one.best is not None) or "none"
            raise ConfigError(
                f"`--rates` must have a learning rate for each size, but `{path}` has none for `{name}` (it has: "
                f"{has}). Run `crosscut study rate` with the same sizes."
            )
        if found.parameters != number:
            raise ConfigError(
                f"`--rates` must be of the same models, but in `{path}`, `{name}` has {found.parameters:,} parameters "
                f"instead of {number:,}. Run `crosscut study rate` with the same sizes."
            )
        rates.append(found.best)
    return rates
