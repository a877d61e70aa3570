"""Interactive HTML page of `crosscut plan --html`, in one file that loads nothing from the network.

The page shows the run for which the layouts were planned, with its devices and its batch. When the page opens, it shows
the model of the run in the fastest layout. The page contains no formulas. This module forecasts every combination of
the page's controls and stores the figures in the page. The page's script looks the figures up and draws them.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import product
from typing import Any, NamedTuple

from crosscut.config import PRESETS, Layout, ModelConfig, ZeroStage
from crosscut.config.checks import divisors
from crosscut.config.conventions import LOOK
from crosscut.config.published.presets import sequence_length_of
from crosscut.config.training import Device, Recompute
from crosscut.planner.candidate import Candidate
from crosscut.planner.facts import MEMORY_CATEGORIES, Price, budget
from crosscut.planner.memory import forecast_memory
from crosscut.planner.parameters import count_parameters
from crosscut.planner.products import Speed
from crosscut.planner.search import Plan, Plans, kept_offload, memory_of_rank, reason_against_tensor
from crosscut.planner.time import model_flops_per_second, step_time

_OTHERS = (
    *("gpt2-small", "gpt2-medium", "gpt2-large", "megatron-1.2b", "megatron-2.5b", "megatron-4.2b", "megatron-8.3b"),
    *("llama2-7b", "llama3-8b", "llama3-70b"),
)
"""Presets to compare the run's model with."""
_LARGER = {"18B": (40, 6144, 48), "39B": (48, 8192, 64), "76B": (60, 10240, 80), "146B": (80, 12288, 96)}
"""Number of layers, hidden size and number of heads of larger models: Narayanan et al. 2021 (arXiv 2104.04473), Table
1."""
_LARGER_LENGTH = 2048
"""Tokens per sequence of the models in `_LARGER`, from the same source."""
_MOST_TENSOR = 16
_MICRO_BATCHES = (1, 2, 4, 8)
_RECOMPUTE = {"none": "nothing", "operators": "cheap operators", "full": "whole layers"}
_SHARDING = {"none": "none", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
_TIMES = ("products", "attention", "passes", "optimizer", "exposed")


class _Entry(NamedTuple):
    """A model on the page, with the number of tokens of its sequences."""

    name: str
    model: ModelConfig
    length: int


def page(plans: Plans, *, tokens: float | None = None, price: Price | None = None) -> str:
    """Return the HTML page for the device of a search and for the layouts that fit into its memory. If `tokens` is
    given, the page also says how many days each layout takes for them and, with `price`, what it costs.
    """
    folder = files("crosscut.planner") / "page"
    text, script = ((folder / f"plan.{kind}").read_text(encoding="utf-8") for kind in ("html", "js"))
    content = json.dumps(page_data(plans, tokens=tokens, price=price), separators=(",", ":")).replace("</", "<\\/")
    for mark, part in (("/*style*/", page_style()), ("/*data*/", content), ("/*script*/", script)):
        text = text.replace(mark, part)
    return text


def page_style() -> str:
    """CSS of the planner's pages."""
    own = files("crosscut.planner") / "page" / "plan.css"
    return LOOK.read_text(encoding="utf-8") + own.read_text(encoding="utf-8")


def page_data(plans: Plans, *, tokens: float | None = None, price: Price | None = None) -> dict[str, Any]:
    """Figures that the page draws: memory in MB, times in milliseconds, utilisation in percent.

    The key of a cell in `grid` names the positions of the page's controls. Combinations that the model or the batch
    does not allow have no cell.
    """
    entries, asked = _entries(plans), _asked_entry(plans)
    tensors, micros = _tensors(plans), _micro_batches(plans)
    return {
        "title": f"{asked.name} on {plans.num_ranks:,} x {plans.hardware.name}",
        "conditions": (
            f"{plans.num_ranks:,} ranks in all: with more tensor ranks there are fewer data ranks. "
            f"{plans.asked.training.batch_size:,} sequences per step, in {plans.asked.training.precision}. With "
            "several tensor ranks, sequence parallelism is on. Layouts with a pipeline appear only in the list of "
            "layouts that fit."
        ),
        "limit": round(memory_of_rank(plans.hardware, plans.num_ranks) / 1e6),
        "models": [{"name": entry.name, "words": _words(entry)} for entry in entries],
        "first": _opening(plans, entries.index(asked), tensors, micros),
        "tensors": tensors,
        "micros": micros,
        "recompute": list(_RECOMPUTE.items()),
        "sharding": list(_SHARDING.items()),
        "memories": MEMORY_CATEGORIES,
        "times": _TIMES,
        "grid": _grid(plans, entries, tensors, micros),
        "points": [_point(plan, _budget(plan, plans, tokens, price)) for plan in plans.fitting],
    }


def _asked_entry(plans: Plans) -> _Entry:
    """The run's own model. If the model is a preset, the entry has the preset's name."""
    model = plans.asked.model
    name = next((name for name, fields in PRESETS.items() if ModelConfig(**fields) == model), "the run's model")
    return _Entry(name, model, plans.asked.training.sequence_length)


def _entries(plans: Plans) -> list[_Entry]:
    """The run's model and the models to compare it with, the smallest first."""
    asked = _asked_entry(plans)
    presets = [_Entry(name, ModelConfig(**PRESETS[name]), sequence_length_of(name)) for name in _OTHERS]
    vocab_size = presets[0].model.vocab_size
    larger = [
        _Entry(name, ModelConfig(num_layers=L, hidden_size=H, num_heads=A, vocab_size=vocab_size), _LARGER_LENGTH)
        for name, (L, H, A) in _LARGER.items()
    ]
    others = [entry for entry in (*presets, *larger) if entry.name != asked.name]
    return sorted([asked, *others], key=lambda entry: count_parameters(entry.model))


def _words(entry: _Entry) -> str:
    billions = count_parameters(entry.model) / 1e9
    name = entry.name if entry.name.startswith("the ") else f"the {entry.name} model"
    return f"{name[0].upper()}{name[1:]} ({billions:.3g} billion parameters, sequences of {entry.length:,} tokens)"


def _tensors(plans: Plans) -> list[int]:
    """Tensor-parallel sizes that the page offers, including the size in the fastest layout without a pipeline."""
    best = {plan.candidate.layout.tensor for plan in _without_pipeline(plans)[:1]}
    return sorted(best | {size for size in divisors(plans.num_ranks) if size <= _MOST_TENSOR})


def _micro_batches(plans: Plans) -> list[int]:
    """Micro-batch sizes that the page offers, including the size in the fastest layout without a pipeline. All sizes
    divide the batch.
    """
    best = {plan.candidate.micro_batch_size for plan in _without_pipeline(plans)[:1]}
    return sorted(best | {micro for micro in _MICRO_BATCHES if plans.asked.training.batch_size % micro == 0})


def _without_pipeline(plans: Plans) -> list[Plan]:
    """Layouts that fit and have no pipeline, the fastest first."""
    return [plan for plan in plans.fitting if plan.candidate.layout.pipeline == 1]


def _opening(plans: Plans, model: int, tensors: Sequence[int], micros: Sequence[int]) -> dict[str, Any]:
    """Positions of the controls when the page opens. The positions show the fastest layout without a pipeline, except
    for settings that have no control.
    """
    opening: dict[str, Any] = {"model": model, "tensor": 0, "micro": 0, "recompute": "none", "sharding": "none"}
    if plain := _without_pipeline(plans):
        best = plain[0].candidate
        opening |= {"tensor": tensors.index(best.layout.tensor), "micro": micros.index(best.micro_batch_size)}
        opening |= {"recompute": str(best.training.recompute)} if best.training.recompute in _RECOMPUTE else {}
        opening["sharding"] = str(best.layout.sharding)
    return opening


def _grid(
    plans: Plans, entries: Sequence[_Entry], tensors: Sequence[int], micros: Sequence[int]
) -> dict[str, dict[str, Any]]:
    speed = Speed(plans.hardware, plans.asked.training.precision, ranks=plans.num_ranks)
    grid = {}
    axes = (enumerate(entries), enumerate(tensors), enumerate(micros), _RECOMPUTE, _SHARDING)
    for (a, entry), (b, tensor), (c, micro), recompute, sharding in product(*axes):
        data = plans.num_ranks // tensor
        if plans.asked.training.batch_size % (data * micro) == 0 and not reason_against_tensor(entry.model, tensor):
            candidate = _candidate(plans, entry, Layout(tensor=tensor, data=data), micro, recompute, sharding)
            grid[f"{a} {b} {c} {recompute} {sharding}"] = _cell(candidate, plans, speed)
    return grid


def _candidate(plans: Plans, entry: _Entry, layout: Layout, micro: int, recompute: str, sharding: str) -> Candidate:
    asked = plans.asked.training
    training = replace(
        asked,
        micro_batch_size=micro,
        sequence_length=entry.length,
        recompute=Recompute(recompute),
        recompute_every=1,
        device=Device(plans.hardware.device),
        offload=kept_offload(asked, recompute),
    )
    splits = layout.tensor > 1 and entry.length % layout.tensor == 0
    shared = ZeroStage(sharding if layout.data > 1 else "none")
    return Candidate(entry.model, replace(layout, sequence_parallel=splits, sharding=shared), training)


def _cell(candidate: Candidate, plans: Plans, speed: Speed) -> dict[str, Any]:
    hardware = plans.hardware
    memory = forecast_memory(candidate, device=hardware.device, capability=hardware.capability)
    time = step_time(candidate, hardware, speed=speed)
    rate = model_flops_per_second(candidate, time.total)
    return {
        "memory": [round(getattr(memory, name) / 1e6, 3) for name in MEMORY_CATEGORIES],
        "time": [round(getattr(time, name) * 1e3, 3) for name in _TIMES],
        "utilisation": round(100 * rate / speed.stated_peak, 1),
    }


def _budget(plan: Plan, plans: Plans, tokens: float | None, price: Price | None) -> str:
    """Days and money of a layout in words, with a comma in front. Empty without a number of tokens."""
    if tokens is None:
        return ""
    figures = budget(plan, plans.num_ranks, tokens=tokens, price=price)
    days, money = (_three_digits(figures.get(name, 0.0)) for name in ("days", "money"))
    time = f", {days} days for {tokens:,.0f} tokens"
    return f"{time}, {money} {figures['currency']}".rstrip() if price else time


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _point(plan: Plan, cost: str) -> dict[str, Any]:
    training, layout, gigabytes = plan.candidate.training, plan.candidate.layout, plan.memory.total / 1e9
    bubble = f" (bubble {plan.time.bubble_share:.1%})" if layout.pipeline > 1 else ""
    share = f"{plan.utilisation:.0%} of the peak"
    return {
        "label": f"{layout}, recompute {training.recompute}, micro-batch {plan.candidate.micro_batch_size}",
        "words": f"{plan.time.total:.3g} s a step{bubble}, {gigabytes:.1f} GB, {share}{cost}",
        "tensor": layout.tensor,
        "seconds": plan.time.total,
        "megabytes": round(plan.memory.total / 1e6),
    }
