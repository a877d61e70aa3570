"""Convert the result of a layout search to plain values, for JSON, the terminal and the HTML page."""

from dataclasses import asdict, dataclass, fields
from typing import NamedTuple, NotRequired, TypedDict

from crosscut.planner.candidate import Candidate
from crosscut.planner.compute import flops_per_step
from crosscut.planner.course import checkpoint_bytes, training_flops, training_tokens
from crosscut.planner.hardware import Hardware
from crosscut.planner.memory import MemoryForecast
from crosscut.planner.parameters import count_active_parameters, count_parameters
from crosscut.planner.search import Plan, Plans, Rejected
from crosscut.planner.stages import stage_sizes

MEMORY_CATEGORIES = tuple(field.name for field in fields(MemoryForecast) if field.name != "instant")
TIME_CATEGORIES = ("products", "attention", "scan", "passes", "optimizer", "exposed", "bubble")


Facts = dict[str, object]
"""Values for JSON, by name."""


class Price(NamedTuple):
    """Price of one device for one hour, as the user states it."""

    per_hour: float
    currency: str
    """Name or sign of the currency, such as USD. Empty if the user names none."""

    def __str__(self) -> str:
        return f"{self.per_hour:g} {self.currency}".rstrip()


class Budget(TypedDict):
    """Days that training takes and, with a price, the money that it costs."""

    tokens: float
    days: float
    money: NotRequired[float]
    currency: NotRequired[str]
    price_per_hour: NotRequired[float]


@dataclass
class TrafficFacts:
    """Messages of one rank in one step with the same operation, axis and link."""

    operation: str
    axis: str
    link: str
    count: int = 0
    bytes: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0
    """Seconds that overlap with no computation."""


def three_digits(number: float) -> str:
    """Format a number with three significant digits, such as 0.0123 or 1,340."""
    return f"{float(f'{number:.3g}'):,.0f}" if number >= 100 else f"{number:.3g}"


def budget(plan: Plan, num_ranks: int, *, tokens: float, price: Price | None) -> Budget:
    """Return the days that training on `tokens` tokens takes and, if `price` is given, the money that it costs."""
    days = tokens / plan.tokens_per_day
    if price is None:
        return {"tokens": tokens, "days": days}
    money, currency = days * 24 * num_ranks * price.per_hour, price.currency
    return {"tokens": tokens, "days": days, "money": money, "currency": currency, "price_per_hour": price.per_hour}


def to_json(plans: Plans, *, top: int, tokens: float | None, price: Price | None) -> Facts:
    """Return the result of a layout search as values for JSON: the `top` fastest layouts, and all rejected layouts with
    the reasons.

    If `tokens` is given, each layout also has the days that training on `tokens` tokens takes and, with `price`, the
    money that it costs.
    """
    asked = plans.asked
    whole = training_tokens(asked) if tokens is None else tokens
    model = asdict(asked.model) | {"parameters": count_parameters(asked.model)}
    if asked.model.num_experts:
        model["active_parameters"] = count_active_parameters(asked.model)
    return {
        "model": model,
        "gpu": hardware_facts(plans.hardware),
        "gpus": plans.num_ranks,
        "batch_size": asked.training.batch_size,
        "sequence_length": asked.training.sequence_length,
        "precision": asked.training.precision,
        **({"expert_skew": plans.expert_skew} if asked.model.num_experts else {}),
        "flops_per_step": flops_per_step(asked),
        "training": {"tokens": whole, "flops": training_flops(asked, whole)},
        "checkpoint": {"every": asked.checkpoint.every, "bytes": checkpoint_bytes(asked)},
        "fitting": len(plans.fitting),
        "plans": [plan_facts(plan, plans.num_ranks, tokens=tokens, price=price) for plan in plans.fitting[:top]],
        "own": own_facts(plans, tokens=tokens, price=price),
        "rejected": [rejected_facts(entry) for entry in plans.rejected],
    }


def own_facts(plans: Plans, *, tokens: float | None, price: Price | None) -> Facts | None:
    """Forecast of the run's own layout (`Plans.own`), or why it does not fit."""
    own = plans.own
    if isinstance(own, Plan):
        return plan_facts(own, plans.num_ranks, tokens=tokens, price=price)
    return None if own is None else rejected_facts(own)


def rejected_facts(rejected: Rejected) -> Facts:
    """Settings of a layout that was rejected, and the reason."""
    return {**_settings(rejected.candidate), "reason": rejected.reason}


def hardware_facts(hardware: Hardware) -> Facts:
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


def plan_facts(plan: Plan, num_ranks: int, *, tokens: float | None, price: Price | None) -> Facts:
    """Forecast of a layout as plain values: settings, bytes per rank, seconds and messages of a step, throughput."""
    memory = {name: getattr(plan.memory, name) for name in MEMORY_CATEGORIES}
    seconds = {name: getattr(plan.time, name) for name in TIME_CATEGORIES if name != "scan" or plan.time.scan}
    stages: Facts = {}
    if plan.candidate.layout.num_stages > 1:
        stages = {
            "stages": stage_sizes(plan.candidate),
            "pipeline_rank_of_memory": plan.candidate.pipeline_rank,
            "bubble_share": plan.time.bubble_share,
        }
    return {
        **_settings(plan.candidate),
        "memory": memory | {"total": plan.memory.total, "instant": plan.memory.instant},
        **stages,
        "seconds": seconds | {"compute": plan.time.compute, "total": plan.time.total},
        "traffic": [asdict(facts) for facts in traffic_facts(plan)],
        "flops_per_second_per_gpu": plan.flops_per_second,
        "utilisation": plan.utilisation,
        "tokens_per_day": plan.tokens_per_day,
        **({} if tokens is None else {"budget": budget(plan, num_ranks, tokens=tokens, price=price)}),
    }


def traffic_facts(plan: Plan) -> list[TrafficFacts]:
    """Messages of one rank in one step, summed by operation, axis and link. The slowest messages come first."""
    kinds: dict[tuple[str, str, str], TrafficFacts] = {}
    for entry in plan.time.exchanges:
        message = entry.collective
        key = (message.operation, message.axis, entry.where)
        kind = kinds.setdefault(key, TrafficFacts(*key))
        kind.count += message.count
        kind.bytes += message.wire_bytes
        kind.seconds += entry.seconds
        kind.exposed += entry.exposed
    return sorted(kinds.values(), key=lambda kind: -kind.seconds)


def _settings(candidate: Candidate) -> Facts:
    """Layout and training settings. The settings of context ranks and of a pipeline are left out without them."""
    layout, training = candidate.layout, candidate.training
    context: Facts = {"context": layout.context, "context_attention": candidate.context_attention.way}
    pipeline: Facts = {"schedule": layout.schedule, "stages_per_rank": layout.stages_per_rank}
    return {
        "tensor": layout.tensor,
        "data": layout.data,
        **({"expert": layout.expert} if candidate.model.num_experts else {}),
        **(context if layout.context > 1 else {}),
        "pipeline": layout.pipeline,
        **(pipeline if layout.num_stages > 1 else {}),
        "sequence_parallel": layout.sequence_parallel,
        "symmetric_memory": layout.symmetric_memory,
        "sharding": layout.sharding,
        "shard_group": layout.shard_group,
        "recompute": training.recompute,
        "recompute_every": training.recompute_every,
        "micro_batch_size": candidate.micro_batch_size,
    }
