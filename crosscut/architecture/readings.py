"""Quantities of one layer on one rank: parameters, saved activations, memory traffic and FLOPs.

Each function computes one quantity for any kind of layer. The planner adds up the results of all layers.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from crosscut.architecture.decoder import Decoder
from crosscut.architecture.lowering import Lowered, flat, lower, run_again
from crosscut.architecture.parameters import LocalParameter, Role
from crosscut.architecture.parts import Layer
from crosscut.architecture.steps import Multiply, Passes, Product, Rows, Step, Value, weight_gradients
from crosscut.architecture.sublayers.heads.head import LossStep
from crosscut.architecture.target import Kind, Target
from crosscut.config.training import Recompute

_INSIDE = (Rows.TOKENS, Rows.ROUTED, Rows.RECEIVED)
"""Rows of values inside a parallel region."""


def layer_parameters(layer: Layer, target: Target) -> tuple[LocalParameter, ...]:
    """Parameters of a layer on one rank."""
    return _layer_parameters(layer, target.of_parameters)


def root_parameters(model: Decoder, target: Target) -> tuple[LocalParameter, ...]:
    """Parameters outside of the layers on one rank."""
    return _root_parameters(model, target.of_parameters)


def gathered_parameters(model: Decoder, target: Target) -> tuple[LocalParameter, ...]:
    """Parameters on one rank that ranks which share one copy of the model gather in float32, outside of the layers:
    `root_parameters`, and what the layers use in float32 (`Parameter.is_wide`).
    """
    of_layers = (_layer_parameters(layer, target.of_parameters) for layer in model.layers)
    return root_parameters(model, target) + tuple(p for each in of_layers for p in each if p.is_wide)


def gathered_with_layer(layer: Layer, target: Target) -> tuple[LocalParameter, ...]:
    """Parameters on one rank that ranks which share one copy of the model gather with the layer, in the element type
    of the products.
    """
    return tuple(p for p in layer_parameters(layer, target) if not p.is_wide)


@lru_cache(maxsize=4096)
def _layer_parameters(layer: Layer, target: Target) -> tuple[LocalParameter, ...]:
    return tuple(parameter.on(target) for parameter in layer.parameters())


@lru_cache(maxsize=4096)
def _root_parameters(model: Decoder, target: Target) -> tuple[LocalParameter, ...]:
    return tuple(parameter.on(target) for parameter in model.root_parameters())


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes of activations that one layer saves on one rank for its backward pass, by purpose."""

    inputs: int = 0
    """The residual stream at the inputs of the layer's norms."""

    norms: int = 0
    """Results of the norms, with their statistics."""

    inside: int = 0
    """Values inside the parallel regions, such as queries, keys and values, or the input and the result of an
    activation, without those of `core`."""

    core: int = 0
    """Values that only the core of a mixer needs: in attention, the log-sum-exp of each query and head, or the scores;
    in a scan, products and states of each chunk."""

    masks: int = 0
    """Masks of dropout on the residual stream."""

    weights: int = 0
    """Copies of the weights in the data type of matrix products, if the weights are stored in another data type.

    The function `kept` leaves this field at 0, and the planner fills it in.
    """

    @property
    def total(self) -> int:
        """Bytes of all fields except `weights`. These bytes grow with the batch."""
        return self.inputs + self.norms + self.inside + self.core + self.masks

    def __add__(self, other: "Kept") -> "Kept":
        """Add the bytes of two results, purpose by purpose."""
        return Kept(
            inputs=self.inputs + other.inputs,
            norms=self.norms + other.norms,
            inside=self.inside + other.inside,
            core=self.core + other.core,
            masks=self.masks + other.masks,
            weights=self.weights + other.weights,
        )


@lru_cache(maxsize=16384)
def kept(layer: Layer, target: Target, mode: str) -> tuple[Kept, ...]:
    """Bytes that each part of a layer saves for the backward pass of one micro-batch.

    `mode` is a value of `training.recompute`. With "full", only the layer's input is saved. A value that several steps
    save counts once.
    """
    return tuple(_by_purpose(chain.from_iterable(part), target) for part in saved(lower(layer, target), target, mode))


