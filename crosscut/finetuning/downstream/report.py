"""Report of a fine-tuning run: the scores of each seed, their median and spread, models that predict the same for every
example, the confusion matrix or the spread of predicted numbers, and the worst mistakes.

| file | content |
|---|---|
| `report.md` | the report |
| `scores.json` | the scores of each seed and of the ensemble, as fractions |
| `confusion.png` | confusion matrix of the development examples |
| `numbers.png` | predicted and true numbers of the development examples |
| `predictions-PART.tsv` or `.json` | the prediction for each example; the JSON has the format of SQuAD's program |

Predictions, pictures and mistakes come from the ensemble if the run has one, and otherwise from the seed with
the best development score.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from crosscut.config import RunConfig, write_json, write_whole
from crosscut.config.parts.head import HeadKind
from crosscut.config.system.console import plain_table, right
from crosscut.config.system.wording import markdown_table
from crosscut.finetuning.downstream.constant import REMEDY, constant_prediction
from crosscut.finetuning.downstream.folder import SeedResult, TaskRuns, best_seed, load_outputs, results_of
from crosscut.finetuning.downstream.numbers import number_lines, numbers_of
from crosscut.finetuning.downstream.pictures import Counts, plot_confusion, plot_numbers
from crosscut.finetuning.downstream.predictions import (
    Outputs,
    Prediction,
    answers_of,
    predict,
    probabilities_of,
    scores_of,
)
from crosscut.finetuning.downstream.task import DEV, TRAIN, Example, TunedTask, of_kind
from crosscut.finetuning.tasks import SpanExample, TextExample, confusion
from crosscut.logbook.contents import read_metrics

REPORT_FILE, SCORES_FILE, CONFUSION_FILE, NUMBERS_FILE = "report.md", "scores.json", "confusion.png", "numbers.png"

_OVER_SEEDS: Mapping[str, Callable[[list[float]], float]] = {
    "median": statistics.median,
    "smallest": min,
    "largest": max,
    "standard deviation": statistics.stdev,
}
"""Figures of the scores of all seeds, by the title of their row."""
_MOST_MISTAKES = 10
_MOST_CHARACTERS = 400
"""Maximum number of characters of a text in the report."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskResults:
    """Scores and predictions of all runs."""

    kept: TaskRuns
    by_seed: Mapping[int, SeedResult]
    """Content of each seed's `summary.json`, keyed by seed."""
    ensemble: Mapping[str, Mapping[str, float]]
    """Scores of the ensemble, by part. Empty if the run has no ensemble."""
    predictions: Mapping[str, Sequence[Prediction]]
    """Predictions of the ensemble, or of the best seed if there is no ensemble, by part."""
    constant: Sequence[str]
    """Sentences that name each seed, and the ensemble, that predicts the same for every example."""

    @property
    def names(self) -> list[tuple[str, str]]:
        """Pairs (part, name of a score), for all parts that were scored."""
        first = next(iter(self.by_seed.values())).scores
        return [(part, name) for part, scores in first.items() for name in scores]

    @property
    def best_seed(self) -> int:
        """Seed with the best development score."""
        return best_seed(self.kept, self.by_seed)


def write_report(kept: TaskRuns) -> TaskResults:
    """Write the report of complete runs, and return their scores."""
    results = _results(kept)
    for part, found in results.predictions.items():
        _write_predictions(kept, part, found)
    table, names = _confusion(results)
    if names:
        plot_confusion(table, names, kept.folder / CONFUSION_FILE)
    if kept.task.head is HeadKind.NUMBER:
        plot_numbers(*numbers_of(kept.examples(DEV), results.predictions[DEV]), kept.folder / NUMBERS_FILE)
    write_whole(kept.folder / REPORT_FILE, "\n".join(_lines(results, table, names)) + "\n")
    by_seed = {seed: {"best_step": one.best_step, **one.scores} for seed, one in results.by_seed.items()}
    write_json(kept.folder / SCORES_FILE, {"seeds": by_seed, "ensemble": results.ensemble})
    return results


def _results(kept: TaskRuns) -> TaskResults:
    by_seed = results_of(kept)
    chosen = kept.seeds if kept.ensemble else (best_seed(kept, by_seed),)
    predictions, ensemble = {}, {}
    found = [
        (f"Seed {seed}", part, same, kept.rows(part).num_examples)
        for seed, one in by_seed.items()
        for part, same in one.constant.items()
    ]
    for part in (part for part in kept.files if part != TRAIN):
        rows, examples = kept.rows(part), kept.examples(part)
        all_of = [probabilities_of(kept.task, rows, load_outputs(kept.run_of(seed), part)) for seed in chosen]
        mean: Outputs = np.mean(all_of, axis=0)
        predictions[part] = predict(kept.task, rows, examples, mean)
        if kept.ensemble:
            ensemble[part] = scores_of(kept.task, predictions[part], examples)
            if same := constant_prediction(kept.task, predictions[part], examples):
                found.append(("The ensemble", part, same, len(examples)))
    constant = [
        f"{whose} predicts {same} for all {number:,} {part} examples, although their labels differ."
        for whose, part, same, number in found
    ]
    return TaskResults(kept=kept, by_seed=by_seed, ensemble=ensemble, predictions=predictions, constant=constant)


