"""Table of the fastest layouts in the output of `crosscut plan`, with the meaning of each column and of each value."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.table import Table

from crosscut.config import Layout
from crosscut.config.system.wording import short
from crosscut.planner.course import checkpoint_bytes
from crosscut.planner.facts import budget, three_digits
from crosscut.planner.search import NEAR_LIMIT
from crosscut.planner.showing.words import in_units
from crosscut.planner.stages import separates_weights

if TYPE_CHECKING:
    from crosscut.cli.plan.forecast import ForecastOptions
    from crosscut.planner.candidate import Candidate
    from crosscut.planner.search import Plan, Plans

_SEQUENCE = {
    "whole": "every tensor rank holds whole sequences between the layers",
    "split": "the tensor ranks share each sequence between the layers (sequence parallelism)",
    "pieces": "like split, and matrix products overlap with messages (symmetric memory)",
}
_SHARDING = {
    "none": "every data rank has a whole copy of the state",
    "zero2": "data ranks shard gradients and optimizer state",
    "zero3": "data ranks shard weights, gradients and optimizer state",
}
_RECOMPUTE = {
    "none": "all activations are kept",
    "selective": "the attention core and scans are computed again in the backward pass",
    "operators": "cheap operators are computed again in the backward pass",
    "full": "whole layers are computed again in the backward pass",
}


class Column(NamedTuple):
    """Column of the ranking, with a cell for each layout."""

    heading: str
    cells: list[str]
    meaning: str
    is_number: bool = True


def columns(plans: "Plans", options: "ForecastOptions") -> list[Column]:
    """Columns for the fastest `options.top` layouts and, in the last row, the best one if it is slower. A column of
    numbers that are all 0 is left out.
    """
    shown = [*plans.fitting[: options.top]]
    if plans.best not in shown:
        shown.append(plans.best)
    peak = f"{_teraflops(shown[0].peak)} TF/s"
    found = [
        *_settings(shown),
        _memory(shown, plans),
        Column("step\ns", [seconds_text(plan.time.total) for plan in shown], "seconds of one optimizer step"),
        Column("compute\ns", [seconds_text(plan.time.compute) for plan in shown],
               "part of the step in which the rank computes"),
        Column("waits\ns", [seconds_text(plan.time.exposed) for plan in shown],
               "part of the step in which the rank only waits for messages"),
        Column("bub-\nble", [_share(plan.time.bubble_share) for plan in shown],
               "time in which a rank has no work in the pipeline, relative to the rest of the step"),
        Column("TF/s", [_teraflops(plan.flops_per_second) for plan in shown], "model FLOP/s of one device"),
        Column("of\npeak", [f"{plan.utilisation:.0%}" for plan in shown], f"share of the stated peak, {peak}"),
        *_costs(shown, plans, options),
    ]  # fmt: skip
    return [column for column in found if not column.is_number or any(cell != "0" for cell in column.cells)]


def ranking(shown: Sequence[Column], *, width: int) -> Table:
    """Table of the layouts, the fastest first. Columns are separated by two spaces, or by one space if the table would
    be wider than `width` characters. Columns are never cut, so the table may still be wider.
    """
    widths = [max(map(cell_len, [*column.heading.split("\n"), *column.cells])) for column in shown]
    padding = 1 if sum(widths) + 2 * len(widths) - 1 <= width else 0  # in addition to the space that the box draws
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, padding, 0, 0), show_edge=False)
    for column, needed in zip(shown, widths, strict=True):
        table.add_column(
            column.heading, justify="right" if column.is_number else "left", no_wrap=True, min_width=needed
        )
    for row in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*row)
    return table


def legend(shown: Iterable[Column]) -> Table:
    """Table with the meaning of each column."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for column in shown:
        name, _, rest = column.heading.replace("-\n", "-").partition("\n")
        table.add_row(f"{name} {rest}" if len(rest) > 1 else name, column.meaning)
    return table


def _memory(shown: Sequence["Plan"], plans: "Plans") -> Column:
    """Column of the peak memory. If a shown layout is near the limit, its cell has a star, and the legend says why."""
    stars = ["*" if plans.is_near_limit(plan) else "" for plan in shown]
    width = 1 if any(stars) else 0
    cells = [f"{plan.memory.total / 1e9:.1f}{star:<{width}}" for plan, star in zip(shown, stars, strict=True)]
    meaning = "peak memory of one rank (1 GB is 10^9 bytes)"
    return Column("GB", cells, f"{meaning}; *: above {NEAR_LIMIT:.0%} of the memory" if width else meaning)


def _settings(shown: Sequence["Plan"]) -> list[Column]:
    candidates = [plan.candidate for plan in shown]
    sequence = [_sequence(candidate.layout) for candidate in candidates]
    sharding = [_with_number(c.layout.sharding, c.layout.shard_group) for c in candidates]
    recompute = [recompute_text(candidate) for candidate in candidates]
    return [
        Column("tensor\nx data", [f"{c.layout.tensor} x {c.layout.data}" for c in candidates],
               "ranks that share every layer x ranks that share the batch", is_number=False),
        *_experts(candidates),
        *_pipelines(candidates),
        Column("sequence", sequence, _meanings(_SEQUENCE, sequence), is_number=False),
        Column("sharding", sharding, _meanings(_SHARDING, sharding, "in groups of {} data ranks"), is_number=False),
        Column("recompute", recompute, _meanings(_RECOMPUTE, recompute, "in one of {} layers"), is_number=False),
        Column("micro-\nbatch", [f"{c.micro_batch_size}" for c in candidates],
               "sequences per forward pass of one data rank"),
    ]  # fmt: skip


