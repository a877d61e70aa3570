"""Output of `crosscut plan` for a terminal of 100 columns: the ranking with its legend, details of the fastest layout,
and the layouts that do not fit.
"""

from collections.abc import Iterator
from textwrap import fill
from typing import TYPE_CHECKING

from rich.text import Text

from crosscut.cli.plan.forecast import steps_for
from crosscut.cli.plan.ranking import (
    checkpoints_text,
    columns,
    duration_text,
    legend,
    ranking,
    recompute_text,
    seconds_text,
)
from crosscut.config import RunConfig
from crosscut.config.recipes import describe_recipe
from crosscut.config.system.terminal import new_console
from crosscut.config.system.wording import counted, short
from crosscut.planner.course import training_flops, training_tokens
from crosscut.planner.facts import MEMORY_CATEGORIES, TrafficFacts, budget, three_digits, traffic_facts
from crosscut.planner.messages.traffic import reason_against_halves
from crosscut.planner.parameters import count_active_parameters, count_parameters
from crosscut.planner.search import CHOSEN, Plan, Rejected

if TYPE_CHECKING:
    from crosscut.cli.plan.forecast import ForecastOptions
    from crosscut.planner.search import Plans

_WIDTH = 100
_MOST_REJECTED = 8
_FLOPS = {"zettaFLOP": 1e21, "exaFLOP": 1e18, "petaFLOP": 1e15, "teraFLOP": 1e12, "gigaFLOP": 1e9}


def show_plans(plans: "Plans", options: "ForecastOptions", asked: RunConfig) -> None:
    """Print the ranking, details of the fastest layout, and the reasons why other layouts do not fit.

    The first lines state the model and the batch of the run `asked`. They also list the overrides that have no effect
    because the plan chooses their values.
    """
    console = new_console(width=_WIDTH)
    for line in _heading(plans, options, asked):
        console.print(Text(line))
    if plans.fitting:
        shown = columns(plans, options)
        for part in (ranking(shown, width=_WIDTH), "", legend(shown), ""):
            console.print(part, crop=False)
        for line in (
            *_margin(plans, options.top),
            _course(plans, options),
            *_details(plans),
        ):
            console.print(Text(line))
    for line in (*_own(plans, options), *_rejected(plans, console.width)):
        console.print(Text(line))


def _heading(plans: "Plans", options: "ForecastOptions", asked: RunConfig) -> Iterator[str]:
    training, model = plans.asked.training, plans.asked.model
    vocabulary = "" if asked.model.vocab_size else f"; a vocabulary of {model.vocab_size:,} (data.vocab_size)"
    parameters = f"{_in_words(count_parameters(model))} parameters"
    if model.num_experts:
        parameters += f", {_in_words(count_active_parameters(model))} of them for each token,"
    yield f"{parameters} on {plans.num_ranks:,} x {plans.hardware.name}, in {training.precision}"
    batch = f"{training.batch_size:,} sequences of {training.sequence_length:,} tokens per step"
    if training.initial_batch_size:
        batch += f" ({training.initial_batch_size:,} at the start, growing over {training.ramp_steps:,} steps)"
    yield f"{batch}{vocabulary}"
    yield f"recipe {describe_recipe(asked)}" if asked.recipe else describe_recipe(asked)
    yield model.pattern
    if plans.expert_skew > 1:
        yield f"The fullest rank of each group of expert ranks has {plans.expert_skew:g} times the mean load."
    given = [name for name in (argument.partition("=")[0] for argument in options.arguments) if name in CHOSEN]
    if given:
        effect = "the run's own layout is described below"
        if plans.own is None:
            effect = f"the given values have no effect, as their layout has {counted(asked.layout.world_size, 'rank')}"
        yield f"The plan chooses the values of {', '.join(given)}; {effect}."


def _margin(plans: "Plans", top: int) -> Iterator[str]:
    """The fastest layout that leaves a margin of memory, if the first layout leaves none. The table has `top` rows
    before it.
    """
    first, roomy = plans.fitting[0], plans.best
    if roomy is first:
        return
    row, slower = plans.fitting.index(roomy) + 1, roomy.time.total / first.time.total - 1
    last = ", the last row" if row > top else ""
    yield (
        f"The first layout without a star is number {row}{last}, which is described below: {_in_full(roomy)}, "
        f"{roomy.memory.total / 1e9:.1f} GB, {slower:.1%} slower.\n"
    )


def _course(plans: "Plans", options: "ForecastOptions") -> str:
    """The whole training with the best layout: tokens, FLOPs, time and checkpoints."""
    run, plan, tokens = plans.asked, plans.best, _tokens(plans, options)
    steps = run.training.steps if options.tokens is None else steps_for(run.training, tokens)[0]
    flops = training_flops(run, tokens)
    unit = next((name for name, size in _FLOPS.items() if flops >= size), "gigaFLOP")
    whole = f"{short(tokens)} tokens, {three_digits(flops / _FLOPS[unit])} {unit}"
    checkpoints = checkpoints_text(plans, plan, every=run.checkpoint.every, steps=steps)
    return (
        f"Training for {counted(steps, 'step')} takes {whole} and, with {_name_of_best(plans)}, "
        f"{_duration(plan, plans, options)}. It writes checkpoints (checkpoint.every): {checkpoints}."
    )


