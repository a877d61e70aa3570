"""Study of quality by size (paper, section 5.2, Figure 7 and Table 5), from the user's arguments to the results."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from crosscut.config import RunConfig, write_json
from crosscut.config.checks import Settings
from crosscut.data import Tokens
from crosscut.planner import count_parameters
from crosscut.scaling.quality.rates import chosen_rates, text_of, with_rate
from crosscut.scaling.quality.results import QualityResults, shared_by, size_figures
from crosscut.scaling.quality.runs import prepare_tokens, run_in, train_all
from crosscut.scaling.quality.sizes import Size, load_sizes
from crosscut.training.evaluations import Evaluations

RESULTS_FILE = "quality.json"


def quality_study(
    arguments: Sequence[str], *, seeds: int, tasks: Settings, rates: Path | None, at_once: int, output: Path
) -> QualityResults:
    """Train every size with every seed on the same data, and score it. `arguments` are run files and overrides
    (`load_sizes`). `tasks` maps names of tasks to their files. `rates` is a file of `rate_study` with the learning rate
    of each size; None uses the rates of the run files. The results are also written to `RESULTS_FILE` in the folder
    `output`.

    The first seed is the runs' own, and the others are the numbers after it. All sizes have the first seed before any
    has the second. Raises `ConfigError` or `DataError` before a run starts, and the errors of `train_all`.
    """
    sizes = [size._replace(run=_with_tasks(size.run, tasks)) for size in load_sizes(arguments)]
    tokens = prepare_tokens(sizes[0].run, output)
    sizes = _with_rates(sizes, rates, output, tokens)
    first = sizes[0].run.training.seed
    turns = [[_seeded(output, size, seed, tokens) for size in sizes] for seed in range(first, first + seeds)]
    runs = [run for turn in turns for run in turn]
    Evaluations(runs[0], tokens)  # raises if a text cannot be scored
    train_all(runs, at_once=at_once)
    run = runs[0]
    window = run.evaluation.window_for(run.training.sequence_length)
    figures = [size_figures(size.name, of) for size, of in zip(sizes, zip(*turns, strict=True), strict=True)]
    results = QualityResults(
        **vars(shared_by(run, text_of(sizes[0].run))),
        window=window,
        stride=run.evaluation.papers_stride(window),
        sizes=tuple(sorted(figures, key=lambda size: size.parameters)),
    )
    write_json(output / RESULTS_FILE, results)
    return results


def _with_tasks(run: RunConfig, tasks: Settings) -> RunConfig:
    return replace(run, evaluation=replace(run.evaluation, **tasks))


def _with_rates(sizes: Sequence[Size], rates: Path | None, output: Path, tokens: Tokens) -> list[Size]:
    """Return the sizes with the rates of a file."""
    if rates is None:
        return list(sizes)
    parameters = [count_parameters(run_in(output, name, run, tokens).model) for name, run in sizes]
    chosen = chosen_rates(rates, sizes, parameters)
    return [size._replace(run=with_rate(size.run, rate)) for size, rate in zip(sizes, chosen, strict=True)]


def _seeded(output: Path, size: Size, seed: int, tokens: Tokens) -> RunConfig:
    run = replace(size.run, training=replace(size.run.training, seed=seed))
    return run_in(output, f"{size.name}-seed-{seed}", run, tokens)
