"""Table of an evaluation's results for a terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from crosscut.config.system.console import folded, plain_table, right
from crosscut.evaluation.places import EvaluationReport
from crosscut.evaluation.task import Setting, TaskReport

_NAMES = {"wikitext103": "WikiText-103", "lambada": "LAMBADA", "text": "text", "masked_text": "text with masked words"}
_MOST_DOCUMENTS = 20

_COUNTED = {
    "documents_blank": ("blank document left out", "blank documents left out"),
    "masked_tokens": ("masked token", "masked tokens"),
}
"""Words to show after a count, in the singular and in the plural. A count that is not listed is shown with the words of
its own name.
"""

_PROTOCOL = {
    "first_id": "each text begins with the token id",
    "mask_fraction": "fraction of masked words",
    "mask_words": "masked words in a row, at most",
    "seed": "seed of the masks",
}
"""Descriptions of settings, by name. Settings without a description are shown by their name."""

_COLUMNS = ("tokens", "masked_tokens", "perplexity", "bits_per_byte", "accuracy")
"""Figures that the table of documents shows, if the task has them."""


def print_report(report: EvaluationReport, console: Console) -> None:
    """Print the figures of every task. For a user's own text, also print the figures of the first documents."""
    model = report["model"]
    on = f"{report['layout']}, {report['device']}, {report['precision']}"
    averaged = ", averaged weights" if model["averaged_weights"] else ""
    told = f"{model['name']}{averaged}, {model['parameters']:,} parameters, on {on}"
    console.print(Text(told, style="bold"), soft_wrap=True)
    for name, task in report["tasks"].items():
        console.print()
        console.print(Text(f"{_NAMES[name]}: {', '.join(entry['file'] for entry in task['data'])}"), soft_wrap=True)
        console.print(_figures(task))
        if documents := task.get("documents"):
            console.print(_documents(documents[:_MOST_DOCUMENTS]))
            if len(documents) > _MOST_DOCUMENTS:
                console.print(f"and {len(documents) - _MOST_DOCUMENTS:,} more documents (--json lists all)")


def _figures(task: TaskReport) -> Table:
    table = plain_table(*right(""), "")
    table.show_header = False
    for position, (name, value) in enumerate(task["figures"].items()):
        table.add_row(Text(show(name, value), style="bold" if position == 0 else ""), _words(name))
    counts = ", ".join(
        _counted(value, name) for name, value in task["counts"].items() if value or name != "documents_blank"
    )
    protocol = ", ".join(
        f"{_PROTOCOL.get(name, _words(name))} {value}" for name, value in task["protocol"].items() if value is not None
    )
    for told in (counts, protocol, f"{task['tokens_per_second']:,.0f} tokens/s, {task['seconds']:.1f} s"):
        table.add_row("", Text(told, style="dim"))
    return table


def _documents(documents: Sequence[Mapping[str, Setting]]) -> Table:
    columns = [name for name in _COLUMNS if name in documents[0]]
    table = plain_table(folded("document"), *right(*map(_words, columns)))
    for document in documents:
        figures = (f"{document[name]:,}" if "tokens" in name else show(name, document[name]) for name in columns)
        table.add_row(Text(f"{document['source']}:{document['record']}"), *figures)
    return table


def show(name: str, value: Setting) -> str:
    """Format a figure: an accuracy in per cent, any other figure with a suitable number of digits."""
    if value is None:
        return "infinite"
    assert not isinstance(value, str), "figures are numbers"
    if name.endswith("accuracy"):
        return f"{value:.2%}"
    return f"{value:,.0f}" if 1e3 <= value < 1e6 else f"{value:.4g}"


def in_a_line(figures: Mapping[str, float | None]) -> str:
    """Return figures in one line, with their names. Figures per token are omitted, because they repeat the other
    figures.
    """
    return ", ".join(f"{_words(name)} {show(name, v)}" for name, v in figures.items() if not name.endswith("per_token"))


def _counted(number: int, things: str) -> str:
    """Return a count with its noun: `1 document`, `2 documents`."""
    if things in _COUNTED:
        return f"{number:,} {_COUNTED[things][number != 1]}"
    noun, blank, rest = _words(things).partition(" ")
    return f"{number:,} {noun.removesuffix('s') if number == 1 else noun}{blank}{rest}"


def _words(name: str) -> str:
    return name.replace("_", " ")
