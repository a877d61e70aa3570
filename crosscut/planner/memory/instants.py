"""Bytes that a rank holds at each instant of a step at which its memory may peak."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from crosscut.architecture.pipeline import Flight
from crosscut.config import default_loss_chunk
from crosscut.config.conventions import BUCKET_BYTES, PIECE_ELEMENTS
from crosscut.planner.memory.stage import StageMemory
from crosscut.planner.messages.low_rank import low_rank_memory
from crosscut.planner.muon import largest_muon_share, muon_buffers
from crosscut.planner.teacher import teacher_logit_bytes, teacher_pass_bytes, teacher_results_bytes

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
    """Moments of AdamW, the momentum of Muon, the moving average of the weights, and the memories of gradients in low
    rank."""

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


class OtherPasses(NamedTuple):
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


_NO_OTHERS = OtherPasses()


def other_passes(stages: Sequence[StageMemory], flight: Flight) -> OtherPasses:
    """Return the bytes that a rank holds for other passes when a backward pass starts. `stages` are all stages of the
    rank, and `flight` is the work in progress.
    """
    weights = activations = gradients = 0
    for stage, number, waiting, has_gradients, has_begun in zip(stages, *flight[1:5], strict=True):
        after = stage.after_pass
        weights += number * after.weights
        activations += number * after.activations + waiting * after.deferred
        gradients += after.gradients if has_gradients else has_begun * after.root_gradients
    running = stages[flight.chunk]
    buffers = running.between * (flight.receives + (not running.decoder.is_last))
    has_gradients = flight.has_gradients[flight.chunk]
    has_unsummed = running.defers and running.is_sharded and running.is_mixed and has_gradients
    return OtherPasses(weights, activations + buffers, gradients, has_unsummed)


class Instants:
    """Instants of a step. In a pipeline, those of one pass through a stage, while the rank also holds `others`."""

    def __init__(self, stage: StageMemory, others: OtherPasses = _NO_OTHERS) -> None:
        self.stage, self.others = stage, others

    def passes(self) -> list[MemoryForecast]:
        """Forecast the bytes at the instants during the passes at which memory may peak, in order of time."""
        decoder, last = self.stage.decoder, self.stage.num_layers - 1
        repeated = [layer for layer in range(last + 1) if self.stage.is_recomputed(layer)]
        ends = (last, max(repeated, default=0), min(1, last), 0)  # layer 0 gathers no other layer ahead
        layers = dict.fromkeys(ends if len(self.stage.layers) == 1 else self._ends_of_runs(repeated))
        loss = [*([self._teacher()] if self.stage.teacher else []), self._loss()] if decoder.is_last else []
        return [*loss, *map(self._backward, layers), *([self._embedding()] if decoder.is_first else [])]

    def _ends_of_runs(self, repeated: Sequence[int]) -> list[int]:
        """Layers near the ends of each run of equal layers, the last layer first. In a run, the bytes change by the
        same amount from layer to layer, except that recomputed layers (`repeated`) hold more, and that the layers at
        the ends of the run have other neighbours. Memory therefore peaks near an end.
        """
        found: set[int] = set()
        first = 0
        for _, run in groupby(self.stage.decoder.layers):
            layers = range(first, first + len(list(run)))
            first = layers.stop
            for some in (layers, [layer for layer in repeated if layer in layers]):
                found.update((*some[:2], *some[-2:]))
        return sorted(found, reverse=True)

    def after_passes(self) -> list[MemoryForecast]:
        """Forecast the bytes when the gradients are reduced, and when the weights are updated."""
        return [self._reduction(), self._update()]

    def _teacher(self) -> MemoryForecast:
        """Peak in a forward pass of the teacher: before the pass of the model or, in a pipeline, after it."""
        stage = self.stage
        weights, activations = self._held(stage.num_layers - 1) if stage.is_staged else (0, 0)
        passing = teacher_pass_bytes(stage.run, stage.device)
        gradients = self._summed(stage.num_layers if stage.accumulates else 0)
        return self._at("teacher", weights=weights, activations=activations + passing, gradients=gradients)

    def _loss(self) -> MemoryForecast:
        stage, target, vocabulary = self.stage, self.stage.target, self.stage.root.vocabulary
        rows = vocabulary // stage.run.model.hidden_size
        predicted = target.predicted_tokens
        weights, activations = self._held(stage.num_layers - 1)
        cast = stage.size * stage.is_mixed
        rounded = cast if stage.device == "cpu" else 0  # a GPU adds products to the float32 gradient directly
        teaches = stage.run.teacher.teaches
        # The loss on a CPU or with a teacher is never compiled.
        of_loss = replace(target, compiled=target.compiled and stage.device == "cuda" and not teaches)
        logits: float = stage.decoder.loss.logit_bytes(of_loss)
        most = default_loss_chunk(max(rows, 1), predicted, device=stage.device, compiled=of_loss.compiled)
        chunk = min(predicted, most)
        results, of_teacher = 0, 0.0
        if teaches:
            of_teacher = teacher_logit_bytes(stage.run, rows)
            results = teacher_results_bytes(stage.run) if stage.teacher else 0
        # The last hidden states and their gradient. The head of a task does not gather these hidden states.
        ends = 2 * (stage.whole if vocabulary else stage.between)
        return self._at(
            "loss",
            weights=weights + vocabulary * cast,
            gradients=self._summed(0)
            + stage.vocabulary_gradient * (stage.wide + rounded)
            + self._unsummed(stage.num_layers - 1),
            activations=activations + ends + chunk * stage.whole // target.tokens + results,
            logits=int(chunk * (rows * logits + of_teacher)),
            buffers=self._gathered(stage.num_layers if self._keeps_weights else 0),
        )

    def _backward(self, layer: int) -> MemoryForecast:
        """Peak in the backward pass of a layer: at the second-to-last matrix of the layer, or at attention."""
        stage, running = self.stage, self.stage.layers[self.stage.decoder.layers[layer]]
        weights, activations = self._held(layer)
        if stage.is_recomputed(layer):
            activations += running.again
            weights += running.plain.weights - running.kept.weights
        done = stage.num_layers - 1 - layer
        scatters = stage.is_sharded and not stage.is_staged and done
        scattered = stage.sum_from(layer + 1, stage.whole_gradients, layer + 2) * stage.wide if scatters else 0
        computed = running.last_matrix * stage.size
        if stage.defers:
            computed, activations = 0, activations + stage.deferred(layer + 1)
        return self._at(
            f"backward, layer {stage.decoder.indexes[layer]}",
            weights=weights,
            gradients=self._summed(done) + stage.vocabulary_gradient * stage.wide + computed + self._unsummed(layer),
            activations=activations + running.temporary,
            buffers=self._gathered(self._whole_layers(layer + 1), layer + 1) + scattered,
        )

    def _embedding(self) -> MemoryForecast:
        """Peak in the backward pass of the embedding, when all gradients exist.

        With tied embeddings, the gradient of the looked-up rows is added to the gradient of the output projection.
        Otherwise, the gradient of the looked-up rows is a separate tensor.
        """
        stage, vocabulary = self.stage, self.stage.root.last_gradient
        layers = stage.sum_from(0, lambda each: each.trained)
        ready = stage.trained if stage.accumulates else layers if stage.is_sharded else stage.trained - vocabulary
        summed = self._summed(stage.num_layers) if stage.is_staged else ready * stage.wide
        first = stage.layers[stage.decoder.layers[0]]
        looked_up = stage.target.tokens * stage.run.model.hidden_size
        return self._at(
            "backward, embedding",
            gradients=summed + vocabulary * stage.wide,
            weights=self.others.weights,
            activations=self.others.activations
            + (stage.deferred(0) if stage.defers else 0)
            + looked_up * (stage.wide + stage.size * stage.is_mixed),
            buffers=self._gathered(self._whole_layers(0))
            + stage.whole_gradients(first) * stage.wide * (stage.is_sharded and not stage.is_staged),
        )

    def _reduction(self) -> MemoryForecast:
        """Peak when the last bucket, which holds the gradient of the token embedding, is filled.

        The other gradients have already moved into their buckets.
        """
        stage, readers = self.stage, self.stage.run.layout.ranks.tokens
        own = stage.trained * stage.wide
        others = (stage.trained - stage.root.last_gradient) * stage.wide // BUCKET_BYTES * BUCKET_BYTES
        copies = readers.size > 1 and not stage.is_sharded
        return self._at("reduction", gradients=own, buffers=(own - others) * copies)

    def _update(self) -> MemoryForecast:
        stage, pieces, matrix = self.stage, 0, 0
        if stage.moments_wait:
            pieces = 4 * min(PIECE_ELEMENTS, stage.trained - stage.of_muon) * stage.wide
            matrix = largest_muon_share(stage.run) * stage.wide
        buffers = max(pieces, matrix + muon_buffers(stage.run))
        pending = low_rank_memory(stage.run) * stage.wide
        return self._at("step", gradients=stage.trained * stage.wide, buffers=buffers + pending)

    def _at(self, instant: str, *, weights: int = 0, activations: int = 0, **held: int) -> MemoryForecast:
        stage = self.stage
        state = stage.own * stage.wide
        moments = 0 if stage.moments_wait else (2 * stage.trained - stage.of_muon) * stage.wide
        average = state if stage.run.optimizer.ema_decay else 0  # never offloaded
        errors = low_rank_memory(stage.run) * stage.wide
        activations += stage.stored_logits
        passing = weights + activations + sum(held.values())
        return MemoryForecast(
            instant=instant,
            weights=stage.teacher + (weights if stage.is_mixed else weights + state),
            master_weights=state if stage.is_mixed else 0,
            optimizer=moments + average + errors,
            activations=activations,
            allowance=int(FRAGMENTATION * passing) if stage.device == "cuda" else 0,
            **held,
        )

    def _held(self, layer: int) -> tuple[int, int]:
        """Bytes of cast weights, and bytes of saved activations, as in `StageMemory.held`, with the other passes."""
        weights, activations = self.stage.held(layer)
        return weights + self.others.weights, activations + self.others.activations

    def _summed(self, done: int) -> int:
        """Bytes of finished gradients after `done` layers have run their backward pass."""
        stage = self.stage
        if self.others.gradients is not None:
            return self.others.gradients
        if stage.accumulates:
            return stage.trained * stage.wide
        return stage.sum_from(stage.num_layers - done, lambda each: each.trained) * stage.wide if done else 0

    def _unsummed(self, last: int) -> int:
        """Bytes of the gradients that are not yet added to their sums, in the layers from the first to `last`."""
        stage = self.stage
        return stage.sum_from(0, stage.whole_gradients, last + 1) * stage.size if self.others.has_unsummed else 0

    @property
    def _keeps_weights(self) -> bool:
        return self.stage.run.layout.sharding == "zero2"

    def _whole_layers(self, left: int) -> int:
        """Number of layers whose weights are gathered while `left` layers have not finished their backward pass.

        ZeRO-3 gathers the running layer and the next one. ZeRO-2 keeps the `left` layers gathered, or all layers if the
        step has several micro-batches.
        """
        if not self._keeps_weights:
            return min(2, left)
        return self.stage.num_layers if self.stage.accumulates else left

    def _gathered(self, number: int, left: int = 0) -> int:
        """Bytes of the gathered weights outside of the layers, and in `number` layers.

        If `left` is 0, these layers are the first `number` layers of the model. Otherwise, these layers are the last
        `number` of the model's first `left` layers.
        """
        stage = self.stage
        if not stage.is_sharded:
            return 0
        root = stage.root.size * stage.wide
        if stage.is_staged:
            return root + stage.sum_of(stage.rank.kinds, lambda each: each.size) * stage.size
        first = max(left - number, 0)
        layers = stage.sum_from(first, lambda each: each.size, first + number) if number else 0
        return root + layers * stage.size