def _write_predictions(kept: TaskRuns, part: str, predictions: Sequence[Prediction]) -> None:
    if kept.task.head is HeadKind.SPANS:
        answers = answers_of(of_kind(SpanExample, kept.examples(part)), predictions)
        write_json(kept.folder / f"predictions-{part}.json", answers, indent=1, ensure_ascii=False)
        return
    has_probability = kept.task.head is not HeadKind.NUMBER
    lines = ["index\tprediction\tprobability" if has_probability else "index\tprediction"]
    for index, one in enumerate(predictions):
        lines.append(f"{index}\t{one.text}" + (f"\t{one.probability:.6f}" if has_probability else ""))
    write_whole(kept.folder / f"predictions-{part}.tsv", "\n".join(lines) + "\n")


def _confusion(results: TaskResults) -> tuple[Counts, tuple[str, ...]]:
    """Return the confusion matrix of the development examples, and the names of its rows. If there are no names, the
    report shows no matrix.
    """
    task = results.kept.task
    names = task.labels
    if task.head is HeadKind.SPANS:
        names = ("no answer", "answer") if task.may_be_empty else ()
    labels = [example.label or 0 for example in results.kept.examples(DEV)]
    predicted = [one.label for one in results.predictions[DEV]]
    return confusion(predicted, labels, num_labels=max(1, len(names))), names


def _lines(results: TaskResults, table: Counts, names: tuple[str, ...]) -> Iterator[str]:
    kept = results.kept
    yield from [f"# {kept.task.name}: fine-tuning of {_cell(Path(kept.model).name)}", ""]
    for part, path in kept.files.items():
        yield f"- {part}: `{path}`, {kept.rows(part).num_examples:,} examples"
    told = "Scores are multiplied by 100. The test score belongs to the checkpoint with the best development score."
    yield from ["", told, ""]
    yield from markdown_table(*_score_table(results))
    yield from ["", *(f"**{_cell(line)}** {REMEDY}" for line in results.constant)] if results.constant else []
    yield from ["", "## Scores by step", ""]
    yield from _by_step(kept)
    whose = f"the ensemble of {kept.num_seeds} runs" if kept.ensemble else f"seed {results.best_seed}"
    if names:
        told = f"Development examples, predictions of {whose}. Rows are labels."
        yield from ["", "## Confusion matrix", "", told, ""]
        rows = [[_cell(name), *map(str, row)] for name, row in zip(names, table, strict=True)]
        yield from markdown_table(["", *map(_cell, names)], rows)
        yield from ["", f"![Confusion matrix]({CONFUSION_FILE})"]
    if kept.task.head is HeadKind.NUMBER:
        told = f"Development examples, predictions of {whose}."
        yield from ["", "## Numbers", "", told, "", *number_lines(kept.examples(DEV), results.predictions[DEV])]
        yield from ["", f"![Predicted and true numbers]({NUMBERS_FILE})"]
    kind = "least exact" if kept.task.head is HeadKind.NUMBER else "most confident wrong"
    yield from ["", "## Worst mistakes", "", f"The {kind} predictions of {whose}.", ""]
    yield from _mistakes(results)
    yield from ["## Settings and machine", ""]
    yield from _machine(results)
    where = "config.toml" if kept.num_seeds == 1 else f"seed-{kept.seeds[0]}/config.toml"
    yield from ["", f"Settings that differ from their defaults. `{where}` has all settings.", ""]
    yield from ["```toml", _changed_settings(kept.run).rstrip(), "```"]


def _changed_settings(run: RunConfig) -> str:
    """Return the settings of the model, the layout, the training and the optimizer that differ from their defaults, as
    TOML.
    """
    import tomli_w

    table = {}
    for name in ("model", "layout", "training", "optimizer"):
        section = getattr(run, name)
        values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
        defaults = {field.name: field.default for field in dataclasses.fields(section)}
        table[name] = {key: value for key, value in values.items() if value != defaults[key]}
    return tomli_w.dumps({name: values for name, values in table.items() if values})


