"""Tables that `crosscut plan` prints, for a terminal of 100 columns."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from crosscut.config import RunConfig
from crosscut.config.terminal import new_console
from crosscut.planner.facts import MEMORY_CATEGORIES, budget, traffic_facts
from crosscut.planner.messages.traffic import reason_against_halves
from crosscut.planner.parameters import count_parameters
from crosscut.planner.search import CHOSEN

if TYPE_CHECKING:
    from crosscut.cli.plan.forecast import ForecastOptions
    from crosscut.planner.hardware import Hardware
    from crosscut.planner.search import Plan, Plans

_WIDTH = 100
_MOST_REJECTED = 8


def show_plans(plans: "Plans", options: "ForecastOptions") -> None:
    """Print the ranking, details of the fastest layout, and the reasons why other layouts do not fit.

    A line before the ranking names the overrides that have no effect, because the plan chooses their values.
    """
    console = new_console(width=_WIDTH)
    training = plans.asked.training
    console.print(
        Text(
            f"{count_parameters(plans.asked.model) / 1e9:,.3g} billion parameters on {plans.num_ranks:,} x "
            f"{plans.hardware.name}; batches of {training.batch_size:,} x {training.sequence_length:,} tokens, "
            f"{training.precision}"
        )
    )
    given = [name for name in (argument.partition("=")[0] for argument in options.arguments) if name in CHOSEN]
    if given:
        console.print(Text(f"The plan chooses the values of {', '.join(given)}; the given values have no effect."))
    if plans.fitting:
        console.print(_ranking(plans, options))
        _show_best(console, plans.fitting[0], plans.asked, plans.hardware)
    _show_rejected(console, plans)


def _ranking(plans: "Plans", options: "ForecastOptions") -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("tensor\nx data", "seq.", "shared", "recompute"):
        table.add_column(name, no_wrap=True)
    names = ["at\nonce", "GB", "step\ns", "comp.\ns", "sends\ns", "bub.\ns", "TF/s", "of\npeak"]
    names += ["tokens\na day"] if options.tokens is None else ["days"]
    names += [] if options.tokens is None or options.price is None else ["money"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for plan in plans.fitting[: options.top]:
        table.add_row(*_settings(plan), *_figures(plan), *_costs(plan, plans.num_ranks, options))
    return table


def _settings(plan: "Plan") -> list[str]:
    layout, training = plan.candidate.layout, plan.candidate.training
    group = f"/{layout.shard_group}" if layout.shard_group else ""
    every = f"/{training.recompute_every}" if training.recompute_every > 1 else ""
    return [
        f"{layout.tensor} x {layout.data}",
        ("pieces" if layout.symmetric_memory else "split") if layout.sequence_parallel else "whole",
        "-" if layout.sharding == "none" else f"{layout.sharding}{group}",
        f"{training.recompute}{every}",
        f"{plan.candidate.micro_batch_size}",
    ]


def _figures(plan: "Plan") -> list[str]:
    time = plan.time
    return [
        f"{plan.memory.total / 1e9:.1f}",
        *(_seconds(seconds) for seconds in (time.total, time.compute, time.exposed, time.bubble)),
        f"{plan.flops_per_second / 1e12:.3g}",
        f"{plan.utilisation:.0%}",
    ]


def _costs(plan: "Plan", num_ranks: int, options: "ForecastOptions") -> list[str]:
    if options.tokens is None:
        return [_short(plan.tokens_per_day)]
    cost = budget(plan, num_ranks, tokens=options.tokens, price=options.price)
    return [f"{cost['days']:.3g}"] + ([_short(cost["money"])] if "money" in cost else [])


def _show_best(console: Console, best: "Plan", asked: RunConfig, hardware: "Hardware") -> None:
    held = ", ".join(
        f"{name.replace('_', ' ')} {getattr(best.memory, name) / 1e9:.2f}"
        for name in MEMORY_CATEGORIES
        if getattr(best.memory, name)
    )
    console.print(Text(f"The first layout's memory on one rank peaks in: {best.memory.instant}. In GB: {held}."))
    sent = [_sent(fact) for fact in traffic_facts(best) if fact["bytes"] >= 1e6]
    if sent:
        console.print(Text(f"In a step with the first layout, a rank sends {'; '.join(sent)}."))
    reason = best.run(asked).reason_against_compiling
    if reason and asked.training.compile != "off":
        console.print(Text(f"The first layout's layers are not compiled: {reason}."))
    if hardware.device == "cuda" and (reason := reason_against_halves(best.candidate)):
        console.print(
            Text(f"In the first layout, the forward messages of the split sequence overlap with no product: {reason}.")
        )


def _sent(fact: Mapping[str, Any]) -> str:
    where = "inside a node" if fact["link"] == "node" else "across nodes"
    return (
        f"{fact['operation'].replace('_', '-')}s along {fact['axis']} ({where}) {fact['bytes'] / 1e9:.3g} GB in "
        f"{_seconds(fact['seconds'])} s (the rank waits for {_seconds(fact['exposed'])} s of this time)"
    )


def _show_rejected(console: Console, plans: "Plans") -> None:
    leanest = plans.leanest
    number = f"{len(plans.fitting):,} layouts fit, {len(plans.rejected):,} do not"
    console.print(Text(f"\n{number}{'; the closest are:' if leanest else '.'}"))
    for rejected in leanest[:_MOST_REJECTED]:
        console.print(Text(f"  {rejected.label}: {rejected.reason}"))
    if len(leanest) > _MOST_REJECTED:
        console.print(Text(f"  and {len(leanest) - _MOST_REJECTED} more (--json lists all)"))


def _seconds(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f}"
    if seconds >= 1 or not seconds:
        return f"{seconds:.3g}"
    return f"{seconds:.3f}" if seconds >= 0.001 else f"{seconds:.4f}"


def _short(number: float) -> str:
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= scale:
            return f"{number / scale:.3g}{letter}"
    return f"{number:.3g}"
