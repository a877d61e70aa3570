"""Plan of a cut, its memory and its messages as tables on the screen."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from crosscut.config.system.console import folded, plain_table, right
from crosscut.config.system.terminal import new_console
from crosscut.cutting.costs import Cost
from crosscut.cutting.plan import OURS, Plan, Rule
from crosscut.parallel import Sent


def print_plan(plan: Plan, costs: Sequence[Cost] = ()) -> None:
    """Print a plan with its reasons, and the memory and messages at each number of ranks."""
    ranks = f"{', '.join(map(str, plan.tensor))} tensor ranks"
    if plan.grid:
        ranks = f"a grid of {' x '.join(map(str, plan.grid))} context ranks"
    parts: list[RenderableType] = [Text(f"Plan for {ranks}", style="bold"), Text(), _rules(plan)]
    if plan.integers:
        parts += [Text(), _integers(plan)]
    if plan.tables:
        parts += [Text(), _tables(plan)]
    if costs:
        parts += [Text(), _costs(costs, "context" if plan.grid else "tensor")]
    new_console().print(Group(*parts, Text()))


def _rules(plan: Plan) -> RenderableType:
    table = plain_table(Column("module", no_wrap=True), "style", folded("how"), folded("reason"))
    for name, rule in plan.rules.items():
        style = f"{rule.style} (ours)" if rule.style in OURS else str(rule.style)
        table.add_row(name or "(the module)", style, _how(rule), Text(rule.reason, style="dim"))
    return table


def _how(rule: Rule) -> str:
    told = [
        f"parts {' + '.join(map(str, rule.parts))}" if rule.parts else "",
        f"{rule.units} units" if rule.units else "",
        f"after {', '.join(name.rpartition('.')[2] for name in rule.columns)}" if rule.columns else "",
    ]
    return ", ".join(filter(None, told))


def _integers(plan: Plan) -> RenderableType:
    table = plain_table(Column("module", no_wrap=True), "integer", *right(*(f"tensor={size}" for size in plan.tensor)))
    for name, attributes in plan.integers.items():
        for key, values in attributes.items():
            table.add_row(name or "(the module)", key, *map(str, values))
    return table


def _tables(plan: Plan) -> RenderableType:
    table = plain_table(Column("table", no_wrap=True), *right("dimension"), folded("reason"))
    for name, each in plan.tables.items():
        table.add_row(name, str(each.dimension), Text(each.reason, style="dim"))
    return table


def _costs(costs: Sequence[Cost], axis: str) -> RenderableType:
    table = plain_table(*right(axis, "parameters per rank", "of all"), folded("forward"), folded("backward"))
    for cost in costs:
        share = cost.parameters_per_rank / max(cost.num_parameters, 1)
        row = f"{cost.parameters_per_rank:,}", f"{share:.1%}", told_messages(cost.forward), told_messages(cost.backward)
        table.add_row(str(cost.num_ranks), *row)
    return table


def told_messages(messages: Mapping[Sent, int]) -> str:
    """Describe messages by their operations, and by axes other than the tensor axis: number of messages, and of
    elements in all.
    """
    number: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for sent, count in messages.items():
        kind = sent.operation if sent.axis == "tensor" else f"{sent.operation} over {sent.axis}"
        number[kind] += count
        elements[kind] += count * sent.elements
    return ", ".join(f"{number[kind]} x {kind} ({elements[kind]:,} elements)" for kind in sorted(number)) or "none"