def _score_table(results: TaskResults) -> tuple[list[str], list[list[str]]]:
    names = results.names
    head = ["seed", "best step", *(f"{part} {name.replace('_', ' ')}" for part, name in names)]
    rows = []
    for seed, result in results.by_seed.items():
        rows.append([str(seed), f"{result.best_step:,}", *(_shown(result.scores[part][name]) for part, name in names)])
    of_all = [[result.scores[part][name] for result in results.by_seed.values()] for part, name in names]
    if len(results.by_seed) > 1:
        for title, figure in _OVER_SEEDS.items():
            rows.append([title, "", *(_shown(figure(scores)) for scores in of_all)])
    if results.ensemble:
        rows.append(["ensemble", "", *(_shown(results.ensemble[part][name]) for part, name in names)])
    return head, rows


def _shown(score: float) -> str:
    return f"{100 * score:.2f}"


def _by_step(kept: TaskRuns) -> Iterator[str]:
    columns = [f"{DEV}_{name}" for name in kept.task.score_names]
    rows = [
        [str(seed), f"{row['step']:,}", *(_shown(row[name]) for name in columns)]
        for seed in kept.seeds
        for row in read_metrics(Path(kept.run_of(seed).output.folder))
        if all(name in row for name in columns)
    ]
    yield from markdown_table(["seed", "step", *(name.replace("_", " ") for name in columns)], rows)


def _mistakes(results: TaskResults) -> Iterator[str]:
    """Yield the lines that list the worst predictions, with their texts: the wrong ones with the highest probabilities,
    or the numbers that are farthest from the true ones.
    """
    task = results.kept.task
    pairs = zip(results.kept.examples(DEV), results.predictions[DEV], strict=True)
    found = [
        (-_error(example, one), number, example, one)
        for number, (example, one) in enumerate(pairs, start=1)
        if not _is_right(task, example, one)
    ]
    if not found:
        yield from ["All predictions are right.", ""]
    for _, number, example, one in sorted(found, key=lambda item: item[:2])[:_MOST_MISTAKES]:
        sure = "" if task.head is HeadKind.NUMBER else f" ({one.probability:.1%})"
        told = f"predicted {_cell(one.text) or 'no answer'}{sure}, not {_wanted(task, example)}"
        yield from [f"**Example {number:,}**: {told}", ""]
        yield from (f"- {name}: {_cell(text)}" for name, text in _texts(example))
        yield ""


def _is_right(task: TunedTask, example: Example, one: Prediction) -> bool:
    if isinstance(example, SpanExample):
        return scores_of(task, [one], [example])["exact"] == 1.0
    return one.label == example.label if task.head is not HeadKind.NUMBER else _error(example, one) == 0


def _error(example: Example, one: Prediction) -> float:
    """Return the probability of a prediction or, for a number, its distance from the true number."""
    number = example.number if isinstance(example, TextExample) else None
    return one.probability if number is None else abs(one.number - number)


def _wanted(task: TunedTask, example: Example) -> str:
    if isinstance(example, TextExample) and example.number is not None:
        return f"{example.number:.6g}"
    if isinstance(example, SpanExample):
        return " or ".join(dict.fromkeys(map(_cell, example.answers))) or "no answer"
    return _cell(task.labels[example.label or 0])


def _texts(example: Example) -> Iterator[tuple[str, str]]:
    for name in ("passage", "context", "question", "text", "pair"):
        if text := getattr(example, name, None):
            yield name, text
    yield from zip("ABCDEFGH", getattr(example, "options", ()), strict=False)


def _cell(text: str) -> str:
    """Return a text on one line, cut to 400 characters, with the special characters of Markdown escaped."""
    line = " ".join(text.split())
    line = line if len(line) <= _MOST_CHARACTERS else f"{line[: _MOST_CHARACTERS - 3]}..."
    return "".join(f"\\{character}" if character in "\\`*_[]<>|#" else character for character in line)


def _machine(results: TaskResults) -> Iterator[str]:
    rows = [
        [str(seed), one.layout, one.device, f"{one.training_seconds:,.0f} s", f"torch {one.versions['torch']}"]
        for seed, one in results.by_seed.items()
    ]
    yield from markdown_table(["seed", "layout", "device", "training since the last start", "version"], rows)


def print_results(results: TaskResults, console: Console) -> None:
    """Print the table of scores, the files and the commands to type next."""
    head, rows = _score_table(results)
    table = plain_table(head[0], *right(*head[1:]))
    for row in rows:
        table.add_row(*row, style="bold" if row[0] in ("median", "ensemble") else "")
    console.print(table)
    for line in results.constant:
        console.print(f"{line} {REMEDY}", style="bold yellow", markup=False, highlight=False, soft_wrap=True)
    kept = results.kept
    console.print(f"report  {kept.folder / REPORT_FILE}", highlight=False, soft_wrap=True)
    best = kept.run_of(results.best_seed).output.folder
    console.print(f"model   {best}", highlight=False, soft_wrap=True)
