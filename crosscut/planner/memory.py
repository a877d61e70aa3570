"""Forecast the peak memory of one rank in a training step, by category.

Memory can peak at a few instants of a step. The forecast is the maximum over these instants. `A` stands for the
activations of all layers, `G` for the gradients, and `E` for the gradient of the rank's vocabulary shard:

| instant             | bytes besides weights and optimizer state                                                 |
|---------------------|-------------------------------------------------------------------------------------------|
| loss                | A, the last hidden states and their gradient, E, the logits of one chunk                  |
| backward, layer i   | the parts of A and G that exist at layer i, the layer's temporary tensors, E              |
| backward, embedding | G                                                                                         |
| reduction           | G, and a copy of the gradients in the last bucket                                         |
| step                | G, and the buffers of the optimizer                                                       |

From the second micro-batch on, all of G exists throughout the backward pass. In a pipeline, A also counts the other
micro-batches that the rank holds (`architecture.pipeline.flights`). The derivations are in `docs/planner.md`.
The dry run (`crosscut.rehearsal`) measures the same bytes in the running program.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from crosscut.architecture import Decoder, Device, Kept, Layer, describe, layer_parameters, lower, root_parameters
from crosscut.architecture.lowering import lower_root
from crosscut.architecture.parameters import LocalParameter
from crosscut.architecture.pipeline import Flight, flights
from crosscut.architecture.readings import (
    cheap_inside,
    deferred,
    deferred_of_layer,
    last_deferred_input,
    last_matrix,
    temporary,
)
from crosscut.config import default_loss_chunk
from crosscut.config.conventions import AMPERE, BUCKET_BYTES, PIECE_ELEMENTS
from crosscut.config.layout import PipelineSchedule
from crosscut.config.precision import precision_on
from crosscut.config.training import Recompute
from crosscut.planner.activations import activations_of, recomputation_step
from crosscut.planner.candidate import Candidate, Planned, target_of
from crosscut.planner.muon import largest_muon_share, muon_buffers, muon_share
from crosscut.planner.parameters import known_vocab_size
from crosscut.planner.stages import part_of, schedule_of_flights, stages_of

FRAGMENTATION = 0.05
"""Bytes that the caching allocator loses in unusable blocks, as a share of a step's temporary bytes."""


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """Bytes that one rank holds at the peak of a step, by category. The first step may differ from the forecast."""

    instant: str
    """Name of the instant at which the peak is reached."""

    weights: int = 0
    """Weights in the compute type, which is the data type of matrix products."""

    gradients: int = 0
    """Gradients that exist at the peak, including those that are being computed."""

    master_weights: int = 0
    """Weights in the accumulation type, if this type differs from the compute type."""

    optimizer: int = 0
    """Moments of AdamW, the momentum of Muon, and the moving average of the weights."""

    activations: int = 0
    """Activations that layers save for the backward pass, and temporary tensors of the running layer."""

    logits: int = 0
    """Logits of one chunk of tokens."""

    buffers: int = 0
    """Communication buffers: gathered weights, and a bucket of gradients."""

    allowance: int = 0
    """Fragmentation of the caching allocator: `FRAGMENTATION` times the temporary bytes; 0 on CPUs."""

    @property
    def total(self) -> int:
        """Bytes of all categories together."""
        state = self.weights + self.gradients + self.master_weights + self.optimizer
        return state + self.activations + self.logits + self.buffers + self.allowance


def forecast_memory(run: Planned, *, device: Device = "cuda", capability: tuple[int, int] = AMPERE) -> MemoryForecast:
    """Forecast the bytes that one rank of `run` holds at the peak of a step. In a pipeline, this rank is
    `Candidate.pipeline_rank` for a candidate, and the first rank for a `RunConfig`.

    `capability` is the compute capability of the GPU, which decides whether the attention kernel can share key-value
    heads. Raises `ConfigError` if `model.vocab_size` is still 0.
    """
    return max(_instants(run, device, capability), key=lambda forecast: forecast.total)


def forecast_instants(run: Planned, *, device: Device = "cuda") -> list[MemoryForecast]:
    """Forecast the bytes that one rank of `run` holds at each instant at which memory may peak, in order of time."""
    return list(_instants(run, device, AMPERE))


