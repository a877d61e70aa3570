"""Forecast of the seconds of one step, from its products, its passes over memory and its messages.

    step = M (forward + backward) + optimizer + exposed messages + bubble

One figure is measured, the share of the peak that the device's products attain (`hardware`); all else is counted. Not
counted are the loader, the host when it cannot keep up with the device, and the time by which messages slow the
products that they run beside. The derivation is in `docs/planner.md`. Legend: `M` micro-batches of a step.
"""

from dataclasses import dataclass

from crosscut.planner.activations import num_recomputed_layers
from crosscut.planner.candidate import Planned
from crosscut.planner.compute import flops_per_step
from crosscut.planner.exchange import Beside, Exchange, exchange
from crosscut.planner.hardware import Hardware
from crosscut.planner.parameters import num_tensors, parameters_per_rank, root_tensors
from crosscut.planner.passes import Passes, ends_passes, layer_passes, optimizer_bytes, weight_passes
from crosscut.planner.products import Product, Speed, layer_products, logits_product
from crosscut.planner.program import Program, crosscut_program
from crosscut.planner.traffic import step_traffic

_OPTIMIZER_KERNELS = 50


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step, by what they go to."""

    products: float
    """Matrix products, those of recomputation too."""

    attention: float
    """Attention between its matrices."""

    passes: float
    """Operators that wait for memory."""

    optimizer: float
    """Norm of the gradients, AdamW, and moments that come from host memory."""

    exposed: float
    """Messages that nothing runs beside."""

    bubble: float
    """Stages of a pipeline that wait for others."""

    exchanges: tuple[Exchange, ...]
    """Every message, hidden or not."""

    @property
    def compute(self) -> float:
        """All that the device itself does."""
        return self.products + self.attention + self.passes + self.optimizer

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.exposed + self.bubble


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Seconds of one layer in one micro-batch; products by purpose."""

    products: dict[str, tuple[float, float, float]]
    attention: tuple[float, float]
    passes: tuple[float, float]
    cheap: float
    """Seconds of the forward passes that `training.recompute = "operators"` repeats."""
    core: float
    """Seconds of the forward passes that `training.recompute = "selective"` repeats with attention."""

    @property
    def forward(self) -> float:
        return sum(seconds[0] for seconds in self.products.values()) + self.attention[0] + self.passes[0]

    @property
    def backward(self) -> float:
        products = sum(seconds[1] + seconds[2] for seconds in self.products.values())
        return products + self.attention[1] + self.passes[1]


def step_time(
    run: Planned, hardware: Hardware, *, program: Program | None = None, speed: Speed | None = None
) -> StepTime:
    """The forecast of a run's step on as many devices as its layout has ranks.

    By default of Crosscut's own program; `speed` may be kept from one run to the next of the same precision and number
    of ranks. Raises `ConfigError` where `model.vocab_size` is still 0.
    """
    run = run.settled(hardware.fast_precision)
    program = program or crosscut_program(run, hardware)
    speed = speed or Speed(hardware, run.training.precision, ranks=run.layout.world_size)
    M, L = run.num_micro_batches, run.model.num_layers
    layer = _layer(run, speed, program)
    again = _recomputed(run, layer, program)
    logits = 3 * speed.product(logits_product(run), in_layer=False)
    ends = sum(speed.passes(num_bytes) for num_bytes in ends_passes(run, program)) + sum(hardware.layer_host) / 2
    cast, summed = (speed.passes(num_bytes) for num_bytes in weight_passes(run, program))
    beside = _beside(run, layer, again, summed)
    traffic = step_traffic(run, compiled=program.repeats_last)
    exchanges = tuple(exchange(collective, run, hardware, program, beside) for collective in traffic)
    return StepTime(
        products=M * (L * sum(sum(seconds) for seconds in layer.products.values()) + again[0] + logits),
        attention=M * (L * sum(layer.attention) + again[1]),
        passes=M * (L * sum(layer.passes) + again[2] + ends + cast + summed),
        optimizer=speed.passes(optimizer_bytes(run, program))
        + _moments_from_host(run, hardware)
        + _starts(run, hardware),
        exposed=sum((entry.exposed for entry in exchanges), 0.0),
        bubble=0.0,
        exchanges=exchanges,
    )