def _own(plans: "Plans", options: "ForecastOptions") -> Iterator[str]:
    """The layout in the run's file, which may be slower than all that are shown."""
    match plans.own:
        case Plan() as own:
            yield (
                f"The run's own layout ({_in_full(own)}) needs {own.memory.total / 1e9:.1f} GB and takes "
                f"{seconds_text(own.time.total)} s a step at {own.utilisation:.1%} of the peak. The whole training "
                f"takes {_duration(own, plans, options)}{_cost(own, plans, options)}."
            )
        case Rejected() as own:
            yield f"The run's own layout does not fit: {own.reason}."


def _tokens(plans: "Plans", options: "ForecastOptions") -> float:
    """Tokens of the whole training."""
    return training_tokens(plans.asked) if options.tokens is None else options.tokens


def _duration(plan: Plan, plans: "Plans", options: "ForecastOptions") -> str:
    """Time of the whole training with a layout."""
    return duration_text(budget(plan, plans.num_ranks, tokens=_tokens(plans, options), price=None)["days"])


def _cost(plan: Plan, plans: "Plans", options: "ForecastOptions") -> str:
    """Cost of the whole training with a layout, if the user has given a price."""
    if options.price is None:
        return ""
    cost = budget(plan, plans.num_ranks, tokens=_tokens(plans, options), price=options.price)
    return f" and costs {short(cost['money'])} {options.price.currency}".rstrip()


def _in_full(plan: Plan) -> str:
    """Layout, recomputation and micro-batch of a plan."""
    candidate = plan.candidate
    return f"{candidate.layout}, recompute {recompute_text(candidate)}, micro-batch {candidate.micro_batch_size}"


def _in_words(number: int) -> str:
    return f"{number / 1e9:,.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _name_of_best(plans: "Plans") -> str:
    row = plans.fitting.index(plans.best) + 1
    return "the first layout" if row == 1 else f"layout {row}"


def _details(plans: "Plans") -> Iterator[str]:
    """Memory, stages and messages of the best layout, which `--write` writes."""
    best, name = plans.best, _name_of_best(plans)
    held = ", ".join(
        f"{kept.replace('_', ' ')} {getattr(best.memory, kept) / 1e9:.2f}"
        for kept in MEMORY_CATEGORIES
        if getattr(best.memory, kept)
    )
    where = "of a rank"
    if best.candidate.layout.num_stages > 1:
        where = f"of rank {best.candidate.pipeline_rank} of the pipeline, the fullest one,"
    yield f"With {name}, the memory {where} peaks at: {best.memory.instant}. In GB: {held}."
    if stages := best.candidate.layout.stages:
        sizes = ", ".join(map(str, stages))
        yield f"{name.capitalize()} has layout.stages=[{sizes}], which is faster than a cut into stages of equal FLOPs."
    sent = [_sent(fact) for fact in traffic_facts(best) if fact.bytes >= 1e6]
    if sent:
        yield f"In a step with {name}, a rank sends {'; '.join(sent)}."
    reason = best.run(plans.asked).reason_against_compiling
    if reason and plans.asked.training.compile != "off":
        yield f"With {name}, layers are not compiled: {reason}."
    if plans.hardware.device == "cuda" and (reason := reason_against_halves(best.candidate)):
        yield f"With {name}, the forward messages of the split sequence overlap with no matrix product: {reason}."


def _sent(fact: TrafficFacts) -> str:
    where = "inside a node" if fact.link == "node" else "across nodes"
    size = three_digits(fact.bytes / 1e9)
    return (
        f"{size} GB by {fact.operation.replace('_', '-')} along {fact.axis} ({where}) in "
        f"{seconds_text(fact.seconds)} s, of which the rank waits {seconds_text(fact.exposed)} s"
    )


def _rejected(plans: "Plans", width: int) -> Iterator[str]:
    leanest = plans.leanest
    fit, rest = len(plans.fitting), len(plans.rejected)
    number = f"{counted(fit, 'layout fits', 'layouts fit')}, {counted(rest, 'does not', 'do not')}"
    closest = f"; the closest {'is' if len(leanest) == 1 else 'are'}:" if leanest else "."
    yield f"\n{number}{closest}"
    for rejected in leanest[:_MOST_REJECTED]:
        line = f"{rejected.label}: {rejected.reason}"
        yield fill(line, width, initial_indent="  ", subsequent_indent="    ")
    if len(leanest) > _MOST_REJECTED:
        yield f"  and {len(leanest) - _MOST_REJECTED} more (--json lists all)"
