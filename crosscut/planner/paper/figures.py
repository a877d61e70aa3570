"""Interactive HTML page of `crosscut plan --html`, in one file that loads nothing from the network.

The page contains no formulas. This module forecasts every combination of the page's controls and stores the figures in
the page. The page's script looks the figures up and draws them.
"""

import json
from importlib.resources import files
from itertools import product
from typing import Any

from crosscut.config import PRESETS, Layout, ModelConfig, TrainingConfig, ZeroStage
from crosscut.config.checks import divisors
from crosscut.config.conventions import LOOK
from crosscut.config.precision import Precision
from crosscut.config.training import Device, Recompute
from crosscut.planner.candidate import Candidate
from crosscut.planner.facts import MEMORY_CATEGORIES
from crosscut.planner.hardware import Hardware
from crosscut.planner.memory import forecast_memory
from crosscut.planner.parameters import count_parameters
from crosscut.planner.products import Speed
from crosscut.planner.search import Plan, Plans, memory_of_rank
from crosscut.planner.time import model_flops_per_second, step_time

MODELS = ("gpt2-small", "gpt2-medium", "gpt2-large", "megatron-1.2b", "megatron-2.5b", "megatron-4.2b", "megatron-8.3b")
_LARGER = {"18B": (40, 6144, 48), "39B": (48, 8192, 64), "76B": (60, 10240, 80), "146B": (80, 12288, 96)}
"""Layers, hidden size and heads of Narayanan et al. 2021 (arXiv 2104.04473), Table 1."""
TENSORS = (1, 2, 4, 8, 16)
MICRO_BATCHES = (1, 2, 4, 8)
RECOMPUTE = {"none": "nothing", "operators": "cheap operators", "full": "whole layers"}
SHARDING = {"none": "nothing", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
TIMES = ("products", "attention", "passes", "optimizer", "exposed")
DATA, SEQUENCES, LENGTH = 8, 8, 1024
"""Data ranks, sequences per step on each data rank, and tokens of a sequence."""


def page(plans: Plans) -> str:
    """HTML page for the device of a search, and for the layouts that fit into its memory."""
    folder = files("crosscut.planner") / "page"
    text, script = ((folder / f"plan.{kind}").read_text(encoding="utf-8") for kind in ("html", "js"))
    content = json.dumps(page_data(plans), separators=(",", ":")).replace("</", "<\\/")
    for mark, part in (("/*style*/", page_style()), ("/*data*/", content), ("/*script*/", script)):
        text = text.replace(mark, part)
    return text


def page_style() -> str:
    """CSS of the planner's pages."""
    own = files("crosscut.planner") / "page" / "plan.css"
    return LOOK.read_text(encoding="utf-8") + own.read_text(encoding="utf-8")


def page_data(plans: Plans) -> dict[str, Any]:
    """Figures that the page draws: memory in MB, times in milliseconds, utilisation in percent.

    `limits` is the memory of one rank for each number of tensor ranks, because the ranks on a CPU share its memory.
    """
    hardware = plans.hardware
    models = _models()
    precision = plans.asked.training.precision
    names = [{"name": name, "words": f"The {name} model, {_billions(model)} parameters,"} for name, model in models]
    return {
        "device": f"{hardware.name}, {precision}",
        "conditions": (
            f"{DATA} data ranks with {SEQUENCES} sequences of {LENGTH} tokens each per step. With several tensor "
            "ranks, sequence parallelism is on."
        ),
        "limits": [round(memory_of_rank(hardware, tensor * DATA) / 1e6) for tensor in TENSORS],
        "models": names,
        "first": len(MODELS) - 1,
        "tensors": TENSORS,
        "micros": MICRO_BATCHES,
        "recompute": list(RECOMPUTE.items()),
        "sharding": list(SHARDING.items()),
        "memories": MEMORY_CATEGORIES,
        "times": TIMES,
        "grid": _grid([model for _, model in models], hardware, precision),
        "plan": {
            "limit": round(memory_of_rank(hardware, plans.num_ranks) / 1e6),
            "points": [_point(plan) for plan in plans.fitting],
        },
    }


def _models() -> list[tuple[str, ModelConfig]]:
    """Models of the page: GPT-2's, the paper's, then larger ones. Dropout is 0, so that layers can be compiled."""
    named = [(name, ModelConfig(**{**PRESETS[name], "dropout": 0.0})) for name in MODELS]
    vocab_size = named[0][1].vocab_size
    larger = [
        (name, ModelConfig(num_layers=L, hidden_size=H, num_heads=A, vocab_size=vocab_size, dropout=0.0))
        for name, (L, H, A) in _LARGER.items()
    ]
    return named + larger


def _billions(model: ModelConfig) -> str:
    return f"{count_parameters(model) / 1e9:.3g} billion"


def _grid(models: list[ModelConfig], hardware: Hardware, precision: str) -> dict[str, dict[str, Any]]:
    speeds = {tensor: Speed(hardware, precision, ranks=tensor * DATA) for tensor in TENSORS}
    axes = (enumerate(models), enumerate(TENSORS), enumerate(MICRO_BATCHES), RECOMPUTE, SHARDING)
    grid = {}
    for (a, model), (b, tensor), (c, micro), recompute, sharding in product(*axes):
        if tensor in divisors(model.num_heads):
            candidate = _candidate(model, tensor, micro, recompute, sharding, precision, hardware)
            grid[f"{a} {b} {c} {recompute} {sharding}"] = _cell(candidate, hardware, speeds[tensor])
    return grid


def _candidate(
    model: ModelConfig, tensor: int, micro: int, recompute: str, sharding: str, precision: str, hardware: Hardware
) -> Candidate:
    training = TrainingConfig(
        batch_size=DATA * SEQUENCES,
        micro_batch_size=micro,
        sequence_length=LENGTH,
        precision=Precision(precision),
        recompute=Recompute(recompute),
        device=Device(hardware.device),
    )
    layout = Layout(tensor=tensor, data=DATA, sequence_parallel=tensor > 1, sharding=ZeroStage(sharding))
    return Candidate(model, layout, training)


def _cell(candidate: Candidate, hardware: Hardware, speed: Speed) -> dict[str, Any]:
    memory = forecast_memory(candidate, device=hardware.device, capability=hardware.capability)
    time = step_time(candidate, hardware, speed=speed)
    rate = model_flops_per_second(candidate, time.total)
    return {
        "memory": [round(getattr(memory, name) / 1e6, 3) for name in MEMORY_CATEGORIES],
        "time": [round(getattr(time, name) * 1e3, 3) for name in TIMES],
        "utilisation": round(100 * rate / speed.stated_peak, 1),
    }


def _point(plan: Plan) -> dict[str, Any]:
    training, layout, gigabytes = plan.candidate.training, plan.candidate.layout, plan.memory.total / 1e9
    return {
        "label": f"{layout}, recompute {training.recompute}, micro-batch {plan.candidate.micro_batch_size}",
        "words": f"{plan.time.total:.3g} s a step, {gigabytes:.1f} GB, {plan.utilisation:.0%} of the peak",
        "tensor": layout.tensor,
        "seconds": plan.time.total,
        "megabytes": round(plan.memory.total / 1e6),
    }