def bubble_share(stages: int, micro_batches: int, *, chunks: int = 1) -> float:
    """Time that `stages` pipeline stages wait, as a share of the time without waiting: (p - 1) / (v m).

    The formula is that of Narayanan et al. 2021 (arXiv 2104.04473, section 2.2); each stage's layers are cut into
    `chunks` parts. Crosscut does not divide the layers into stages yet: every layout has one stage.
    """
    return (stages - 1) / (chunks * micro_batches)


def model_flops_per_second(run: Planned, seconds: float) -> float:
    """Model FLOP/s of one rank where a step takes `seconds`."""
    return flops_per_step(run) / seconds / run.layout.world_size


def _layer(run: Planned, speed: Speed, program: Program) -> _Layer:
    products = {
        purpose: (
            sum(speed.product(p) for p in found),
            sum(speed.product(p.of_input) for p in found),
            sum(speed.product(p.of_weight) for p in found),
        )
        for purpose, found in layer_products(run).items()
    }
    passes = layer_passes(run, program)
    return _Layer(
        products=products,
        attention=_attention(run, speed, program),
        passes=_pass_seconds(passes, speed),
        cheap=speed.passes(passes.cheap) + speed.gelu(passes.gelu),
        core=speed.passes(passes.core),
    )


def _pass_seconds(passes: Passes, speed: Speed) -> tuple[float, float]:
    """Bytes, GeLU's arithmetic, and the operators' starts: the device's, or the host's where it does not run ahead."""
    start, gelu = speed.hardware.start, speed.gelu(passes.gelu)
    forward, backward = speed.hardware.layer_host
    return (
        speed.passes(passes.forward) + gelu + (forward or passes.forward_kernels * start),
        speed.passes(passes.backward) + gelu + (backward or passes.backward_kernels * start),
    )


def _attention(run: Planned, speed: Speed, program: Program) -> tuple[float, float]:
    """Scores and weighted values, forward and backward. A fused kernel computes the scores again in its backward pass:
    five products of that size where the forward pass has two.
    """
    length, head = run.training.sequence_length, run.model.head_size
    batch = run.micro_batch_size * run.model.num_heads // run.layout.tensor
    scores, values = Product(length, head, length, batch), Product(length, length, head, batch)
    if program.fused_attention:
        flops = scores.flops + values.flops
        return speed.fused_attention(flops), speed.fused_attention(2.5 * flops)
    forward = speed.product(scores) + speed.product(values)
    return forward, sum(speed.product(p) for q in (scores, values) for p in (q.of_input, q.of_weight))


def _recomputed(run: Planned, layer: _Layer, program: Program) -> tuple[float, float, float]:
    """Seconds that the backward pass of one micro-batch repeats: of products, of attention, of passes."""
    layers = num_recomputed_layers(run)
    mode = run.training.recompute
    if mode == "full":
        last = 0.0 if program.repeats_last else layer.products["mlp output"][0]
        products = sum(seconds[0] for seconds in layer.products.values()) - last
        return layers * products, layers * layer.attention[0], layers * layer.passes[0]
    if mode == "selective":
        return 0.0, layers * layer.attention[0], layers * layer.core
    return 0.0, 0.0, layers * layer.cheap if mode == "operators" else 0.0


def _beside(run: Planned, layer: _Layer, again: tuple[float, float, float], summed: float) -> Beside:
    L = run.model.num_layers
    backward = L * layer.backward + sum(again) + summed
    root = sum(tensor.size for tensor in root_tensors(run.model, run.layout))
    return Beside(
        products=layer.products,
        layer_forward=layer.forward,
        forward=L * layer.forward,
        layer_backward=backward / L,
        backward=backward,
        root_share=root / parameters_per_rank(run.model, run.layout),
    )


def _moments_from_host(run: Planned, hardware: Hardware) -> float:
    if "optimizer" not in run.training.offload or not hardware.host_bandwidth:
        return 0.0
    own = parameters_per_rank(run.model, run.layout) / run.layout.shard_size
    return 8 * own / hardware.host_bandwidth  # both moments in float32; in and out at the same time


def _starts(run: Planned, hardware: Hardware) -> float:
    """Seconds to start the optimizer's kernels.

    Where the host does not run ahead, it goes over all parameter tensors, which takes the time instead.
    """
    if not hardware.tensor_host:
        return _OPTIMIZER_KERNELS * hardware.start
    return num_tensors(run.model) * hardware.tensor_host
