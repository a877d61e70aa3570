"""Reports of the two studies, in the same form as the reports of the scaling studies (`planner.paper.sections`)."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import NamedTuple

from crosscut.config.system.wording import counted, short
from crosscut.evaluation.task import exponential
from crosscut.planner.paper.sections import Picture, Report, Section
from crosscut.scaling.quality.results import QualityResults, RateResults, SizeFigures

_MARK = "Written by `crosscut study {}`."


class Figure(NamedTuple):
    """A figure by which sizes are compared."""

    title: str
    name: str
    """Name in `SizeFigures.figures`."""
    paper: tuple[float | None, float | None, float | None]
    """Values of the paper's models, in the order of `PAPERS_SIZES`. None where the paper gives none."""
    is_share: bool = False
    """Whether the figure is a share, of which more is better. Of a perplexity, less is better."""

    def shown(self, value: float | None) -> str:
        """Write a value of the figure. Empty for None."""
        if value is None:
            return ""
        return f"{value:.2%}" if self.is_share else f"{value:,.{2 if value < 1000 else 0}f}"


FIGURES = (
    Figure("validation perplexity", "validation", (None, None, 9.27)),
    Figure("WikiText-103, perplexity per word", "wikitext103_perplexity", (19.31, 12.76, 10.81)),
    Figure("LAMBADA, perplexity of the last word", "lambada_perplexity", (None, None, None)),
    Figure("LAMBADA, accuracy", "lambada_accuracy", (0.4518, 0.6173, 0.6651), is_share=True),
)
PAPERS_SIZES = ("355M", "2.5B", "8.3B")


def quality_report(results: QualityResults, picture: Picture | None = None) -> Report:
    """Build the report of the study of quality."""
    sections = [_models(results), _quality(results), _curves(results)]
    return Report(_MARK.format("quality"), "Quality by size", _words(results), sections, picture)


def rate_report(results: RateResults) -> Report:
    """Build the report of the study of learning rates."""
    return Report(_MARK.format("rate"), "Learning rates by size", _rate_words(results), [rate_section(results)])


def _words(results: QualityResults) -> str:
    runs = results.sizes[0].runs
    return (
        "The paper trains models of 355M, 2.5B and 8.3B parameters on the same data for the same number of steps "
        "(Figure 7), and scores them on WikiText-103 and LAMBADA (Table 5). This study does so with "
        f"{counted(len(results.sizes), 'small model')}: {results.steps:,} steps of {results.batch_size} sequences of "
        f"{results.sequence_length} tokens of {_text(results.text)}, with a vocabulary of {results.vocab_size:,} "
        f"tokens and {counted(len(runs), 'seed')}, on {_machine(results.machine)}. `crosscut study quality` writes "
        "this report."
    )


def _models(results: QualityResults) -> Section:
    rows = [
        (
            size.name,
            size.model,
            f"{size.parameters:,}",
            f"{size.learning_rate:g}",
            short(results.steps * results.batch_size * results.sequence_length),
            f"{results.steps * size.step_flops / 1e12:,.1f}",
            f"{mean(run.seconds for run in size.runs) / 60:.1f}",
        )
        for size in results.sizes
    ]
    words = (
        "A model is given as layers x hidden size, and its number of heads. All models have the same tokens in the "
        "same order for a seed. The minutes are those of the training of one run, since its last start."
    )
    header = ("size", "model", "parameters", "learning rate", "tokens", "TFLOP", "minutes")
    return Section("Models", words, header, rows)


def _quality(results: QualityResults) -> Section:
    shown = [one for one in FIGURES if all(size.figures(one.name) for size in results.sizes)]
    rows = [
        (size.name, short(size.parameters), *(spread(one, size.figures(one.name)) for one in shown))
        for size in results.sizes
    ]
    rows += [("the paper's", name, *(one.shown(one.paper[i]) for one in shown)) for i, name in enumerate(PAPERS_SIZES)]
    words = (
        "Mean over the seeds, with the minimum and the maximum in brackets. "
        f"{_order(results.sizes, shown)}The tasks are scored with windows of {results.window} tokens; WikiText-103 has "
        f"a stride of {results.stride}. The perplexity of the last word of LAMBADA counts all its tokens. The paper's "
        "models have another vocabulary, other data and windows of 1,024 tokens, so that only the order of its figures "
        "can be compared."
    )
    bars = [(size.name, (mean(size.figures("validation")),)) for size in results.sizes]
    header = ("size", "parameters", *(one.title for one in shown))
    return Section("Quality after the last step", words, header, rows, bars, ("mean",), "validation perplexity")


def spread(figure: Figure, values: Sequence[float]) -> str:
    """Write the mean of the seeds and their range."""
    told = figure.shown(mean(values))
    return f"{told} ({figure.shown(min(values))} to {figure.shown(max(values))})" if len(values) > 1 else told


def _order(sizes: Sequence[SizeFigures], shown: Sequence[Figure]) -> str:
    """Say in which figures every run of a size is better than all runs of the next smaller size."""
    if len(sizes) < 2:
        return ""
    ordered = [one.title for one in shown if _is_ordered(one, sizes)]
    if not ordered:
        return "In no figure is every run of a size better than all runs of the next smaller size. "
    return f"Every run of a size is better than all runs of the next smaller size in: {'; '.join(ordered)}. "


def _is_ordered(figure: Figure, sizes: Sequence[SizeFigures]) -> bool:
    sign = -1 if figure.is_share else 1
    values = [[sign * value for value in size.figures(figure.name)] for size in sizes]
    return all(max(larger) < min(smaller) for smaller, larger in pairwise(values))


def _curves(results: QualityResults) -> Section:
    curves = [size.curve() for size in results.sizes]
    rows = [
        (f"{points[0][0]:,}", *(f"{perplexity:,.1f}" for _, perplexity in points))
        for points in zip(*curves, strict=True)
    ]
    words = "Validation perplexity after each number of steps: the exponential of the mean loss over the seeds."
    return Section("Figure 7: validation perplexity", words, ("steps", *(size.name for size in results.sizes)), rows)


def _rate_words(results: RateResults) -> str:
    return (
        f"Validation perplexity after {results.steps:,} steps of {results.batch_size} sequences of "
        f"{results.sequence_length} tokens of {_text(results.text)} with one seed, on {_machine(results.machine)}. "
        f"A run has {results.share:.0%} of the steps of the study's runs, and its warm-up and decay are as much "
        "shorter. `crosscut study rate` writes this report."
    )


def rate_section(results: RateResults, title: str = "Rates", note: str = "") -> Section:
    """Build the table of the rates: a row for each rate, and a column for each size. `note` is the end of the text."""
    rates = sorted({trial.rate for size in results.sizes for trial in size.trials})
    rows = []
    for rate in rates:
        found = [next((one for one in size.trials if one.rate == rate), None) for size in results.sizes]
        cells = ["" if one is None else _trial(one.loss) for one in found]
        best = [size.name for size in results.sizes if size.best == rate]
        rows.append((f"{rate:g}", *cells, ", ".join(best)))
    words = f"Validation perplexity after {results.steps:,} steps. {note}".rstrip()
    return Section(title, words, ("learning rate", *(size.name for size in results.sizes), "best of"), rows)


def _trial(loss: float | None) -> str:
    return "diverged" if loss is None else f"{exponential(loss):,.2f}"


def _text(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _machine(machine: Mapping[str, str]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "device")
    return f"{machine['device']} ({facts})"
