"""Convert the result of a layout search to plain values, for JSON, the terminal and the HTML page."""

from dataclasses import asdict, fields
from typing import Any, NamedTuple

from crosscut.config import Layout
from crosscut.planner.candidate import Candidate
from crosscut.planner.compute import flops_per_step
from crosscut.planner.hardware import Hardware
from crosscut.planner.memory import MemoryForecast
from crosscut.planner.messages.collective import Collective
from crosscut.planner.parameters import count_parameters
from crosscut.planner.search import Plan, Plans, Rejected
from crosscut.planner.stages import stage_sizes

MEMORY_CATEGORIES = tuple(field.name for field in fields(MemoryForecast) if field.name != "instant")
TIME_CATEGORIES = ("products", "attention", "passes", "optimizer", "exposed", "bubble")


class Price(NamedTuple):
    """Price of one device for one hour, as the user states it."""

    per_hour: float
    currency: str
    """Name or sign of the currency, such as USD. Empty if the user names none."""

    def __str__(self) -> str:
        return f"{self.per_hour:g} {self.currency}".rstrip()


def three_digits(number: float) -> str:
    """Format a number with three significant digits, such as 0.0123 or 1,340."""
    return f"{float(f'{number:.3g}'):,.0f}" if number >= 100 else f"{number:.3g}"


def short(number: float) -> str:
    """Format a number with three significant digits and a unit letter, such as 8.31B."""
    number = float(f"{number:.3g}")  # so that 999,999 is 1M
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= scale:
            return f"{number / scale:.3g}{letter}"
    return f"{number:.3g}"


def budget(plan: Plan, num_ranks: int, *, tokens: float, price: Price | None) -> dict[str, Any]:
    """Return the days that training on `tokens` tokens takes and, if `price` is given, the money that it costs.

    The result has the keys `tokens`, `days` and, with a price, `money`, `currency` and `price_per_hour`.
    """
    days = tokens / plan.tokens_per_day
    figures = {"tokens": tokens, "days": days}
    if price is None:
        return figures
    money = days * 24 * num_ranks * price.per_hour
    return {**figures, "money": money, "currency": price.currency, "price_per_hour": price.per_hour}


def to_json(plans: Plans, *, top: int, tokens: float | None, price: Price | None) -> dict[str, Any]:
    """Return the result of a layout search as values for JSON: the `top` fastest layouts, and all rejected layouts with
    the reasons.

    If `tokens` is given, each layout also has the days that training on `tokens` tokens takes and, with `price`, the
    money that it costs.
    """
    asked = plans.asked
    return {
        "model": asdict(asked.model) | {"parameters": count_parameters(asked.model)},
        "gpu": hardware_facts(plans.hardware),
        "gpus": plans.num_ranks,
        "batch_size": asked.training.batch_size,
        "sequence_length": asked.training.sequence_length,
        "precision": asked.training.precision,
        "flops_per_step": flops_per_step(asked),
        "fitting": len(plans.fitting),
        "plans": [plan_facts(plan, plans.num_ranks, tokens=tokens, price=price) for plan in plans.fitting[:top]],
        "rejected": [_rejected_facts(rejected) for rejected in plans.rejected],
    }


def hardware_facts(hardware: Hardware) -> dict[str, Any]:
    """Figures of a device file as plain values, in bytes, bytes per second and FLOP/s."""
    return {
        "key": hardware.key,
        "name": hardware.name,
        "memory": hardware.memory,
        "memory_bandwidth": hardware.memory_bandwidth,
        "flops": dict(hardware.flops),
        "ranks_per_node": hardware.ranks_per_node,
        "node_bandwidth": hardware.node.bandwidth,
        "network_bandwidth": hardware.network.bandwidth if hardware.network else None,
        "sources": dict(hardware.sources),
    }


def plan_facts(plan: Plan, num_ranks: int, *, tokens: float | None, price: Price | None) -> dict[str, Any]:
    """Forecast of a layout as plain values: settings, bytes per rank, seconds and messages of a step, throughput."""
    memory = {name: getattr(plan.memory, name) for name in MEMORY_CATEGORIES}
    seconds = {name: getattr(plan.time, name) for name in TIME_CATEGORIES}
    return {
        **_settings(plan),
        "memory": memory | {"total": plan.memory.total, "instant": plan.memory.instant},
        **_of_stages(plan),
        "seconds": seconds | {"compute": plan.time.compute, "total": plan.time.total},
        "traffic": traffic_facts(plan),
        "flops_per_second_per_gpu": plan.flops_per_second,
        "utilisation": plan.utilisation,
        "tokens_per_day": plan.tokens_per_day,
        **({} if tokens is None else {"budget": budget(plan, num_ranks, tokens=tokens, price=price)}),
    }


def traffic_facts(plan: Plan) -> list[dict[str, Any]]:
    """Messages of one rank in one step, summed by operation, axis and link. The slowest messages come first."""
    kinds: dict[tuple[str, str, str], dict[str, Any]] = {}
    for entry in plan.time.exchanges:
        message: Collective = entry.collective
        key = (message.operation, message.axis, entry.where)
        kind = kinds.setdefault(
            key,
            {
                "operation": message.operation,
                "axis": message.axis,
                "link": entry.where,
                "count": 0,
                "bytes": 0.0,
                "seconds": 0.0,
                "exposed": 0.0,
            },
        )
        kind["count"] += message.count
        kind["bytes"] += message.wire_bytes
        kind["seconds"] += entry.seconds
        kind["exposed"] += entry.exposed
    return sorted(kinds.values(), key=lambda kind: -kind["seconds"])


def _settings(plan: Plan | Rejected) -> dict[str, Any]:
    layout, training = plan.candidate.layout, plan.candidate.training
    return {
        "tensor": layout.tensor,
        "data": layout.data,
        **_of_context(plan.candidate),
        "pipeline": layout.pipeline,
        **_of_pipeline(layout),
        "sequence_parallel": layout.sequence_parallel,
        "symmetric_memory": layout.symmetric_memory,
        "sharding": layout.sharding,
        "shard_group": layout.shard_group,
        "recompute": training.recompute,
        "recompute_every": training.recompute_every,
        "micro_batch_size": plan.candidate.micro_batch_size,
    }


def _of_context(candidate: Candidate) -> dict[str, Any]:
    """Number of context ranks, and their attention algorithm; empty without context ranks."""
    if candidate.layout.context == 1:
        return {}
    return {"context": candidate.layout.context, "context_attention": candidate.context_attention.way}


def _of_stages(plan: Plan) -> dict[str, Any]:
    """Facts about the stages of a pipeline: the number of layers of each stage, the pipeline rank whose memory is
    given, and the ratio of the bubble to the rest of the step. Empty without a pipeline.
    """
    if plan.candidate.layout.pipeline == 1:
        return {}
    return {
        "stages": stage_sizes(plan.candidate),
        "pipeline_rank_of_memory": plan.candidate.pipeline_rank,
        "bubble_share": plan.time.bubble_share,
    }


def _of_pipeline(layout: Layout) -> dict[str, Any]:
    """Schedule of a pipeline, and number of stages per rank; empty without a pipeline."""
    if layout.pipeline == 1:
        return {}
    return {"schedule": layout.schedule, "stages_per_rank": layout.stages_per_rank}


def _rejected_facts(rejected: Rejected) -> dict[str, Any]:
    return {**_settings(rejected), "reason": rejected.reason}
