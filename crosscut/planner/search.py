"""Search over the layouts that a model and a batch allow on a number of devices.

The search varies every setting that changes the cost of a step but not its result: tensor and data ranks, sequence
parallelism, sharding over data ranks, recomputation, and the micro-batch size. Each candidate is either ranked by the
time of a step or rejected with a reason. The search checks memory first, because a memory forecast is cheap. Only
candidates that fit into memory get a forecast of their time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Any

from crosscut.config import ConfigError, Layout, LayoutError, ModelConfig, RunConfig, TrainingConfig, ZeroStage, resolve
from crosscut.config.axes import arrangements
from crosscut.config.checks import divisors, listed
from crosscut.config.layouts.context import heads_of_rank
from crosscut.config.model import require_tensor_axis
from crosscut.config.run import reason_against_compiling
from crosscut.config.training import Device, Offload, Recompute
from crosscut.planner.candidate import Candidate
from crosscut.planner.hardware import Hardware
from crosscut.planner.memory import MemoryForecast, forecast_memory
from crosscut.planner.products import Speed
from crosscut.planner.time import StepTime, model_flops_per_second, step_time

NEAR_LIMIT = 0.9
"""Share of a rank's memory above which a layout has little margin for an error of the forecast."""

_DAY = 86_400
_MOST_RANKS = 100_000_000
"""Upper limit of `--gpus`, a hundred times the size of the largest machines."""
CHOSEN = frozenset({
    "layout.tensor", "layout.data", "layout.sequence_parallel", "layout.sharding", "layout.shard_group",
    "training.micro_batch_size", "training.recompute", "training.recompute_every",
})  # fmt: skip
"""Settings that the search chooses. The search ignores their values in the run, except that the run's layout gives the
default number of devices."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout that fits into memory, with its forecast."""

    candidate: Candidate
    memory: MemoryForecast
    time: StepTime
    peak: float
    """FLOP/s of one device in the run's precision, as the maker states it."""

    @property
    def flops_per_second(self) -> float:
        """Model FLOP/s of one device."""
        return model_flops_per_second(self.candidate, self.time.total)

    @property
    def utilisation(self) -> float:
        """Model FLOP/s of one device as a share of the stated peak."""
        return self.flops_per_second / self.peak

    @property
    def tokens_per_day(self) -> float:
        """Tokens that all devices together train on in a day."""
        training = self.candidate.training
        return training.batch_size * training.sequence_length / self.time.total * _DAY

    def run(self, asked: RunConfig) -> RunConfig:
        """Return a copy of the run settings `asked` with the layout and the training settings of this plan."""
        mine = self.candidate.training
        training = replace(mine, device=asked.training.device, offload=kept_offload(asked.training, mine.recompute))
        return replace(asked, layout=self.candidate.layout, training=training)


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A layout that is impossible or does not fit into memory."""

    candidate: Candidate
    reason: str
    """Reason for the user: a sentence without the full stop."""
    needed: int = 0
    """Bytes that one rank needs; 0 if memory is not the reason for the rejection."""

    @property
    def label(self) -> str:
        """Name of the layout: its axes and its sharding, without recomputation and micro-batch size."""
        layout = self.candidate.layout
        shared = "" if layout.sharding == "none" else f", {layout.sharding}"
        if self.needed and layout.data > 1 and not shared:
            shared = ", not sharded"
        return f"{layout.arrangement}{shared}"


@dataclass(frozen=True, kw_only=True)
class Plans:
    """Result of a search: the plans that fit and the layouts rejected."""

    asked: RunConfig
    hardware: Hardware
    num_ranks: int
    fitting: tuple[Plan, ...]
    """Layouts that fit into memory, the fastest first."""
    rejected: tuple[Rejected, ...]

    def is_near_limit(self, plan: Plan) -> bool:
        """Whether the plan needs more than `NEAR_LIMIT` of a rank's memory."""
        return plan.memory.total > NEAR_LIMIT * memory_of_rank(self.hardware, self.num_ranks)

    @property
    def leanest(self) -> list[Rejected]:
        """Rejected layouts that come closest to fitting into memory.

        There is one entry for each combination of tensor size and sharding for which no layout fits: the layout that
        needs the fewest bytes per rank. The entries are sorted by these bytes, the smallest first. Layouts that were
        rejected for another reason than memory come last.
        """
        fits = {_kind(plan.candidate) for plan in self.fitting}
        nearest: dict[tuple[int, str], Rejected] = {}
        for rejected in self.rejected:
            kind = _kind(rejected.candidate)
            if kind not in fits and (kind not in nearest or rejected.needed < nearest[kind].needed):
                nearest[kind] = rejected
        return sorted(nearest.values(), key=lambda rejected: (not rejected.needed, rejected.needed))


