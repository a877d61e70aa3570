"""Terminal tables and progress bars of the commands that read checkpoints."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from crosscut.config.system.byte_progress import SECONDS_BETWEEN_LINES
from crosscut.config.system.console import ruled_table
from crosscut.config.system.terminal import echo, new_console

if TYPE_CHECKING:
    from crosscut.checkpoint.maintenance.comparison import Comparison

_WIDTH = 100
"""Number of columns of a table of values outside a terminal. A value can be a list of all parameters' names."""


def show_checkpoint(facts: Mapping[str, Any]) -> None:
    """Print the description of a checkpoint: step, layout, size, versions, tensors and settings."""
    console = new_console()
    rebuilt = "  (manifest rebuilt by a repair)" if facts["rebuilt"] else ""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    averaged = ", and their moving average" if facts["averaged_weights"] else ""
    for name, value in (
        ("checkpoint", f"{facts['folder']}{rebuilt}"),
        ("step", f"{facts['step']:,} ({facts['samples']:,} samples)"),
        ("layout", facts["layout"]),
        ("seed", facts["seed"]),
        ("size", f"{facts['bytes'] / 1e6:,.1f} MB in {len(facts['files'])} files"),
        ("weights", f"from the last step{averaged}"),
        ("versions", versions),
    ):
        console.print(Text(f"{name:<11} {value}"), soft_wrap=True)
    table = _table("tensor", "shape", "dtype", "placement", "MB", figures=("shape", "MB"))
    for name, entry in facts["tensors"].items():
        shape = " x ".join(f"{size:,}" for size in entry["shape"]) or "1"
        table.add_row(Text(name), shape, entry["dtype"], entry["placement"], f"{entry['bytes'] / 1e6:,.2f}")
    console.print(table)
    config = _table("setting", "value")
    for section, fields in facts["config"].items():
        for key, value in fields.items() if isinstance(fields, Mapping) else (("", fields),):
            config.add_row(Text(f"{section}.{key}".rstrip(".")), Text(str(value)))
    if facts["config"]:
        new_console(width=_WIDTH).print(config)


def show_comparison(result: "Comparison") -> None:
    """Print the differences between two checkpoints: tensors, stored values and settings. Equal tensors are only
    counted.
    """
    console = new_console()
    table = _table("tensor", "max |a - b|", "relative", "", figures=("max |a - b|", "relative"))
    for tensor in result.tensors:
        if not tensor.same:
            figures = ("", "") if tensor.largest is None else (f"{tensor.largest:.3e}", f"{tensor.relative:.3e}")
            table.add_row(Text(tensor.name), *figures, Text(tensor.note))
    if table.row_count:
        console.print(table)
    sides = (Column(name, overflow="fold") for name in ("first", "second"))
    settings = ruled_table(Column("setting", no_wrap=True), *sides)
    for name, (one, other) in {**result.values, **result.settings}.items():
        settings.add_row(Text(name), Text(str(one)), Text(str(other)))
    if settings.row_count:
        new_console(width=_WIDTH).print(settings)
    same = sum(tensor.same for tensor in result.tensors)
    console.print(
        f"Equal tensors: {same} of {len(result.tensors)}. Different stored values: {len(result.values)}. Different "
        f"settings: {len(result.settings)}.",
        soft_wrap=True,
    )


def _table(*columns: str, figures: Collection[str] = ()) -> Table:
    return ruled_table(
        *(Column(name, justify="right" if name in figures else "left", overflow="fold") for name in columns)
    )


@contextmanager
def counting(description: str, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """Show a progress line on the error stream. The line names the current item, such as a tensor. The context yields a
    function that sets this name. In a file or a pipe, a line appears every ten seconds.
    """
    console = new_console(stderr=True)
    if shown and not console.is_terminal:
        last = [time.monotonic()]

        def told(name: str) -> None:
            if time.monotonic() - last[0] > SECONDS_BETWEEN_LINES:
                last[0] = time.monotonic()
                echo(f"{description} {name}", err=True)

        yield told
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(description)
        yield lambda name: bar.update(task, description=f"{description} {name}")