def _instants(run: Planned, device: Device, capability: tuple[int, int]) -> Iterator[MemoryForecast]:
    """Yield the forecast at each instant of a step. In a pipeline, these are the instants of the backward passes during
    which the rank holds the most bytes, and the instants at the end of the step.
    """
    known_vocab_size(run.model)
    whole = describe(run.model)
    if run.layout.pipeline == 1:
        step = _Step(run, device, capability, whole)
        yield from (*step.passes(), *step.after_passes())
        return
    rank = run.pipeline_rank if isinstance(run, Candidate) else 0
    steps = [_Step(run, device, capability, whole.part([stage])) for stage in stages_of(run, rank)]
    for flight in flights(schedule_of_flights(run), rank):
        yield from steps[flight.chunk].during(flight, steps).passes()
    yield from steps[0].after_passes()


class _Others(NamedTuple):
    """Bytes that a rank of a pipeline holds for passes other than the running pass."""

    weights: int = 0
    """Cast weights that other micro-batches hold."""
    activations: int = 0
    gradients: int | None = None
    """Bytes of the gradients that exist before the running pass. None without a pipeline."""
    has_unsummed: bool = False
    """Whether the layers also hold weight gradients in the compute type, such as bfloat16, that are not yet added to
    the float32 sums. In a sharded pipeline with deferred weight gradients, a layer holds such gradients until the next
    backward pass has gone through the layer."""


class _Pass(NamedTuple):
    """Bytes that a pass of one micro-batch through a stage leaves on the rank."""

    weights: int
    """Cast weights that the micro-batch holds until its backward pass."""
    activations: int
    """Saved activations, and the gradient of the output projection."""
    deferred: int
    """Bytes that are held for weight gradients that the schedule computes later."""
    gradients: int
    """Gradients of all parameters of the stage. They exist once one backward pass through the stage is complete."""
    root_gradients: int
    """Gradients of the parameters outside of the layers. They exist once the first backward pass has started."""


class _Root(NamedTuple):
    """Parameters outside of the layers (the root) on one rank, in elements."""

    size: int
    share: int
    """Elements of the shard that a data rank keeps."""
    trained: int
    """Trainable elements of this shard."""
    vocabulary: int
    """Elements of the matrix of the output projection; 0 for a model that solves a task."""
    vocabulary_gradient: int
    """Elements of the gradient of the output projection's matrix. 0 if the matrix is frozen."""
    last_gradient: int
    """Elements of the gradient that the backward pass of the embedding completes: the gradient of the output
    projection, or, in a model that solves a task, the gradient of the token embedding."""


class _LayerState(NamedTuple):
    """Parameters of a layer on one rank, in elements, and activations of the layer, in bytes."""

    size: int
    share: int
    """Elements of the shard that a data rank keeps."""
    trained: int
    """Trainable elements of this shard."""
    last_matrix: int
    """Elements of the gradient of the layer's last matrix, which the backward pass computes first."""
    kept: Kept
    """Activations that the layer keeps under `training.recompute`."""
    plain: Kept
    """Activations that the layer keeps without recomputation."""
    again: int
    """Bytes of recomputed activations that the layer holds during its backward pass, in addition to `kept`."""
    temporary: int
    """Bytes of temporary tensors of the layer's backward pass."""


@lru_cache(maxsize=4096)
def _root(decoder: Decoder, tensor: int, shares: int) -> _Root:
    root = root_parameters(decoder, tensor)
    if not decoder.is_last:
        tokens = decoder.embedding.tokens.on(tensor)
        last = tokens.size if decoder.is_first and not tokens.is_frozen else 0
        return _Root(_size(root), *_shares(root, shares), 0, 0, last)
    vocabulary = decoder.head.vocabulary.on(tensor)
    gradient = 0 if vocabulary.is_frozen else vocabulary.size
    if decoder.head.task is not None:
        return _Root(_size(root), *_shares(root, shares), 0, 0, gradient)
    return _Root(_size(root), *_shares(root, shares), vocabulary.size, gradient, gradient)


@lru_cache(maxsize=4096)
def _sizes(layer: Layer, tensor: int, shares: int) -> tuple[int, int, int, int]:
    """Four numbers of elements for a layer: all parameters on one tensor rank, the shard of these parameters on one
    data rank, the trainable part of this shard, and the gradient of the last matrix.
    """
    parts = layer_parameters(layer, tensor)
    return _size(parts), *_shares(parts, shares), last_matrix(layer, tensor)


def _size(parts: Sequence[LocalParameter]) -> int:
    return sum(part.size for part in parts)