def search_layouts(run: RunConfig, hardware: Hardware, num_ranks: int) -> Plans:
    """Search the layouts of `run` on `num_ranks` devices. Of the layout that `run` itself has, the search keeps only
    the number of context ranks.

    Raises `ConfigError` if no layout is possible. Examples are a `num_ranks` out of range, a precision that the device
    does not have, a `training.device` that is not the kind of the hardware, and a batch that no layout can divide.
    """
    _require_ranks(hardware, num_ranks)
    run.layout.require_one_stage("plan")
    run = resolve(run, device=hardware.device, precision=hardware.fast_precision).config
    require_precision(run, hardware)
    require_device(run, hardware)
    if run.layout.symmetric_memory and hardware.device == "cpu":
        raise LayoutError(
            f"`layout.symmetric_memory` must be false for {hardware.name}, but is true. Symmetric memory needs GPUs: "
            "remove the setting."
        )
    _require_context(run, num_ranks)
    per_context = num_ranks // run.layout.context
    tensors = [tensor for tensor in divisors(per_context) if not reason_against_tensor(run.model, tensor)]
    _require_batch(run, per_context, max(tensors))
    rejected = _impossible(run, num_ranks)
    forbidden = {entry.candidate.layout for entry in rejected}
    speed = Speed(hardware, run.training.precision, ranks=num_ranks)
    fitting: list[Plan] = []
    for plain in (layout for layout in _plain_layouts(run, num_ranks) if layout not in forbidden):
        layouts = list(_layouts(run, hardware, plain))
        rejected += _not_compilable(run, layouts)
        for candidate in _candidates(run, hardware, layouts):
            found = _plan(candidate, hardware, speed)
            if isinstance(found, Plan):
                fitting.append(found)
            else:
                rejected.append(found)
    if not fitting and max(tensors) == 1 < per_context:
        raise LayoutError(_nothing_cuts(run.model, hardware, per_context))
    fitting.sort(key=lambda plan: (plan.time.total, plan.memory.total))
    return Plans(asked=run, hardware=hardware, num_ranks=num_ranks, fitting=tuple(fitting), rejected=tuple(rejected))


def _require_ranks(hardware: Hardware, num_ranks: int) -> None:
    if num_ranks < 1:
        raise ConfigError(f"`--gpus` must be at least 1, but is {num_ranks}. Set it to the number of devices.")
    if num_ranks > _MOST_RANKS:
        raise ConfigError(f"`--gpus` must be at most {_MOST_RANKS:,}, but is {num_ranks:,}. Use fewer devices.")
    if hardware.network is None and num_ranks > hardware.ranks_per_node:
        raise ConfigError(
            f"`--gpus` must be at most {hardware.ranks_per_node} for {hardware.name}, but is {num_ranks}. The device "
            f"file has no section [network], so it describes one node of {hardware.ranks_per_node} ranks. Use fewer "
            "devices, or add a section [network] to your own device file."
        )


def _require_context(run: RunConfig, num_ranks: int) -> None:
    """Raise `LayoutError` unless the run's number of context ranks divides the number of devices."""
    context = run.layout.context
    if num_ranks % context:
        raise LayoutError(
            f"`--gpus` must be a multiple of `layout.context` ({context}), but is {num_ranks}. "
            f"Try {num_ranks // context * context + context}, or change `layout.context`."
        )


def _plan(candidate: Candidate, hardware: Hardware, speed: Speed) -> Plan | Rejected:
    """Forecast a candidate. The time is forecast only if the candidate fits into memory."""
    memory = forecast_memory(candidate, device=hardware.device, capability=hardware.capability)
    if reason := _reason_against_memory(candidate, memory, hardware):
        return Rejected(candidate=candidate, reason=reason, needed=memory.total)
    time = step_time(candidate, hardware, speed=speed)
    return Plan(candidate=candidate, memory=memory, time=time, peak=speed.stated_peak)


def _not_compilable(run: RunConfig, layouts: list[Layout]) -> Iterator[Rejected]:
    """Reject the layouts that cannot be compiled although `training.compile` is "on".

    Layouts that differ only in their sharding share one entry.
    """
    for layout in layouts:
        reason = _reason_against_compiling(run, layout)
        if reason and layout.sharding == "none":
            candidate = Candidate(run.model, layout, run.training, run.optimizer, run.mask_fraction)
            yield Rejected(candidate=candidate, reason=f'`training.compile` is "on", but {reason}')


def _reason_against_compiling(run: RunConfig, layout: Layout) -> str:
    return reason_against_compiling(run.model, layout) if run.training.compile == "on" else ""