def _experts(candidates: Sequence["Candidate"]) -> list[Column]:
    """Column of the expert ranks. Empty for a model without experts."""
    if not candidates[0].model.num_experts:
        return []
    cells = [str(candidate.layout.expert) for candidate in candidates]
    return [Column("expert\nranks", cells, "data and context ranks that share the experts of a layer")]


def _pipelines(candidates: Sequence["Candidate"]) -> list[Column]:
    """Column of the pipelines, such as `4`, `4x2` or `4zb`. Empty if no layout has a pipeline."""
    layouts = [candidate.layout for candidate in candidates]
    if all(layout.num_stages == 1 for layout in layouts):
        return []
    cells = [str(layout.pipeline) for layout in layouts]
    meanings = ["ranks that share the layers, in stages (docs/pipeline.md)"]
    for place, layout in enumerate(layouts):
        if layout.stages_per_rank > 1:
            cells[place] += f"x{layout.stages_per_rank}"
        elif separates_weights(layout):
            cells[place] += "zb"
    if any("x" in cell for cell in cells):
        meanings.append("x2: each rank has 2 stages (interleaved 1F1B)")
    if any(cell.endswith("zb") for cell in cells):
        meanings.append("zb: the zero-bubble schedule")
    return [Column("pipe", cells, "; ".join(meanings), is_number=False)]


def _share(share: float) -> str:
    if not share:
        return "0"
    return f"{share:.0%}" if share >= 0.005 else "<1%"


def _sequence(layout: Layout) -> str:
    if not layout.sequence_parallel:
        return "whole"
    return "pieces" if layout.symmetric_memory else "split"


def recompute_text(candidate: "Candidate") -> str:
    """Recomputation of a layout, such as `operators`, or `full/2` for one in two layers."""
    every = candidate.training.recompute_every
    return _with_number(candidate.training.recompute, every if every > 1 else 0)


def _with_number(value: str, number: int) -> str:
    """Text of a cell: the value alone, such as `zero3`, or the value with a number, such as `zero3/8`. A number of 0 is
    not shown.
    """
    return f"{value}/{number}" if number else value


def _meanings(table: Mapping[str, str], cells: Iterable[str], numbered: str = "") -> str:
    """Meaning of each value in the cells. `numbered` is the meaning of a number after a slash."""
    found = [cell.partition("/")[::2] for cell in cells]
    values = [f"{value}: {meaning}" for value, meaning in table.items() if value in dict(found)]
    numbers = sorted({int(number) for _, number in found if number})
    return "; ".join([*values, *(f"/{number}: {numbered.format(number)}" for number in numbers)])


def _costs(shown: Sequence["Plan"], plans: "Plans", options: "ForecastOptions") -> list[Column]:
    if options.tokens is None:
        return [Column("tokens\na day", [short(plan.tokens_per_day) for plan in shown], "on all devices together")]
    costs = [budget(plan, plans.num_ranks, tokens=options.tokens, price=options.price) for plan in shown]
    days = Column("days", [three_digits(cost["days"]) for cost in costs], f"time of {short(options.tokens)} tokens")
    if options.price is None:
        return [days]
    unit = options.price.currency
    source = f"days x 24 hours x {plans.num_ranks:,} devices x {options.price} per device and hour (--price)"
    source += "" if unit else ", in the currency of --price"
    return [days, Column(f"cost\n{unit}".rstrip(), [short(cost["money"]) for cost in costs], source)]


def _teraflops(rate: float) -> str:
    return f"{rate / 1e12:,.0f}" if rate >= 1e15 else f"{rate / 1e12:.3g}"


def seconds_text(seconds: float) -> str:
    """Format a number of seconds for a cell or a sentence."""
    if seconds >= 100:
        return f"{seconds:,.0f}"
    if seconds >= 1 or not seconds:
        return f"{seconds:.3g}"
    return f"{seconds:.3f}" if seconds >= 0.001 else f"{seconds:.4f}"


def duration_text(days: float) -> str:
    """Format a time in the unit that suits it."""
    units = ((1.0, "days"), (1 / 24, "hours"), (1 / 1440, "minutes"), (1 / 86_400, "seconds"))
    size, unit = next((found for found in units if days >= 2 * found[0]), units[-1])
    return f"{three_digits(days / size)} {unit}"


def checkpoints_text(plans: "Plans", plan: "Plan", *, every: int, steps: int) -> str:
    """Steps and time between the checkpoints of a run of `steps` steps with one of the plans, and their size. `every`
    is the number of steps between them; 0 for one after the last step only.
    """
    size = in_units(checkpoint_bytes(plans.asked))
    if not 0 < every < steps:
        return f"{size}, after the last step"
    return f"{size} each, every {every:,} steps ({duration_text(every * plan.time.total / 86_400)} of training)"
