"""Bytes of one stage of a model on a rank, whatever the instant of the step."""

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

from crosscut.architecture import Decoder, Device, Layer
from crosscut.architecture.lowering import lower_root
from crosscut.architecture.readings import deferred_of_layer
from crosscut.config.precision import precision_on
from crosscut.planner.candidate import Candidate, Planned, recomputation_step, target_of
from crosscut.planner.memory.parts import LayerMemory, count_first, layer_memory, residual_bytes, root_sizes
from crosscut.planner.muon import muon_share
from crosscut.planner.parameters import Shares
from crosscut.planner.stages import part_of, separates_weights
from crosscut.planner.teacher import stored_logit_bytes, teacher_bytes


class PassMemory(NamedTuple):
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


class StageMemory:
    """Sizes of one stage of a rank. `decoder` is the stage; without a pipeline, it is the whole model."""

    def __init__(self, run: Planned, device: Device, capability: tuple[int, int], decoder: Decoder) -> None:
        run = Candidate.of(run, precision_on(device))
        self.run, self.device, self.decoder = run, device, decoder
        self.rank = part_of(run)
        """The part of the model that the rank holds."""
        self.is_staged = run.layout.num_stages > 1
        self.defers = separates_weights(run.layout)
        """Whether the schedule computes weight gradients after the backward pass."""
        precision, shares = run.training.numbers, Shares.of(run.layout)
        self.size, self.wide = precision.compute_bytes, precision.accumulation_bytes
        self.is_mixed = self.size != self.wide
        self.is_sharded = shares.dense > 1
        self.target = target_of(run, device=device, capability=capability)
        self.every = recomputation_step(run)
        self.root = root_sizes(self.rank, self.target.of_parameters, shares)
        self.vocabulary_gradient = self.root.vocabulary_gradient if decoder.is_last else 0
        """Elements of the gradient of the output projection, if the stage computes it."""
        self.teacher = teacher_bytes(run) if self.rank.is_last and run.teacher.is_computed else 0
        """Bytes of the weights of a teacher that the run computes."""
        self.stored_logits = stored_logit_bytes(run) if self.rank.is_last else 0
        """Bytes of a teacher's stored logits."""
        self.of_muon = muon_share(run)
        """Elements that Muon updates. Muon keeps one moment of each element, and AdamW keeps two."""
        self.whole, self.between = residual_bytes(run, self.target)
        """Bytes of the residual stream of all tokens, and of the tokens of the rank."""
        self.layers = {layer: layer_memory(layer, run, self.target, defers=self.defers) for layer in self.rank.kinds}
        self.own = self.sum_of(self.rank.kinds, lambda each: each.share) + self.root.share
        self.trained = self.sum_of(self.rank.kinds, lambda each: each.trained) + self.root.trained
        """Elements that have gradients and optimizer state."""

    @property
    def num_layers(self) -> int:
        """Number of layers of the stage."""
        return len(self.decoder.layers)

    @property
    def accumulates(self) -> bool:
        """Whether a step adds the gradients of several micro-batches."""
        return self.run.num_micro_batches > 1

    @property
    def moments_wait(self) -> bool:
        """Whether the optimizer's moments are on the host while the GPU computes."""
        return self.device == "cuda" and "optimizer" in self.run.training.offload

    def is_recomputed(self, layer: int) -> bool:
        """Whether the layer at this place of the stage is recomputed."""
        return bool(self.every) and self.decoder.indexes[layer] % self.every == 0

    def sum_of(self, kinds: Counter[Layer], bytes_of: Callable[[LayerMemory], int]) -> int:
        """Sum the results of `bytes_of` over layers, given by the number of each kind."""
        return sum(number * bytes_of(self.layers[layer]) for layer, number in kinds.items())

    def sum_from(self, first: int, bytes_of: Callable[[LayerMemory], int], until: int | None = None) -> int:
        """Sum the results of `bytes_of` over the layers `first` to `until` - 1. If `until` is None, the sum includes
        all layers from `first` on.
        """
        kinds = Counter(self.decoder.layers[first:until]) if first or until is not None else self.decoder.kinds
        return self.sum_of(kinds, bytes_of)

    @cached_property
    def kept_outside(self) -> int:
        """Bytes of activations saved outside of the layers: those of the embedding and the final norm, the output of a
        stage, and the activations whose copy to the host is not finished.
        """
        ends = (step for steps in lower_root(self.decoder, self.target) for step in steps)
        is_offloaded = any(layer.kept.total == 0 for layer in self.layers.values())
        return (
            self.between * 2 * is_offloaded
            + sum(value.bytes(self.target) for step in ends for value in step.keeps)
            + self.between * (not self.decoder.is_last)
        )

    def held(self, layer: int) -> tuple[int, int]:
        """Bytes of cast weights, and bytes of saved activations, of the layers 0 to `layer` and of the parts of the
        model outside of the layers, for one micro-batch.
        """
        again, plain = count_first(self.decoder, layer + 1, self.every)
        return (
            self.sum_of(again, lambda each: each.kept.weights) + self.sum_of(plain, lambda each: each.plain.weights),
            self.sum_of(again, lambda each: each.kept.total)
            + self.sum_of(plain, lambda each: each.plain.total)
            + self.kept_outside,
        )

    def deferred(self, first: int) -> int:
        """Bytes that the layers from `first` on hold for weight gradients that the schedule computes later."""
        return sum(deferred_of_layer(layer, self.target) for layer in self.decoder.layers[first:])

    def whole_gradients(self, layer: LayerMemory) -> int:
        """Elements of the gradients of a layer before they are scattered over the data ranks."""
        return layer.size if layer.trained == layer.share else layer.trained * self.run.layout.shard_size

    @cached_property
    def after_pass(self) -> PassMemory:
        """Bytes that one pass of a micro-batch through the stage leaves on the rank. With sharding, the gradients are
        whole until the end of the step.
        """
        weights, activations = self.held(self.num_layers - 1)
        root, of_layer = self.root.trained, lambda each: each.trained
        if self.is_sharded:
            is_trained = self.root.trained == self.root.share
            root = self.root.size if is_trained else self.root.trained * self.run.layout.shard_size
            of_layer = self.whole_gradients
        root_gradients = root * (self.decoder.is_first or self.decoder.is_last) * self.wide
        return PassMemory(
            weights=weights,
            activations=activations + self.vocabulary_gradient * self.wide,
            deferred=self.deferred(0),
            gradients=self.sum_from(0, of_layer) * self.wide + root_gradients,
            root_gradients=root_gradients,
        )
