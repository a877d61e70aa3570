"""The most bytes that one rank holds at once in a training step, by what they are.

A step has a few instants at which something is at its most; the forecast is the largest of them. `A` are the
activations of all layers, `G` the gradients, `E` the gradient of the vocabulary's part of a rank:

| instant             | beside weights and optimizer                                                              |
|---------------------|-------------------------------------------------------------------------------------------|
| loss                | A, the last hidden states and their gradient, E, a chunk's logits                         |
| backward, layer i   | the parts of A and G that there are then, the layer's temporary tensors, E                |
| backward, embedding | G                                                                                         |
| reduction           | G, and the last bucket, which is a copy until it is filled                                |
| step                | G, what AdamW needs beside it                                                             |

From the second micro-batch on G is there from the beginning. The derivations are in `docs/planner.md`; the dry run
(`crosscut.rehearsal`) counts the same from the program.

Legend: as in `activations`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from crosscut.config import Layout, ModelConfig, default_loss_chunk, padded_vocab_size
from crosscut.config.conventions import AMPERE
from crosscut.config.precision import precision_on
from crosscut.planner.activations import Device, layer_activations, num_recomputed_layers
from crosscut.planner.candidate import Planned
from crosscut.planner.parameters import LocalTensor, known_vocab_size, layer_tensors, root_tensors

BUCKET_BYTES = 32 << 20
"""Bytes of a bucket of gradients; as in `parallel.state.gradients`."""

PIECE_ELEMENTS = 1 << 24
"""Elements of each moment in a piece of the optimizer's step from host memory; as in `training.memory.host_moments`."""

FRAGMENTATION = 0.05
"""Share of a step's temporary bytes that a caching allocator holds besides, in blocks that fit nothing."""


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """Bytes of one rank at the peak of a step, from the second step on."""

    instant: str
    """Name of the instant at which the peak is reached."""

    weights: int = 0
    """Weights in the type of the products."""

    gradients: int = 0
    """Gradients of all parameters that have one at the instant, and gradients that are being computed."""

    master_weights: int = 0
    """Weights in the type of sums, where it is not the type of the products."""

    optimizer: int = 0
    """AdamW's moments."""

    activations: int = 0
    """Activations that layers keep for the backward pass, and tensors that the running layer needs."""

    logits: int = 0
    """Logits of a chunk of tokens."""

    buffers: int = 0
    """Buffers of communication: a bucket of gradients while it is filled, weights gathered from shares."""

    allowance: int = 0
    """`FRAGMENTATION` of the temporary bytes; none on the CPU."""

    @property
    def total(self) -> int:
        """Bytes of all fields together."""
        state = self.weights + self.gradients + self.master_weights + self.optimizer
        return state + self.activations + self.logits + self.buffers + self.allowance


def forecast_memory(run: Planned, *, device: Device = "cuda", capability: tuple[int, int] = AMPERE) -> MemoryForecast:
    """Bytes that one rank of `run` holds at the peak of a step; `capability` as in `layer_activations`.

    Raises `ConfigError` where `model.vocab_size` is still 0.
    """
    instants = _Step(run, device, capability).instants()
    return max(instants, key=lambda forecast: forecast.total)


def forecast_instants(run: Planned, *, device: Device = "cuda") -> list[MemoryForecast]:
    """Bytes that one rank of `run` holds at each instant that may be the peak, in the order of the step."""
    return _Step(run, device, AMPERE).instants()


class _Parts(NamedTuple):
    """Elements of parameters on a rank."""

    layer: int
    root: int
    layer_share: int
    """Elements of a layer that a data rank keeps."""
    root_share: int
    vocabulary: int
    """Elements of the embedding's rows that the loss multiplies by."""
    last_matrix: int
    """Elements of a layer's last matrix, whose gradient comes first."""


@lru_cache(maxsize=4096)
def _parts(model: ModelConfig, tensor: int, shares: int) -> _Parts:
    layout = Layout(tensor=tensor)
    layer, root = layer_tensors(model, layout), root_tensors(model, layout)
    return _Parts(
        layer=sum(part.size for part in layer),
        root=sum(part.size for part in root),
        layer_share=sum(_share(part, shares) for part in layer),
        root_share=sum(_share(part, shares) for part in root),
        vocabulary=padded_vocab_size(known_vocab_size(model), tensor) // tensor * model.hidden_size,
        last_matrix=model.hidden_size * model.mlp_size // tensor,
    )


