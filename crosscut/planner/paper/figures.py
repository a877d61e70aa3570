"""Interactive HTML page of `crosscut plan --html`, in one file that loads nothing from the network.

The page shows the run for which the layouts were planned, with its devices and its batch. When the page opens, it shows
the model of the run in the fastest layout. The page contains no formulas. This module forecasts every combination of
the page's controls and stores the figures in the page. The page's script looks the figures up and draws them.
"""

import json
from dataclasses import replace
from importlib.resources import files
from itertools import product
from math import gcd
from typing import NamedTuple

from crosscut.config import PRESETS, Layout, ModelConfig, ZeroStage
from crosscut.config.checks import divisors
from crosscut.config.conventions import LOOK
from crosscut.config.published.presets import sequence_length_of
from crosscut.config.system.wording import short
from crosscut.config.training import Device, Recompute
from crosscut.planner.candidate import Candidate
from crosscut.planner.facts import MEMORY_CATEGORIES, TIME_CATEGORIES, Facts, Price, budget, three_digits
from crosscut.planner.memory import forecast_memory
from crosscut.planner.parameters import count_active_parameters, count_parameters
from crosscut.planner.products import Speed
from crosscut.planner.search import Plan, Plans, kept_offload, memory_of_rank, plan_of, reason_against_tensor
from crosscut.planner.showing import section

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


class _PageModel(NamedTuple):
    """A model on the page, with the number of tokens of its sequences."""

    name: str
    model: ModelConfig
    length: int

    @property
    def words(self) -> str:
        """Name and size of the model."""
        billions = count_parameters(self.model) / 1e9
        name = self.name if self.name.startswith("the ") else f"the {self.name} model"
        active = count_active_parameters(self.model) / 1e9
        parts = f", {active:.3g} of them for each token" if self.model.num_experts else ""
        sizes = f"{billions:.3g} billion parameters{parts}, sequences of {self.length:,} tokens"
        return f"{name[0].upper()}{name[1:]} ({sizes})"


def page(plans: Plans, *, tokens: float | None = None, price: Price | None = None) -> str:
    """Return the HTML page for the device of a search and for the layouts that fit into its memory.

    If `tokens` is given, the page also shows the days that training on `tokens` tokens takes and, with `price`, the
    money that it costs.
    """
    folder = files("crosscut.planner") / "page"
    text, script = ((folder / f"plan.{kind}").read_text(encoding="utf-8") for kind in ("html", "js"))
    page = _Page(plans, tokens, price)
    content = json.dumps(page.data(), separators=(",", ":")).replace("</", "<\\/")
    marks = {"/*style*/": page_style(), "/*data*/": content, "/*script*/": script, "<!--layers-->": page.layers()}
    for mark, part in marks.items():
        text = text.replace(mark, part)
    return text


def page_style() -> str:
    """CSS of the planner's pages."""
    own = files("crosscut.planner") / "page" / "plan.css"
    return LOOK.read_text(encoding="utf-8") + own.read_text(encoding="utf-8")


