"""Forecast the seconds of one step from its matrix products, its passes over memory and its messages.

    step = M (forward + backward) + optimizer + exposed messages + bubble

`M` is the number of micro-batches in a step. `bubble` is the time that pipeline stages wait for each other, from a
simulation of their schedule. The share of the peak that products attain is a measured figure of the device file
(`planner.hardware`). The FLOPs, bytes and messages are counted. The forecast leaves out the data loader, a
host that cannot keep up with its GPU, and the slowdown of products that overlap with messages. The derivation is in
`docs/planner.md`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, get_args

from crosscut.architecture import (
    Decoder,
    Layer,
    Operation,
    Product,
    Target,
    describe,
    flat,
    lower,
    run_again,
)
from crosscut.architecture.messages import Phase, multiplications_apart, products_at
from crosscut.architecture.pipeline import Durations, Schedule, ends_of_ranks
from crosscut.architecture.steps import MessageAxis, Multiply, weight_gradients
from crosscut.architecture.target import shared_target
from crosscut.config.training import Recompute
from crosscut.planner.candidate import Candidate, Planned, recomputation_step, target_of
from crosscut.planner.compute import flops_per_step
from crosscut.planner.hardware import Hardware
from crosscut.planner.messages.exchange import Beside, Exchange, exchange
from crosscut.planner.messages.traffic import step_traffic
from crosscut.planner.muon import MUON_KERNELS, muon_parameters, muon_products
from crosscut.planner.parameters import (
    known_vocab_size,
    num_trained_tensors,
    trained_share,
)
from crosscut.planner.passes import LayerPasses, ends_passes, layer_passes, optimizer_bytes, weight_passes
from crosscut.planner.products import Speed
from crosscut.planner.program import Program, crosscut_program
from crosscut.planner.stages import alike_ranks, part_of, schedule_of_run, separates_weights, stages_of
from crosscut.planner.teacher import head_target, parts_of_teacher, teacher_target

_OPTIMIZER_KERNELS = 50
_INSIDE = frozenset(get_args(MessageAxis))
"""Axes of the messages inside the model."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step, by category. In a pipeline, the figures are those of the rank with the most work."""

    products: float
    """Matrix products, including recomputed products."""

    attention: float
    """Attention core: scores and weighted values, without the projections."""

    scan: float
    """Scans of mixers with a state: the products inside chunks and between them, without the projections."""

    passes: float
    """Operators that are limited by memory bandwidth, such as norms and activations."""

    optimizer: float
    """Gradient norm, AdamW or Muon with its products, the moving average of the weights, and the transfer of moments
    that are offloaded to host memory."""

    exposed: float
    """Messages, or parts of messages, that overlap with no computation."""

    bubble: float
    """Waiting for other stages of a pipeline and for their messages; 0 without a pipeline."""

    exchanges: tuple[Exchange, ...]
    """All messages of the step, whether they overlap with computation or not."""

    @property
    def compute(self) -> float:
        """Seconds in which the device computes, without waiting for messages or other stages."""
        return self.products + self.attention + self.scan + self.passes + self.optimizer

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.exposed + self.bubble

    @property
    def bubble_share(self) -> float:
        """Ratio of the bubble to the rest of the step; 0 without a pipeline."""
        return self.bubble / (self.compute + self.exposed)


@dataclass(frozen=True, kw_only=True)
class _LayerTime:
    """Seconds of one layer in one micro-batch."""

    products: Mapping[str, tuple[float, float, float]]
    """Seconds of the forward products, of the backward products, and of the weight gradients that a schedule may
    compute later, keyed by the name of the step that enters or leaves the parallel region. Other products follow."""
    not_repeated: float
    """Seconds of the forward products that full recomputation does not repeat."""
    attention: tuple[float, float]
    scan: tuple[float, float]
    passes: tuple[float, float]
    cheap: float
    """Seconds of the forward passes that `training.recompute = "operators"` repeats."""
    core: float
    """Seconds of the passes of attention and scans over memory, which `training.recompute = "selective"` repeats."""

    @cached_property
    def weight_products(self) -> float:
        return sum(seconds[2] for seconds in self.products.values())

    @cached_property
    def all_products(self) -> float:
        return sum(sum(seconds) for seconds in self.products.values())

    @cached_property
    def forward_products(self) -> float:
        return sum(seconds[0] for seconds in self.products.values())

    @cached_property
    def forward(self) -> float:
        return self.forward_products + self.attention[0] + self.scan[0] + self.passes[0]

    @cached_property
    def backward(self) -> float:
        products = sum(seconds[1] + seconds[2] for seconds in self.products.values())
        return products + self.attention[1] + self.scan[1] + self.passes[1]

    def repeated(self, mode: str) -> tuple[float, float, float, float]:
        """Seconds that recomputation in this mode adds: for products, attention, scans, and passes over memory."""
        if mode == Recompute.FULL:
            return self.forward_products - self.not_repeated, self.attention[0], self.scan[0], self.passes[0]
        if mode == Recompute.SELECTIVE:
            return 0.0, self.attention[0], self.scan[0], self.core
        return 0.0, 0.0, 0.0, self.cheap if mode == Recompute.OPERATORS else 0.0