def _candidates(run: RunConfig, hardware: Hardware, layouts: list[Layout]) -> Iterator[Candidate]:
    micro_batches = divisors(run.training.smallest_batch[1] // layouts[0].data)
    trainings = [
        replace(
            run.training,
            micro_batch_size=micro,
            recompute=Recompute(recompute),
            recompute_every=every,
            device=Device(hardware.device),
            offload=kept_offload(run.training, recompute),
        )
        for recompute, every in _recomputations(run, hardware)
        for micro in micro_batches
    ]
    for layout in layouts:
        if not _reason_against_compiling(run, layout):
            for training in trainings:
                yield Candidate(run.model, layout, training, run.optimizer, run.mask_fraction)


def _recomputations(run: RunConfig, hardware: Hardware) -> list[tuple[str, int]]:
    """Pairs of `training.recompute` and `training.recompute_every` that the search tries.

    Recomputing the attention core ("selective") saves memory only on CPUs, where a kernel may keep the scores. The
    search leaves "selective" out if layers must be compiled and the model has dropout.
    """
    keeps_scores = hardware.device == "cpu" and not (run.training.compile == "on" and run.model.dropout)
    core = [("selective", 1)] if keeps_scores else []
    return [("none", 1), *core, ("operators", 1), ("full", 2), ("full", 1)]


def _plain_layouts(run: RunConfig, num_ranks: int) -> Iterator[Layout]:
    """Layouts of all arrangements along the axes, without options. The smallest tensor axis comes first. All layouts
    have the run's number of context ranks.
    """
    context: dict[str, Any] = {"context": run.layout.context, "context_attention": run.layout.context_attention}
    values: Iterator[dict[str, Any]] = arrangements(num_ranks // run.layout.context)
    return (Layout(**sizes, **context) for sizes in values)


def _layouts(run: RunConfig, hardware: Hardware, plain: Layout) -> Iterator[Layout]:
    """Layouts with the arrangement of `plain` and with each combination of options that the search compares."""
    tensor, data = plain.tensor, plain.data
    pieces = 2 * plain.context if plain.context > 1 else 1
    can_split = tensor > 1 and run.training.sequence_length % (pieces * tensor) == 0
    in_node = max(1, hardware.ranks_per_node // plain.stride_of("data"))
    groups = [0, in_node] if 1 < in_node < data and data % in_node == 0 and plain.context == 1 else [0]
    for split in (False, True) if can_split else (False,):
        symmetric = split and run.layout.symmetric_memory and tensor <= hardware.ranks_per_node
        whole = replace(plain, sequence_parallel=split, symmetric_memory=symmetric)
        yield whole
        for sharding in (ZeroStage.ZERO2, ZeroStage.ZERO3) if data * plain.context > 1 else ():
            yield from (replace(whole, sharding=sharding, shard_group=group) for group in groups)


def kept_offload(training: TrainingConfig, recompute: str) -> tuple[Offload, ...]:
    """Parts of `training.offload` that work with this kind of recomputation. Activations are offloaded only with
    "full".
    """
    return tuple(item for item in training.offload if item != "activations" or recompute == "full")


@lru_cache
def reason_against_tensor(model: ModelConfig, tensor: int) -> str:
    """Reason why the model cannot be cut over `tensor` ranks, as a clause. Empty if the model can be cut."""
    try:
        require_tensor_axis(model, tensor)
    except LayoutError:
        if model.num_heads % tensor:
            return f"{model.num_heads} attention heads cannot be divided evenly over {tensor} tensor ranks"
        if model.mlp_size % tensor:
            return f"the MLP's width of {model.mlp_size} cannot be divided evenly over {tensor} tensor ranks"
        return f"{model.num_kv_heads} key-value heads cannot be divided or shared evenly by {tensor} tensor ranks"
    return ""


def _reason_against_context(run: RunConfig, layout: Layout) -> str:
    """Reason why context ranks cannot share the sequences, as a clause. Empty if they can."""
    heads, _ = heads_of_rank(run.model, layout)
    if layout.context_attention == "all_to_all" and heads % layout.context:
        return f"{heads} heads of a tensor rank cannot be exchanged evenly among {layout.context} context ranks"
    return ""


def _nothing_cuts(model: ModelConfig, hardware: Hardware, num_ranks: int) -> str:
    """Error message if no layout fits. It names the setting that keeps the model from using several tensor ranks."""
    heads, gpus = f"`model.num_heads` ({model.num_heads})", f"`--gpus` ({num_ranks})"
    by_heads = [d for d in divisors(gcd(model.num_heads, num_ranks)) if d > 1]
    by_width = [d for d in by_heads if model.mlp_size % d == 0]
    if not by_heads:
        name, value, what = "num_heads", model.num_heads, f"have a divisor in common with {gpus}"
    elif not by_width:
        name, value, what = "mlp_size", model.mlp_size, f"have a divisor in common with {gpus} and {heads}"
    else:
        name, value = "num_kv_heads", model.num_kv_heads
        what = f"divide or be a multiple of a tensor size that {gpus} and {heads} allow ({listed(by_width)})"
    possible = [
        d
        for d in divisors(model.num_heads)
        if d > 1 and not reason_against_tensor(model, d) and (hardware.network or d <= hardware.ranks_per_node)
    ]
    advice = f"{listed(possible)} GPUs" if possible else "another value, or a GPU with more memory"
    return f"`model.{name}` must {what} if the model does not fit on one GPU, but is {value}. Try {advice}."


def _impossible(run: RunConfig, num_ranks: int) -> list[Rejected]:
    """Layouts that the model or the batch rules out, independent of memory."""
    rejected = []
    _, batch = run.training.smallest_batch
    for layout in _plain_layouts(run, num_ranks):
        reason = reason_against_tensor(run.model, layout.tensor) or _reason_against_context(run, layout)
        if not reason and batch % layout.data:
            reason = f"a batch of {batch} sequences cannot be divided evenly over {layout.data} data ranks"
        if reason:
            candidate = Candidate(run.model, layout, run.training, run.optimizer, run.mask_fraction)
            rejected.append(Rejected(candidate=candidate, reason=reason))
    return rejected


def memory_of_rank(hardware: Hardware, num_ranks: int) -> int:
    """Bytes of memory available to one rank. The ranks on a CPU divide the memory of the CPU evenly."""
    return hardware.memory // num_ranks if hardware.device == "cpu" else hardware.memory


def _reason_against_memory(candidate: Candidate, memory: MemoryForecast, hardware: Hardware) -> str:
    """Reason why a candidate does not fit into the memory of a rank. Empty if the candidate fits.

    The reason names the weights and the optimizer if their bytes alone exceed the memory. If only the bytes of weights,
    optimizer and gradients together exceed the memory, the reason names all three. Otherwise, the reason names the
    activations and buffers of a micro-batch.
    """
    num_ranks = candidate.layout.world_size
    limit = memory_of_rank(hardware, num_ranks)
    who = f"each of {num_ranks} ranks has" if hardware.device == "cpu" else "the GPU has"
    if memory.total <= limit:
        return ""
    weights = memory.weights + memory.master_weights + memory.optimizer
    if weights > limit:
        return f"weights and optimizer need {_gigabytes(weights)} GB per rank; {who} {_gigabytes(limit)} GB"
    if weights + memory.gradients > limit:
        with_gradients = _gigabytes(weights + memory.gradients)
        return f"weights, optimizer and gradients need {with_gradients} GB per rank; {who} {_gigabytes(limit)} GB"
    rest = memory.total - weights - memory.gradients
    return (
        f"activations and buffers of a micro-batch of {candidate.micro_batch_size} need {_gigabytes(rest)} GB per rank "
        f"besides {_gigabytes(weights + memory.gradients)} GB of state; {who} {_gigabytes(limit)} GB"
    )


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.0f}" if num_bytes >= 10e9 else f"{num_bytes / 1e9:.1f}"


def require_precision(run: RunConfig, hardware: Hardware) -> None:
    """Raise `ConfigError` unless the device file states FLOP/s for the run's precision."""
    precision = run.training.precision
    if precision not in hardware.flops:
        has = listed(f'"{name}"' for name in hardware.flops if name != "tf32")
        raise ConfigError(
            f"`training.precision` must be a precision of {hardware.name}, but is {precision!r}. Choose {has}."
        )


def require_device(run: RunConfig, hardware: Hardware) -> None:
    """Raise `ConfigError` if `training.device` and `hardware` are different kinds of device (CPU and GPU)."""
    if run.training.device not in ("auto", hardware.device):
        raise ConfigError(
            f'`training.device` must be "auto" or "{hardware.device}" on {hardware.name}, but is '
            f'"{run.training.device}". Set training.device=auto.'
        )


def _require_batch(run: RunConfig, num_ranks: int, most_tensor: int) -> None:
    (name, batch), least_data = run.training.smallest_batch, num_ranks // most_tensor
    if batch < least_data:
        raise LayoutError(
            f"`{name}` must be at least {least_data}, but is {batch}. Each data rank needs a sequence, "
            f"and {num_ranks} GPUs with at most {most_tensor} tensor ranks make at least {least_data} data ranks. "
            f"Raise the batch size, or use at most {batch * most_tensor} GPUs."
        )
    if all(batch % data for data in divisors(num_ranks) if not reason_against_tensor(run.model, num_ranks // data)):
        raise LayoutError(
            f"`{name}` must be divisible by the number of data ranks, but is {batch}. No possible layout "
            f"of {num_ranks} GPUs has a number of data ranks that divides {batch}. Try "
            f"{-(-batch // least_data) * least_data}."
        )


def _kind(candidate: Candidate) -> tuple[int, str]:
    return candidate.layout.tensor, candidate.layout.sharding