class _Page:
    """Figures that the page draws: memory in MB, times in milliseconds, utilisation in percent."""

    def __init__(self, plans: Plans, tokens: float | None, price: Price | None) -> None:
        self.plans, self.hardware, self.training = plans, plans.hardware, plans.asked.training
        self.tokens, self.price = tokens, price
        self.fastest = next((plan for plan in plans.fitting if plan.candidate.layout.num_stages == 1), None)
        """Fastest layout that fits and has no pipeline."""
        model = plans.asked.model
        name = next((name for name, fields in PRESETS.items() if ModelConfig(**fields) == model), "the run's model")
        self.asked = _PageModel(name, model, self.training.sequence_length)
        """The run's own model. If the model is a preset, it has the preset's name."""
        self.models = self._models()
        fastest = [self.fastest.candidate] if self.fastest else []
        tensors = {size for size in divisors(plans.num_ranks) if size <= _MOST_TENSOR}
        self.tensors = sorted(tensors | {candidate.layout.tensor for candidate in fastest})
        """Tensor-parallel sizes that the page offers, including the size of `fastest`."""
        self.expert = self.fastest.candidate.layout.expert if self.fastest else 1
        """Number of ranks that share experts, where a model and its data ranks allow it: that of `fastest`."""
        micros = {micro for micro in _MICRO_BATCHES if self.training.batch_size % micro == 0}
        self.micros = sorted(micros | {candidate.micro_batch_size for candidate in fastest})
        """Micro-batch sizes that the page offers, including the size of `fastest`. All sizes divide the batch."""

    def _models(self) -> list[_PageModel]:
        """The run's model and the models to compare it with, the smallest first."""
        presets = [_PageModel(name, ModelConfig(**PRESETS[name]), sequence_length_of(name)) for name in _OTHERS]
        vocab_size = presets[0].model.vocab_size
        larger = {
            name: ModelConfig(num_layers=L, hidden_size=H, num_heads=A, vocab_size=vocab_size)
            for name, (L, H, A) in _LARGER.items()
        }
        others = [*presets, *(_PageModel(name, model, _LARGER_LENGTH) for name, model in larger.items())]
        shown = [self.asked, *(model for model in others if model.name != self.asked.name)]
        return sorted(shown, key=lambda shown: count_parameters(shown.model))

    def data(self) -> Facts:
        """Return all figures. The key of a cell in `grid` names the positions of the page's controls. Combinations that
        the model or the batch does not allow have no cell.
        """
        num_ranks = self.plans.num_ranks
        return {
            "title": f"{self.asked.name} on {num_ranks:,} x {self.hardware.name}",
            "conditions": (
                f"{num_ranks:,} ranks in all: with more tensor ranks there are fewer data ranks. "
                f"{self.training.batch_size:,} sequences per step, in {self.training.precision}. With several tensor "
                "ranks, sequence parallelism is on. Layouts with a pipeline appear only in the list of layouts that "
                f"fit. {self._experts()}{self._costs()}"
            ),
            "limit": round(memory_of_rank(self.hardware, num_ranks) / 1e6),
            "models": [{"name": model.name, "words": model.words} for model in self.models],
            "first": self._opening(),
            "tensors": self.tensors,
            "micros": self.micros,
            "recompute": list(_RECOMPUTE.items()),
            "sharding": list(_SHARDING.items()),
            "memories": MEMORY_CATEGORIES,
            "times": self._times,
            "grid": self._grid(),
            "points": [self._point(plan) for plan in self.plans.fitting],
        }

    def layers(self) -> str:
        """Section with the layers of the fastest layout; empty if none fits."""
        return section(self.fastest.candidate, self.hardware.device) if self.fastest else ""

    @property
    def _times(self) -> tuple[str, ...]:
        """Categories of time that the page shows. Scans are a category only if the model has some."""
        left_out = {"bubble"} if any(plan.time.scan for plan in self.plans.fitting) else {"bubble", "scan"}
        return tuple(name for name in TIME_CATEGORIES if name not in left_out)

    def _experts(self) -> str:
        """Sentence about expert ranks, with a space; empty for a model without experts."""
        if not self.asked.model.num_experts:
            return ""
        skew = self.plans.expert_skew
        loads = "have even loads" if skew == 1 else f"have at most {skew:g} times the mean load"
        return f"Experts are shared by {self.expert} data ranks, which {loads}. "

    def _costs(self) -> str:
        """Sentence about the figures of `_budget`: their source, or the options that add them."""
        if self.price:
            return f"The cost is that of all devices at {self.price} per device and hour."
        return f"With --price, the page also shows the cost{'' if self.tokens else ' of training on --tokens'}."

    def _opening(self) -> Facts:
        """Positions of the controls when the page opens. The positions show the fastest layout without a pipeline,
        except for settings that have no control.
        """
        opening: Facts = {"model": self.models.index(self.asked), "tensor": 0, "micro": 0}
        opening |= {"recompute": "none", "sharding": "none"}
        if self.fastest:
            best = self.fastest.candidate
            tensor, micro = self.tensors.index(best.layout.tensor), self.micros.index(best.micro_batch_size)
            opening |= {"tensor": tensor, "micro": micro, "sharding": str(best.layout.sharding)}
            opening |= {"recompute": str(best.training.recompute)} if best.training.recompute in _RECOMPUTE else {}
        return opening

    def _grid(self) -> dict[str, Facts]:
        speed = Speed(self.hardware, self.training.precision, ranks=self.plans.num_ranks)
        grid = {}
        axes = (enumerate(self.models), enumerate(self.tensors), enumerate(self.micros), _RECOMPUTE, _SHARDING)
        for (a, shown), (b, tensor), (c, micro), recompute, sharding in product(*axes):
            data = self.plans.num_ranks // tensor
            if self.training.batch_size % (data * micro) == 0 and not reason_against_tensor(shown.model, tensor):
                layout = Layout(tensor=tensor, data=data, expert=gcd(data, self.expert, shown.model.num_experts or 1))
                candidate = self._candidate(shown, layout, micro, recompute, sharding)
                memory = forecast_memory(candidate, device=self.hardware.device, capability=self.hardware.capability)
                plan = plan_of(candidate, memory, speed)
                grid[f"{a} {b} {c} {recompute} {sharding}"] = self._cell(plan)
        return grid

    def _candidate(self, shown: _PageModel, layout: Layout, micro: int, recompute: str, sharding: str) -> Candidate:
        training = replace(
            self.training,
            micro_batch_size=micro,
            sequence_length=shown.length,
            recompute=Recompute(recompute),
            recompute_every=1,
            device=Device(self.hardware.device),
            offload=kept_offload(self.training, recompute),
        )
        splits = layout.tensor > 1 and shown.length % layout.tensor == 0
        shared = ZeroStage(sharding if layout.data > 1 else "none")
        layout = replace(layout, sequence_parallel=splits, sharding=shared)
        return Candidate(shown.model, layout, training, expert_skew=self.plans.expert_skew)

    def _budget(self, plan: Plan) -> str:
        """Words for the time and the money that training on `tokens` tokens needs. Empty if `tokens` is None."""
        if self.tokens is None:
            return ""
        needed = budget(plan, self.plans.num_ranks, tokens=self.tokens, price=self.price)
        money = f" and {short(needed['money'])} {self.price.currency}".rstrip() if self.price else ""
        return f"{short(self.tokens)} tokens need {three_digits(needed['days'])} days{money}"

    def _cell(self, plan: Plan) -> Facts:
        return {
            "memory": [round(getattr(plan.memory, name) / 1e6, 3) for name in MEMORY_CATEGORIES],
            "time": [round(getattr(plan.time, name) * 1e3, 3) for name in self._times],
            "utilisation": round(100 * plan.utilisation, 1),
            "budget": self._budget(plan),
        }

    def _point(self, plan: Plan) -> Facts:
        training, layout, gigabytes = plan.candidate.training, plan.candidate.layout, plan.memory.total / 1e9
        bubble = f" (bubble {plan.time.bubble_share:.1%})" if layout.num_stages > 1 else ""
        words = f"{plan.time.total:.3g} s a step{bubble}, {gigabytes:.1f} GB, {plan.utilisation:.0%} of the peak"
        return {
            "label": f"{layout}, recompute {training.recompute}, micro-batch {plan.candidate.micro_batch_size}",
            "words": "; ".join(filter(None, (words, self._budget(plan)))),
            "tensor": layout.tensor,
            "seconds": plan.time.total,
            "megabytes": round(plan.memory.total / 1e6),
        }