class _Layers:
    """Seconds of all layers in one micro-batch, as sums over the kinds of layers."""

    def __init__(self, run: Planned, decoder: Decoder, timed: Mapping[Layer, _LayerTime]) -> None:
        self.number = len(decoder.layers)
        self._kinds = [(count, timed[layer]) for layer, count in decoder.kinds.items()]
        again = decoder.recomputed(recomputation_step(run))
        repeated = [(again[layer], timed[layer].repeated(run.training.recompute)) for layer in decoder.kinds]
        self.again = tuple(sum(count * seconds[i] for count, seconds in repeated) for i in range(4))
        """Seconds that recomputation adds over all layers: for products, attention, scans, and passes over memory."""

    def total(self, seconds: Callable[[_LayerTime], float]) -> float:
        """Sum over all layers."""
        return sum(count * seconds(layer) for count, layer in self._kinds)

    def mean(self, seconds: Callable[[_LayerTime], float]) -> float:
        """Mean over all layers, without rounding error if the layers are equal."""
        first = seconds(self._kinds[0][1])
        return first + sum(count * (seconds(layer) - first) for count, layer in self._kinds) / self.number


def step_time(
    run: Planned, hardware: Hardware, *, program: Program | None = None, speed: Speed | None = None
) -> StepTime:
    """Forecast the seconds of one step of `run`, with one device for each rank of its layout.

    In a pipeline, the result has the seconds of the whole step, divided into the categories of the rank with the most
    work. `program` is the implementation to forecast, by default Crosscut's own. `speed` caches the product times of
    `hardware`: pass the same object for several runs of the same precision and number of ranks. Raises `ConfigError`
    if `model.vocab_size` is still 0.
    """
    run = Candidate.of(run, hardware.fast_precision)
    speed = speed or Speed(hardware, run.training.precision, ranks=run.layout.world_size)
    known_vocab_size(run.model)
    ranks = _times_of_ranks(run, speed, program)
    return ranks[0].time if run.layout.num_stages == 1 else _pipeline_time(schedule_of_run(run), ranks)


def _times_of_ranks(run: Candidate, speed: Speed, program: Program | None = None) -> list["_RankTime"]:
    """Times of all ranks of a pipeline, in order. Ranks with the same work share one forecast."""
    program = program or crosscut_program(run, speed.hardware)
    times: dict[int, _RankTime] = {}
    for group in alike_ranks(run):
        times |= dict.fromkeys(group, _rank_time(Candidate.at(run, group[0]), program, speed))
    return [times[rank] for rank in sorted(times)]


def shortest_step(run: Candidate, speed: Speed) -> float:
    """Lower bound on the time of a step with a pipeline, in seconds. It needs no simulation of the schedule.

    A rank starts when its first micro-batch has passed the stages before it. After its last backward pass, the gradient
    still passes back through these stages to the first rank. In between, the rank has the work of all micro-batches. If
    the schedule separates weight gradients from the backward passes, the weight gradients may be computed at any time.
    """
    ranks = _times_of_ranks(run, speed)
    before = after = shortest = 0.0
    for rank in ranks:
        works = [(stage.forward + stage.backward, stage.weights) for stage in rank.stages]
        passes, weights = (run.num_micro_batches * sum(seconds) for seconds in zip(*works, strict=True))
        to_first = before + passes + after + ranks[0].stages[0].weights + ranks[0].outside
        shortest = max(shortest, before + passes + weights + rank.outside, to_first)
        before += rank.stages[0].forward + rank.stages[0].message
        after += rank.stages[0].backward + rank.stages[0].message
    return shortest + max(rank.time.optimizer for rank in ranks)