def _share(tensor: LocalTensor, shares: int) -> int:
    rows = tensor.shape[0]
    return -(-rows // shares) * (tensor.size // rows)


class _Step:
    """Step of a run, with the bytes that a rank holds at each of its instants."""

    def __init__(self, run: Planned, device: Device, capability: tuple[int, int]) -> None:
        run = run.settled(precision_on(device))
        self.run, self.device = run, device
        precision = run.training.numbers
        self.size, self.wide = precision.compute_bytes, precision.accumulation_bytes
        self.is_mixed = self.size != self.wide
        self.is_sharded = run.layout.shard_size > 1
        self.parts = _parts(run.model, run.layout.tensor, run.layout.shard_size)
        self.own = run.model.num_layers * self.parts.layer_share + self.parts.root_share
        self.kept = layer_activations(run, device=device, capability=capability)
        self.plain = layer_activations(run, device=device, capability=capability, mode="none")
        self.tokens = run.micro_batch_size * run.training.sequence_length
        self.whole = self.tokens * run.model.hidden_size * self.size
        self.between = self.whole // run.layout.tensor if run.layout.sequence_parallel else self.whole
        """Bytes of the residual stream on a rank."""

    def instants(self) -> list[MemoryForecast]:
        """Instants that may be the peak, in the order of the step."""
        last = self.run.model.num_layers - 1
        again = (num_recomputed_layers(self.run) - 1) * self.run.training.recompute_every
        layers = dict.fromkeys((last, max(again, 0), min(1, last), 0))  # the first one gathers no other ahead
        return [self._loss(), *map(self._backward, layers), self._embedding(), self._reduction(), self._update()]

    def _loss(self) -> MemoryForecast:
        local_vocabulary = self.parts.vocabulary // self.run.model.hidden_size
        chunk = min(self.tokens, default_loss_chunk(local_vocabulary, self.tokens, device=self.device))
        compiled = self.device == "cuda" and self.run.is_compiled_on_gpus
        of_logit = 2 * self.size if compiled else self.wide + self.size * self.is_mixed
        weights, activations = self._held(self.run.model.num_layers - 1)
        cast = self.parts.vocabulary * self.size * self.is_mixed
        return self._at(
            "loss",
            weights=weights + cast,
            gradients=self._summed(0) + self.parts.vocabulary * self.wide + cast,
            activations=activations + 2 * self.whole + chunk * self.whole // self.tokens,
            logits=chunk * local_vocabulary * of_logit,
            buffers=self._gathered(self.run.model.num_layers if self._keeps_weights else 0),
        )

    def _backward(self, layer: int) -> MemoryForecast:
        """The layer's first matrix product but one to go backward, or its attention."""
        run = self.run
        weights, activations = self._held(layer)
        if _recomputes(run, layer):
            activations += self._again()
            weights += self.plain.weights - self.kept.weights
        done = run.model.num_layers - 1 - layer
        scattered = self.parts.layer * self.wide if self.is_sharded and done else 0
        return self._at(
            f"backward, layer {layer}",
            weights=weights,
            gradients=self._summed(done) + self.parts.vocabulary * self.wide + self.parts.last_matrix * self.size,
            activations=activations + max(self._of_mlp(), self._of_attention()),
            buffers=self._gathered(self._whole_layers(layer + 1)) + scattered,
        )

    def _embedding(self) -> MemoryForecast:
        """All gradients: those of looked-up rows are added to a tied vocabulary's, or have a tensor of their own."""
        run, parts = self.run, self.parts
        layers = run.model.num_layers * parts.layer_share
        ready = self.own if self._accumulates else layers if self.is_sharded else self.own - parts.vocabulary
        gathered = self._gathered(self._whole_layers(0))
        return self._at(
            "backward, embedding",
            gradients=(ready + parts.vocabulary) * self.wide,
            activations=self.tokens * run.model.hidden_size * (self.wide + self.size * self.is_mixed),
            buffers=gathered + parts.layer * self.wide * self.is_sharded,
        )

    def _reduction(self) -> MemoryForecast:
        """The last bucket, with the tokens' embedding, is filled; the other gradients have moved into their buckets."""
        own = self.own * self.wide
        others = (self.own - self.parts.vocabulary) * self.wide // BUCKET_BYTES * BUCKET_BYTES
        copies = self.run.layout.data > 1 and not self.is_sharded
        return self._at("reduction", gradients=own, buffers=(own - others) * copies)

    def _update(self) -> MemoryForecast:
        places = 4 * min(PIECE_ELEMENTS, self.own) * self.wide if self._moments_wait else 0
        return self._at("step", gradients=self.own * self.wide, buffers=places)

    def _at(self, instant: str, *, weights: int = 0, activations: int = 0, **held: int) -> MemoryForecast:
        state = self.own * self.wide
        passing = weights + activations + sum(held.values())
        return MemoryForecast(
            instant=instant,
            weights=weights if self.is_mixed else weights + state,
            master_weights=state if self.is_mixed else 0,
            optimizer=0 if self._moments_wait else 2 * state,
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
        """Weights that layers up to this one have cast, and the activations that they and the root keep."""
        num_layers = layer + 1
        again = 0 if self.run.training.recompute == "none" else -(-num_layers // self.run.training.recompute_every)
        plain = num_layers - again
        leaving = 2 * self.between if self.kept.total == 0 else 0
        masks = self.plain.masks // 2
        root = self.between + masks + 9 * self.tokens  # the last norm's input, dropout's mask, the embedding's index
        return (
            again * self.kept.weights + plain * self.plain.weights,
            again * self.kept.total + plain * self.plain.total + leaving + root,
        )

    def _again(self) -> int:
        """Bytes that a recomputing layer holds besides while it goes backward."""
        mode = self.run.training.recompute
        return {"full": self.plain.total - self.kept.total, "operators": self.plain.mlp - self.kept.mlp}.get(mode, 0)

    def _residual(self) -> int:
        """The gradient of the residual stream, with dropout's beside it, and gathered where the sequence is split."""
        split = self.whole if self.run.layout.sequence_parallel else 0
        return self.between * (2 if self.run.model.dropout else 1) + split

    def _of_mlp(self) -> int:
        """Bytes while the second matrix goes backward: the gradient of its input; SwiGLU has two more on their way."""
        width = self.tokens * self.run.model.mlp_size // self.run.layout.tensor * self.size
        return self._residual() + width * (3 if self.run.model.mlp == "swiglu" else 1)

    def _of_attention(self) -> int:
        """Bytes while attention goes backward, less those that the layer's second half has given back.

        A fused kernel gives the gradients of queries, keys and values at once; separate operators hold those of scores.
        """
        run = self.run
        second_half = self.plain.mlp + (self.plain.inputs + self.plain.norms + self.plain.masks) // 2
        gradients = self.plain.attention
        if self.device == "cpu" and run.model.dropout:
            heads = run.model.num_heads // run.layout.tensor
            gradients = gradients // 2 + self.tokens * heads * run.training.sequence_length * max(self.size, 4)
        again = self.plain.core - self.kept.core + self.plain.attention - self.kept.attention
        again *= run.training.recompute == "selective"
        return self._residual() + again + gradients - second_half

    def _summed(self, done: int) -> int:
        """Bytes of gradients held when `done` layers have gone backward, without those that are being computed."""
        return (self.own if self._accumulates else done * self.parts.layer_share) * self.wide

    def _whole_layers(self, left: int) -> int:
        """Layers that are gathered while `left` are yet to go backward: the one that runs and the next, or all that are
        left; before the last micro-batch all.
        """
        if not self._keeps_weights:
            return min(2, left)
        return self.run.model.num_layers if self._accumulates else left

    def _gathered(self, layers: int) -> int:
        """Bytes of the weights of the root and of `layers` layers, gathered from shares."""
        if not self.is_sharded:
            return 0
        return self.parts.root * self.wide + layers * self.parts.layer * self.size


def _recomputes(run: Planned, layer: int) -> bool:
    return run.training.recompute != "none" and layer % run.training.recompute_every == 0