def _shares(parts: Sequence[LocalParameter], shares: int) -> tuple[int, int]:
    """Number of elements in a data rank's shard of `parts`, and number of trainable elements in this shard."""
    trained = sum(_share(part, shares) for part in parts if not part.is_frozen)
    return sum(_share(part, shares) for part in parts), trained


def _share(part: LocalParameter, shares: int) -> int:
    rows = part.shape[0]
    return -(-rows // shares) * (part.size // rows)


@lru_cache(maxsize=16384)
def _first(decoder: Decoder, number: int, every: int) -> tuple[Counter[Layer], Counter[Layer]]:
    """Count the recomputed layers of each kind, and the other layers of each kind, among the first `number` layers.

    Every `every`-th layer of the whole model is recomputed, starting with the first layer. If `every` is 0, no layer is
    recomputed.
    """
    layers = decoder.layers[:number]
    repeated = (layer for i, layer in zip(decoder.indexes, layers, strict=False) if every and i % every == 0)
    again = Counter(repeated)
    return again, Counter(layers) - again


class _Step:
    """One training step of a run, and the bytes that a rank holds at each instant. In a pipeline, `decoder` is one
    stage of the rank, and the instants are those of a pass through this stage.
    """

    def __init__(self, run: Planned, device: Device, capability: tuple[int, int], decoder: Decoder) -> None:
        run = Candidate.of(run, precision_on(device))
        self.run, self.device, self.decoder = run, device, decoder
        self.rank = part_of(run)
        """The part of the model that the rank holds."""
        self.is_staged = run.layout.pipeline > 1
        self.defers = self.is_staged and run.layout.schedule is PipelineSchedule.ZERO_BUBBLE
        """Whether the schedule computes weight gradients after the backward pass."""
        precision, tensor, shares = run.training.numbers, run.layout.tensor, run.layout.shard_size
        self.size, self.wide = precision.compute_bytes, precision.accumulation_bytes
        self.is_mixed = self.size != self.wide
        self.is_sharded = shares > 1
        self.target = target_of(run, device=device, capability=capability)
        self.every = recomputation_step(run)
        self.root = _root(self.rank, tensor, shares)
        self.vocabulary_gradient = self.root.vocabulary_gradient if decoder.is_last else 0
        """Elements of the gradient of the output projection, if the stage computes it."""
        self.others = _Others()
        self.of_muon = muon_share(run)
        """Elements that Muon updates. Muon keeps one moment of each element, and AdamW keeps two."""
        self.averages = bool(run.optimizer.ema_decay)
        """Whether the run keeps a moving average of the weights, which is never offloaded."""
        self.tokens = self.target.tokens
        self.whole = self.tokens * run.model.hidden_size * self.size
        self.between = self.target.own_tokens * run.model.hidden_size * self.size
        """Bytes of the residual stream on a rank."""
        self.layers = {layer: self._layer_state(layer) for layer in self.rank.kinds}
        self.own = self._sum(self.rank.kinds, lambda each: each.share) + self.root.share
        self.trained = self._sum(self.rank.kinds, lambda each: each.trained) + self.root.trained
        """Elements that have gradients and optimizer state."""
        ends = (step for steps in lower_root(self.decoder, self.target) for step in steps)
        leaves = any(state.kept.total == 0 for state in self.layers.values())  # a layer is offloaded
        self.kept_outside = (
            self.between * 2 * leaves
            + sum(value.bytes(self.target) for step in ends for value in step.keeps)
            + self.between * (not decoder.is_last)
        )
        """Bytes of activations saved outside of the layers: those of the embedding and the final norm, the output of a
        stage, and the activations whose copy to the host is not finished."""

    def during(self, flight: Flight, steps: Sequence["_Step"]) -> "_Step":
        """Return a copy of this step for one backward pass in a pipeline. `flight` is the work in progress when this
        pass starts, and the copy includes the bytes that the rank holds for it. `steps` are the steps of all stages of
        the rank.
        """
        weights = activations = gradients = 0
        for step, number, waiting, has_gradients, has_begun in zip(steps, *flight[1:5], strict=True):
            pass_of = step._pass
            weights += number * pass_of.weights
            activations += number * pass_of.activations + waiting * pass_of.deferred
            gradients += pass_of.gradients if has_gradients else has_begun * pass_of.root_gradients
        buffers = self.between * (flight.receives + (not self.decoder.is_last))
        has_unsummed = self.defers and self.is_sharded and self.is_mixed and flight.has_gradients[flight.chunk]
        found = copy(self)
        found.others = _Others(weights, activations + buffers, gradients, has_unsummed)
        return found

    @cached_property
    def _pass(self) -> _Pass:
        """Bytes of one pass through the stage. The bytes do not depend on `others`, so they are computed once for all
        flights.
        """
        weights, activations = self._held_by_layers(len(self.decoder.layers) - 1)
        return _Pass(
            weights=weights,
            activations=activations + self.vocabulary_gradient * self.wide,
            deferred=self._deferred(0),
            gradients=self._gradients_of_stage(),
            root_gradients=self._gradients_of_root(),
        )

    def _gradients_of_stage(self) -> int:
        """Bytes of the gradients of the stage's parameters. With sharding, the gradients are whole until the end of the
        step.
        """
        layers = self._from(0, self._whole_gradients if self.is_sharded else lambda each: each.trained)
        return layers * self.wide + self._gradients_of_root()

    def _unsummed(self, last: int) -> int:
        """Bytes of the gradients that are not yet added to their sums, in the layers from the first to `last`."""
        return self._from(0, self._whole_gradients, last + 1) * self.size if self.others.has_unsummed else 0

    def _gradients_of_root(self) -> int:
        """Bytes of the gradients of the parameters outside of the layers, as in `_gradients_of_stage`."""
        ends = self.decoder.is_first or self.decoder.is_last
        return (self._whole_root if self.is_sharded else self.root.trained) * ends * self.wide

    @property
    def _whole_root(self) -> int:
        """Elements of the gradients of the parameters outside of the layers, before these gradients are scattered over
        the data ranks.
        """
        is_trained = self.root.trained == self.root.share
        return self.root.size if is_trained else self.root.trained * self.run.layout.shard_size

    def _deferred(self, first: int) -> int:
        """Bytes that the layers from `first` on hold for weight gradients that a schedule computes later."""
        return sum(deferred_of_layer(layer, self.target) for layer in self.decoder.layers[first:])

    def _layer_state(self, layer: Layer) -> _LayerState:
        run, mode = self.run, Recompute(self.run.training.recompute)
        kept = activations_of(layer, run, self.target, mode)
        plain = activations_of(layer, run, self.target, Recompute.NONE)
        whole, held = sum(plain, Kept()), sum(kept, Kept())
        again = {Recompute.FULL: whole.total - held.total, Recompute.OPERATORS: cheap_inside(layer, self.target)}
        return _LayerState(
            *_sizes(layer, self.target.tensor, run.layout.shard_size),
            kept=held,
            plain=whole,
            again=again.get(mode, 0),
            temporary=self._residual() + self._temporary(layer, kept, plain),
        )

    def _temporary(self, layer: Layer, kept: tuple[Kept, ...], plain: tuple[Kept, ...]) -> int:
        """Largest number of temporary bytes that a sublayer needs in its backward pass.

        The activations that later sublayers have already freed are subtracted. If the schedule computes the weight
        gradients later, these sublayers keep the bytes that the weight gradients need. With selective recomputation,
        the bytes that attention computes again are added.
        """
        needs, given_back = [], 0
        recomputes_core = self.run.training.recompute == Recompute.SELECTIVE
        for steps, mine, all_of_it in reversed(list(zip(lower(layer, self.target), kept, plain, strict=True))):
            again = (all_of_it.total - mine.total) * recomputes_core
            late = last_deferred_input(steps, self.target) if self.defers else 0
            needs.append(again + late + temporary(steps, self.target, all_of_it.inside) - given_back)
            given_back += all_of_it.total - (deferred(steps, self.target) if self.defers else 0)
        return max(needs)

    def _sum(self, kinds: Counter[Layer], bytes_of: Callable[[_LayerState], int]) -> int:
        return sum(number * bytes_of(self.layers[layer]) for layer, number in kinds.items())

    def _from(self, first: int, elements_of: Callable[[_LayerState], int], until: int | None = None) -> int:
        """Sum the results of `elements_of` over the layers `first` to `until` - 1. If `until` is None, the sum includes
        all layers from `first` on.
        """
        kinds = Counter(self.decoder.layers[first:until]) if first or until is not None else self.decoder.kinds
        return self._sum(kinds, elements_of)

    def passes(self) -> list[MemoryForecast]:
        """Forecast the bytes at the instants during the passes at which memory may peak, in order of time."""
        last = len(self.decoder.layers) - 1
        repeated = [place for place, i in enumerate(self.decoder.indexes) if self.every and i % self.every == 0]
        ends = (last, max(repeated, default=0), min(1, last), 0)  # layer 0 gathers no other layer ahead
        layers = dict.fromkeys(ends if len(self.layers) == 1 else range(last, -1, -1))
        loss = [self._loss()] if self.decoder.is_last else []
        return [*loss, *map(self._backward, layers), *([self._embedding()] if self.decoder.is_first else [])]

    def after_passes(self) -> list[MemoryForecast]:
        """Forecast the bytes when the gradients are reduced, and when the weights are updated."""
        return [self._reduction(), self._update()]

    def _loss(self) -> MemoryForecast:
        loss, vocabulary = self.decoder.loss, self.root.vocabulary
        rows = vocabulary // self.run.model.hidden_size
        predicted = self.target.predicted_tokens
        chunk = min(predicted, default_loss_chunk(max(rows, 1), predicted, device=self.device))
        weights, activations = self._held(len(self.decoder.layers) - 1)
        cast = vocabulary * self.size * self.is_mixed
        on_cpu = self.device == "cpu"  # the loss on a CPU is never compiled
        return self._at(
            "loss",
            weights=weights + cast,
            gradients=self._summed(0)
            + self.vocabulary_gradient * (self.wide + self.size * self.is_mixed)
            + self._unsummed(len(self.decoder.layers) - 1),
            activations=activations + self._ends_of_layers + chunk * self.whole // self.tokens,
            logits=chunk * rows * loss.logit_bytes(replace(self.target, compiled=False) if on_cpu else self.target),
            buffers=self._gathered(len(self.decoder.layers) if self._keeps_weights else 0),
        )

    @property
    def _ends_of_layers(self) -> int:
        """Bytes of the last hidden states and of their gradient. The head of a task does not gather these hidden
        states.
        """
        return 2 * (self.whole if self.root.vocabulary else self.between)

    def _backward(self, layer: int) -> MemoryForecast:
        """Peak in the backward pass of a layer: at the second-to-last matrix of the layer, or at attention."""
        state = self.layers[self.decoder.layers[layer]]
        weights, activations = self._held(layer)
        if self.every and self.decoder.indexes[layer] % self.every == 0:
            activations += state.again
            weights += state.plain.weights - state.kept.weights
        done = len(self.decoder.layers) - 1 - layer
        scatters = self.is_sharded and not self.is_staged and done
        scattered = self._from(layer + 1, self._whole_gradients, layer + 2) * self.wide if scatters else 0
        computed = state.last_matrix * self.size
        if self.defers:
            computed, activations = 0, activations + self._deferred(layer + 1)
        return self._at(
            f"backward, layer {self.decoder.indexes[layer]}",
            weights=weights,
            gradients=self._summed(done) + self.vocabulary_gradient * self.wide + computed + self._unsummed(layer),
            activations=activations + state.temporary,
            buffers=self._gathered(self._whole_layers(layer + 1), layer + 1) + scattered,
        )

    def _embedding(self) -> MemoryForecast:
        """Peak in the backward pass of the embedding, when all gradients exist.

        With tied embeddings, the gradient of the looked-up rows is added to the gradient of the output projection.
        Otherwise, the gradient of the looked-up rows is a separate tensor.
        """
        run, vocabulary = self.run, self.root.last_gradient
        layers = self._from(0, lambda each: each.trained)
        ready = self.trained if self._accumulates else layers if self.is_sharded else self.trained - vocabulary
        summed = self._summed(len(self.decoder.layers)) if self.is_staged else ready * self.wide
        first = self.layers[self.decoder.layers[0]]
        return self._at(
            "backward, embedding",
            gradients=summed + vocabulary * self.wide,
            weights=self.others.weights,
            activations=self.others.activations
            + (self._deferred(0) if self.defers else 0)
            + self.tokens * run.model.hidden_size * (self.wide + self.size * self.is_mixed),
            buffers=self._gathered(self._whole_layers(0))
            + self._whole_gradients(first) * self.wide * (self.is_sharded and not self.is_staged),
        )

    def _whole_gradients(self, layer: _LayerState) -> int:
        """Elements of the gradients of a layer before they are scattered over the data ranks."""
        return layer.size if layer.trained == layer.share else layer.trained * self.run.layout.shard_size

    def _reduction(self) -> MemoryForecast:
        """Peak when the last bucket, which holds the gradient of the token embedding, is filled.

        The other gradients have already moved into their buckets.
        """
        own = self.trained * self.wide
        others = (self.trained - self.root.last_gradient) * self.wide // BUCKET_BYTES * BUCKET_BYTES
        copies = self.run.layout.data * self.run.layout.context > 1 and not self.is_sharded
        return self._at("reduction", gradients=own, buffers=(own - others) * copies)

    def _update(self) -> MemoryForecast:
        places = matrix = 0
        if self._moments_wait:
            places = 4 * min(PIECE_ELEMENTS, self.trained - self.of_muon) * self.wide
            matrix = largest_muon_share(self.run) * self.wide
        buffers = max(places, matrix + muon_buffers(self.run))
        return self._at("step", gradients=self.trained * self.wide, buffers=buffers)

    def _at(self, instant: str, *, weights: int = 0, activations: int = 0, **held: int) -> MemoryForecast:
        state = self.own * self.wide
        moments = (2 * self.trained - self.of_muon) * self.wide
        passing = weights + activations + sum(held.values())
        return MemoryForecast(
            instant=instant,
            weights=weights if self.is_mixed else weights + state,
            master_weights=state if self.is_mixed else 0,
            optimizer=(0 if self._moments_wait else moments) + state * self.averages,
            activations=activations,
            allowance=int(FRAGMENTATION * passing) if self.device == "cuda" else 0,
            **held,
        )

    @property
    def _accumulates(self) -> bool:
        return self.run.num_micro_batches > 1

    @property
    def _keeps_weights(self) -> bool:
        return self.run.layout.sharding == "zero2"

    @property
    def _moments_wait(self) -> bool:
        return self.device == "cuda" and "optimizer" in self.run.training.offload

    def _held(self, layer: int) -> tuple[int, int]:
        """Bytes of cast weights, and bytes of saved activations. Both count the layers 0 to `layer`, the parts of the
        model outside of the layers, and the other passes.
        """
        weights, activations = self._held_by_layers(layer)
        return weights + self.others.weights, activations + self.others.activations

    def _held_by_layers(self, layer: int) -> tuple[int, int]:
        """Bytes of cast weights, and bytes of saved activations, as in `_held`, but without the other passes."""
        again, plain = _first(self.decoder, layer + 1, self.every)
        return (
            self._sum(again, lambda each: each.kept.weights) + self._sum(plain, lambda each: each.plain.weights),
            self._sum(again, lambda each: each.kept.total)
            + self._sum(plain, lambda each: each.plain.total)
            + self.kept_outside,
        )

    def _residual(self) -> int:
        """Bytes of the residual stream's gradient.

        Dropout adds a second tensor of this size. A split sequence adds the gathered gradient.
        """
        split = self.whole if self.run.layout.sequence_parallel else 0
        return self.between * (2 if self.run.model.dropout else 1) + split

    def _summed(self, done: int) -> int:
        """Bytes of finished gradients after `done` layers have run their backward pass."""
        if self.others.gradients is not None:
            return self.others.gradients
        if self._accumulates:
            return self.trained * self.wide
        return self._from(len(self.decoder.layers) - done, lambda each: each.trained) * self.wide if done else 0

    def _whole_layers(self, left: int) -> int:
        """Number of layers whose weights are gathered while `left` layers have not finished their backward pass.

        ZeRO-3 gathers the running layer and the next one. ZeRO-2 keeps the `left` layers gathered, or all layers if the
        step has several micro-batches.
        """
        if not self._keeps_weights:
            return min(2, left)
        return len(self.decoder.layers) if self._accumulates else left

    def _gathered(self, number: int, left: int = 0) -> int:
        """Bytes of the gathered weights outside of the layers, and in `number` layers.

        If `left` is 0, these layers are the first `number` layers of the model. Otherwise, these layers are the last
        `number` of the model's first `left` layers.
        """
        if not self.is_sharded:
            return 0
        if self.is_staged:
            return self.root.size * self.wide + self._sum(self.rank.kinds, lambda each: each.size) * self.size
        first = max(left - number, 0)
        layers = self._from(first, lambda each: each.size, first + number) if number else 0
        return self.root.size * self.wide + layers * self.size