def times_of_stages(run: Candidate, speed: Speed) -> list[float]:
    """Seconds that a micro-batch takes in each stage of a pipeline with one stage per rank, or on a layout without a
    pipeline. The result includes the waits for messages between tensor and context ranks, but not the optimizer and the
    messages between data ranks.
    """
    ranks = _times_of_ranks(run, speed)
    return [stage.forward + stage.backward + stage.weights for rank in ranks for stage in rank.stages]


def time_around_passes(run: Candidate, speed: Speed) -> float:
    """Seconds after all passes of a step with a pipeline: the time in which the first rank sums its gradients, plus the
    time of the slowest optimizer. Messages that overlap with passes are left out.
    """
    ranks = _times_of_ranks(run, speed)
    return ranks[0].outside + max(rank.time.optimizer for rank in ranks)


class _RankTime(NamedTuple):
    """Seconds of one rank's step, without waiting for other stages."""

    time: StepTime
    stages: tuple[Durations, ...]
    """Seconds of each pass of a micro-batch through each stage of the rank."""
    outside: float
    """Seconds in which the rank waits for messages outside of the passes, such as sums of gradients."""


def _pipeline_time(schedule: Schedule, ranks: Sequence[_RankTime]) -> StepTime:
    """Return the time of a step of the pipeline with these ranks.

    Every rank runs its passes in the order of the schedule, and then sums its gradients. The norm of all gradients is
    known when the last rank has summed its gradients. Then each rank updates its weights. The result has the seconds of
    the rank with the most work, and counts all the time in which this rank waits for other ranks as its bubble.
    """
    stages = [ranks[stage % len(ranks)].stages[stage // len(ranks)] for stage in range(schedule.num_stages)]
    ends = ends_of_ranks(schedule, stages)
    summed = max(end + rank.outside for end, rank in zip(ends, ranks, strict=True))
    total = summed + max(rank.time.optimizer for rank in ranks)
    busiest = max((rank.time for rank in ranks), key=lambda time: time.total)
    return replace(busiest, bubble=total - busiest.total)


def _rank_time(run: Candidate, program: Program, speed: Speed) -> _RankTime:
    M, part, hardware = run.num_micro_batches, part_of(run), speed.hardware
    target = target_of(run, device=hardware.device)
    target = shared_target(replace(target, compiled=program.compiled, fuses_attention=program.fused_attention))
    timed = {layer: _layer(layer, target, speed, repeats_last=program.repeats_last) for layer in part.kinds}
    layers = _Layers(run, part, timed)
    logits = sum(_logits(product, speed) for product in part.head.products(target)) if part.is_last else 0.0
    taught = _teacher_pass(run, speed) if part.is_last and run.teacher.is_computed else 0.0
    ends = [speed.passes(num_bytes) for num_bytes in ends_passes(run, target)]
    host = [(part.is_first + part.is_last) / 4 * seconds for seconds in hardware.layer_host]
    cast, summed = (speed.passes(num_bytes) for num_bytes in weight_passes(run, program))
    beside = _beside(layers, speed, summed)
    traffic = step_traffic(run, compiled=program.repeats_last, target=target)
    exchanges = tuple(exchange(collective, run, program, beside) for collective in traffic)
    products, attention, scan, passes = layers.again
    time = StepTime(
        products=M * (layers.total(lambda layer: layer.all_products) + products + logits + taught),
        attention=M * (layers.total(lambda layer: sum(layer.attention)) + attention),
        scan=M * (layers.total(lambda layer: sum(layer.scan)) + scan),
        passes=M * (layers.total(lambda layer: sum(layer.passes)) + passes + (sum(ends) + sum(host)) + cast + summed),
        optimizer=speed.passes(optimizer_bytes(run, program))
        + _orthogonalization(run, speed)
        + _moments_from_host(run, hardware)
        + _starts(run, hardware),
        exposed=sum((entry.exposed for entry in exchanges), 0.0),
        bubble=0.0,
        exchanges=exchanges,
    )
    waits = [_waits(exchanges, phase) for phase in (Phase.FORWARD, Phase.BACKWARD)]
    before = logits + taught + ends[0] + host[0]
    at_ends = Durations(forward=before, backward=ends[1] + host[1], message=_transfer(exchanges))
    shared = Durations(forward=cast + waits[0] / M, backward=waits[1] / M, weights=summed)
    return _RankTime(time, _durations(run, timed, shared, at_ends), time.exposed - sum(waits))


def _durations(
    run: Candidate, timed: Mapping[Layer, _LayerTime], shared: Durations, at_ends: Durations
) -> tuple[Durations, ...]:
    """Seconds of the passes of each stage of a rank.

    `shared` are the seconds of casts, sums and messages, which the rank's stages share evenly. `at_ends` are the
    seconds of the embedding in the first stage, or of the loss in the last stage. The forward pass of the loss also
    computes gradients.
    """
    stages, whole, separates = stages_of(run, run.pipeline_rank), describe(run.model), separates_weights(run.layout)
    durations = []
    for stage in stages:
        layers = _Layers(run, whole.part((stage,)), timed)
        end = at_ends if stage.is_first or stage.is_last else Durations(forward=0.0, backward=0.0)
        of_weights = layers.total(lambda layer: layer.weight_products)
        backward = layers.total(lambda layer: layer.backward) - of_weights + sum(layers.again)
        weights = of_weights + shared.weights / len(stages)
        durations.append(
            Durations(
                forward=layers.total(lambda layer: layer.forward) + shared.forward / len(stages) + end.forward,
                backward=backward + shared.backward / len(stages) + end.backward + (0.0 if separates else weights),
                weights=weights if separates else 0.0,
                message=at_ends.message,
            )
        )
    return tuple(durations)


def _waits(exchanges: Iterable[Exchange], phase: Phase) -> float:
    """Seconds per step in which the passes of this phase wait for messages inside the model."""
    inside = [entry for entry in exchanges if entry.collective.axis in _INSIDE]
    return sum((entry.exposed for entry in inside if entry.collective.phase == phase), 0.0)


def _transfer(exchanges: Iterable[Exchange]) -> float:
    """Seconds of a message to another stage; 0 without a pipeline."""
    sent = [entry for entry in exchanges if entry.collective.operation == Operation.SEND]
    return max((entry.seconds / entry.collective.count for entry in sent), default=0.0)


def bubble_share(stages: int, micro_batches: int, *, chunks: int = 1) -> float:
    """Ratio of the waiting time of a pipeline to its computing time: (p - 1) / (v m).

    `stages` is p, the number of pipeline ranks. `micro_batches` is m, and `chunks` is v, the number of stages of each
    rank. Source: Narayanan et al. 2021 (arXiv 2104.04473, section 2.2). This formula assumes equal stages and messages
    that take no time. `step_time` simulates the schedule instead.
    """
    return (stages - 1) / (chunks * micro_batches)


def model_flops_per_second(run: Planned, seconds: float) -> float:
    """Model FLOP/s of one rank if a step takes `seconds` seconds."""
    return flops_per_step(run) / seconds / run.layout.world_size


def _logits(product: Product, speed: Speed) -> float:
    """Seconds of the products with the output weight: the logits, the gradient of the hidden states and, unless the
    weight is frozen, the gradient of the weight.
    """
    return (2 if product.is_frozen else 3) * speed.product(product, in_layer=False)


def _teacher_pass(run: Candidate, speed: Speed) -> float:
    """Seconds of a forward pass of the teacher for one micro-batch, without messages. The precision counts as that of
    the run.
    """
    trunk, *others = (part for part, _ in parts_of_teacher(run))
    target = teacher_target(run, device=speed.hardware.device)
    logits = (others or [trunk])[-1].head.products(head_target(run))
    layers = (count * _layer(layer, target, speed, repeats_last=False).forward for layer, count in trunk.kinds.items())
    return sum(layers) + sum(speed.product(product, in_layer=False) for product in logits)


@lru_cache(maxsize=256)
def _layer(layer: Layer, target: Target, speed: Speed, *, repeats_last: bool) -> _LayerTime:
    products = {
        name: (
            sum(speed.product(p) for p in found),
            sum(speed.product(p.of_input) for p in found),
            sum(speed.product(p) for p in weight_gradients(found)),
        )
        for name, found in products_at(layer, target).items()
    }
    for step in multiplications_apart(layer, target):
        products[step.matrix.weight.name] = _apart(step, target, speed)
    passes = layer_passes(layer, target)
    return _LayerTime(
        products=products,
        not_repeated=0.0 if repeats_last else sum(speed.product(p) for p in _not_repeated(layer, target)),
        attention=_inner(layer, target, speed, scans=False),
        scan=_inner(layer, target, speed, scans=True),
        passes=_pass_seconds(passes, speed),
        cheap=speed.passes(passes.cheap) + speed.gelu(passes.gelu),
        core=speed.passes(passes.core),
    )


def _apart(step: Multiply, target: Target, speed: Speed) -> tuple[float, float, float]:
    """Seconds of the products of one step, as in `_LayerTime.products`."""
    found = step.products(target)
    of_inputs = sum(speed.product(p.of_input) for p in found)
    of_weights = sum(speed.product(p) for p in weight_gradients(found))
    later = of_weights if step.defers else 0.0
    return sum(speed.product(p) for p in found), of_inputs + of_weights - later, later


def _not_repeated(layer: Layer, target: Target) -> Iterator[Product]:
    """Forward products that full recomputation does not repeat."""
    again = {id(step) for step in run_again(layer, target, everything=False)}
    steps = (step for step in flat(lower(layer, target)) if isinstance(step, Multiply))
    return (product for step in steps if id(step) not in again for product in step.products(target))


def _pass_seconds(passes: LayerPasses, speed: Speed) -> tuple[float, float]:
    """Seconds of a layer's passes, forward and backward: memory traffic, GeLU's arithmetic, and kernel starts.

    If the host does not run ahead of the device, its measured seconds for the layer replace the kernel starts.
    """
    start, gelu = speed.hardware.start, speed.gelu(passes.gelu)
    forward, backward = speed.hardware.layer_host
    return (
        speed.passes(passes.forward) + gelu + (forward or passes.kernels[0] * start),
        speed.passes(passes.backward) + gelu + (backward or passes.kernels[1] * start),
    )


def _inner(layer: Layer, target: Target, speed: Speed, *, scans: bool) -> tuple[float, float]:
    """Seconds of the products of two activations, forward and backward: those of scans, or those of attention, the
    scores and the weighted values.

    A fused kernel of attention has two products in its forward pass. Its backward pass computes the scores again and
    has five products of the same size.
    """
    forward = backward = 0.0
    for step in flat(lower(layer, target)):
        found = step.inner_products(target) if step.is_scan == scans else ()
        if found and step.is_fused(target):
            flops = sum(product.flops for product in found)
            skips_half = step.skips_half(target)
            forward += speed.fused_attention(flops, skips_half=skips_half)
            backward += speed.fused_attention(2.5 * flops, skips_half=skips_half)
        else:
            forward += sum(speed.product(product) for product in found)
            backward += sum(speed.product(p) for product in found for p in (product.of_input, product.of_weight))
    return forward, backward


def _beside(layers: _Layers, speed: Speed, summed: float) -> Beside:
    backward = layers.total(lambda layer: layer.backward) + sum(layers.again) + summed
    return Beside(
        speed=speed,
        layer_forward=layers.mean(lambda layer: layer.forward),
        forward=layers.total(lambda layer: layer.forward),
        layer_backward=backward / layers.number,
        layer_attention=(layers.mean(lambda layer: layer.attention[0]), layers.mean(lambda layer: layer.attention[1])),
        backward=backward,
    )


def _orthogonalization(run: Planned, speed: Speed) -> float:
    """Seconds of Muon's products and kernel starts; 0 without Muon."""
    products = sum(count * speed.product(product, in_layer=False) for product, count in muon_products(run).items())
    return products + muon_parameters(run).total() * MUON_KERNELS * speed.hardware.start


def _moments_from_host(run: Planned, hardware: Hardware) -> float:
    if "optimizer" not in run.training.offload or not hardware.host_bandwidth:
        return 0.0
    own = trained_share(part_of(run), run.layout)
    return 8 * own / hardware.host_bandwidth  # two moments in float32, copied in both directions at the same time


def _starts(run: Planned, hardware: Hardware) -> float:
    """Seconds to start the optimizer's kernels.

    If the host does not run ahead of the device, its measured seconds for each parameter tensor count instead.
    """
    if not hardware.tensor_host:
        return _OPTIMIZER_KERNELS * hardware.start
    return num_trained_tensors(part_of(run)) * hardware.tensor_host