def saved(lowered: Lowered, target: Target, mode: str) -> tuple[tuple[tuple[Value, ...], ...], ...]:
    """Values that each step of each part saves for the backward pass of one micro-batch.

    `mode` is a value of `training.recompute`. With "full", only the input of the first step is saved. A value that
    several steps save is listed at the first of them. A compiled layer saves the same values with `mode` "selective" as
    with "none". The compiler computes the outputs of cheap operators again where it casts them to 8 bits for a product
    of the backward pass.
    """
    forgets_core = mode == Recompute.SELECTIVE and not target.compiled
    forgets_cheap = mode == Recompute.OPERATORS
    seen: set[str] = set()

    def of(step: Step) -> Iterator[Value]:
        is_cast = target.compiled and isinstance(step, Multiply) and step.is_in_eight_bits(target)
        for value in step.reads if step.is_core and forgets_core else step.keeps:
            if value.name not in seen and not ((forgets_cheap or is_cast) and value.is_cheap):
                seen.add(value.name)
                yield value

    if mode == Recompute.FULL:
        first = lowered[0][0]
        return tuple(tuple(first.reads[:1] if step is first else () for step in steps) for steps in lowered)
    return tuple(tuple(tuple(of(step)) for step in steps) for steps in lowered)


def _by_purpose(values: Iterable[Value], target: Target) -> Kept:
    counted: dict[str, int] = {}
    for value in values:
        purpose = _purpose(value)
        counted[purpose] = counted.get(purpose, 0) + value.bytes(target)
    return Kept(**counted)


def _purpose(value: Value) -> str:
    """Name of the field of `Kept` to which a value is added."""
    if value.kind is Kind.MASK:
        return "masks"
    if value.kind in (Kind.DEVIATION, Kind.ROOT):
        return "norms"
    if value.kind in (Kind.WIDE, Kind.WIDENING) or value.rows is Rows.SEQUENCES:
        return "core"
    if value.rows in (*_INSIDE, Rows.KEYS):
        return "inside"
    return "norms" if value.is_cheap else "inputs"


@lru_cache(maxsize=16384)
def cheap_inside(layer: Layer, target: Target) -> int:
    """Bytes of the values inside the parallel regions that `training.recompute = "operators"` does not keep for the
    backward pass.

    The backward pass computes these values again.
    """
    values = {value.name: value for step in flat(lower(layer, target)) for value in step.keeps}
    return sum(value.bytes(target) for value in values.values() if value.is_cheap and value.rows in _INSIDE)


def temporary(steps: Iterable[Step], target: Target, inside: int) -> int:
    """Bytes of temporary tensors in the backward pass of a sublayer: the maximum over the steps of the sublayer.

    `inside` is the number of bytes that the sublayer saves inside its parallel region.
    """
    return max(step.temporary(target, inside) for step in steps)


@lru_cache(maxsize=16384)
def deferred_of_layer(layer: Layer, target: Target) -> int:
    """Bytes that a layer holds in one micro-batch for weight gradients that are computed after the backward pass: the
    result of `deferred` for all steps of the layer.
    """
    return deferred(flat(lower(layer, target)), target)


def deferred(steps: Iterable[Step], target: Target) -> int:
    """Bytes that the steps hold in one micro-batch for weight gradients that are computed after the backward pass: the
    input of each product, and the gradient of its result. Products that read the same value share one input.
    """
    trained = _deferred_products(steps)
    inputs = {step.reads[0].name: step.reads[0] for step in trained}
    return sum(value.bytes(target) for value in [*inputs.values(), *(step.gives[0] for step in trained)])


def last_deferred_input(steps: Iterable[Step], target: Target) -> int:
    """Bytes of the input of a sublayer's last product. If the weight gradient of this product is computed later, the
    rank still holds the input during the rest of the sublayer's backward pass. 0 if the weight is frozen.
    """
    return _deferred_products(steps)[-1].reads[0].bytes(target) if _deferred_products(steps) else 0


def _deferred_products(steps: Iterable[Step]) -> list[Multiply]:
    products = [step for step in steps if isinstance(step, Multiply) and step.defers]
    return [step for step in products if step.matrix.adapter is not None or not step.matrix.weight.is_frozen]


def weights_read(layer: Layer, target: Target) -> int:
    """Number of parameters of a layer on one rank that the backward pass reads in the compute type: all except the
    biases, and matrices that are cast to 8 bits from the type in which they are stored.
    """
    return sum(
        parameter.size
        for parameter in layer_parameters(layer, target)
        if parameter.role is not Role.BIAS
        and not (target.eight_bit and parameter.role in _MATRICES and not parameter.is_expert)
    )


_MATRICES = (Role.MATRIX, Role.BEFORE_RESIDUAL)


def last_matrix(layer: Layer, target: Target) -> int:
    """Number of elements in the gradient of a layer's last matrix on one rank. 0 if the matrix is frozen.

    The backward pass of the layer starts with this gradient.
    """
    *_, last = (step for steps in layer.steps for step in steps if isinstance(step, Multiply))
    return 0 if last.matrix.weight.is_frozen else last.matrix.weight.on(target).size


def passes(steps: Iterable[Step], target: Target) -> Passes:
    """Bytes that the steps read and write outside of their matrix products, in the forward and the backward pass."""
    found = [step.passes(target) for step in steps]
    return Passes(
        forward=sum(each.forward for each in found),
        backward=sum(each.backward for each in found),
        gelu=sum(each.gelu for each in found),
    )


def inner_products(layer: Layer, target: Target) -> tuple[Product, ...]:
    """Matrix products of two activations in a layer's forward pass on one rank. In attention, these are queries times
    keys (the scores), and probabilities times values.
    """
    return tuple(product for step in flat(lower(layer, target)) for product in step.inner_products(target))


def attention_products(layer: Layer, target: Target) -> tuple[Product, ...]:
    """Products of attention in a layer's forward pass on one rank: for each attention, first the scores, and then the
    weighted values. Empty for a layer without attention.
    """
    steps = (step for step in flat(lower(layer, target)) if not step.is_scan)
    return tuple(product for step in steps for product in step.inner_products(target))


class StepFlops(NamedTuple):
    """FLOPs of some steps on one rank in one micro-batch, without those that recomputation repeats."""

    forward: int
    backward: int
    """FLOPs of the gradients of both factors of each product. Frozen weights have no gradient."""
    deferrable: int
    """FLOPs of `backward` that a pipeline's schedule may compute after the backward pass: the gradients of weights."""

    def times(self, count: int) -> "StepFlops":
        """Return the FLOPs of `count` micro-batches."""
        return StepFlops(count * self.forward, count * self.backward, count * self.deferrable)


def step_flops(steps: Sequence[Step], target: Target) -> StepFlops:
    """FLOPs of the matrix products of steps, on one rank in one micro-batch.

    The loss computes its gradients in its forward pass, and ranks divide its vocabulary, which counts without padding.
    """
    weights, inner = _flops(steps, target), sum(p.flops for step in steps for p in step.inner_products(target))
    gradients = sum(product.flops for product in weight_gradients(_products(steps, target)))
    loss = 0
    for step in steps:
        if isinstance(step, LossStep):
            passes = 2 if any(product.is_frozen for product in step.products(target)) else 3
            loss += passes * step.flops(target) // target.tensor
    deferring = [step for step in steps if isinstance(step, Multiply) and step.defers]
    deferrable = sum(product.flops for product in weight_gradients(_products(deferring, target)))
    return StepFlops(weights + inner + loss, weights + gradients + 2 * inner, deferrable)


def weight_flops(layer: Layer, target: Target) -> int:
    """FLOPs of a layer's forward products with its weights, on one rank in one micro-batch."""
    return _flops(flat(lower(layer, target)), target)


def gradient_flops(layer: Layer, target: Target) -> int:
    """FLOPs to compute the gradients of a layer's weights, on one rank in one micro-batch. Frozen weights have no
    gradient.
    """
    return sum(product.flops for product in weight_gradients(_products(flat(lower(layer, target)), target)))


def repeated_flops(layer: Layer, target: Target, *, everything: bool) -> int:
    """FLOPs that full recomputation repeats in one layer's products with weights, on one rank in one micro-batch.

    If `everything` is true, all products run again, as in a compiled layer.
    """
    return _flops(run_again(layer, target, everything=everything), target)


def _flops(steps: Iterable[Step], target: Target) -> int:
    return sum(product.flops for product in _products(steps, target))


def _products(steps: Iterable[Step], target: Target) -> Iterator[Product]:
    return (product for step in steps if isinstance(step, Multiply) for product in step.products(target))
