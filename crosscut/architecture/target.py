"""Properties of a run that determine the work of one rank in a layer: shapes, device and data types."""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import Literal

from crosscut.config.conventions import AMPERE, repeats_of_heads
from crosscut.config.hashed import HashedOnce
from crosscut.config.layout import ContextAttention, Layout

Device = Literal["cuda", "cpu"]


class Kind(Enum):
    """Data type of a saved value."""

    COMPUTE = "compute type: the data type of matrix products"
    WIDE = "compute type, but at least float32"
    WIDENING = "difference in bytes between `WIDE` and `COMPUTE`"
    DEVIATION = "mean or deviation of a layer norm"
    ROOT = "root mean square of an RMS norm"
    MASK = "mask of dropout"
    INDEX = "row of the embedding (8 bytes) and whether another rank has it (1 byte)"
    POSITION = "position of a token in its document (8 bytes)"


@dataclass(frozen=True, kw_only=True)
class Target(HashedOnce):
    """Properties of a run that determine the work of one rank in a layer."""

    __hash__ = HashedOnce.__hash__

    tensor: int
    """Number of tensor ranks."""
    split: bool
    """Whether the tensor ranks divide the sequence outside of the parallel regions (sequence parallelism)."""
    context: int
    """Number of context ranks, which share each sequence."""
    expert: int
    """Number of ranks that share the experts of a layer."""
    context_attention: ContextAttention = ContextAttention.GATHER
    """Way in which attention is computed over sequences that context ranks share."""
    skew: float = 1.0
    """Number of rows that the experts of the fullest rank receive, as a multiple of the mean over the ranks that share
    the experts. 1 means even loads."""
    sequences: int = 1
    """Number of sequences of a micro-batch on one data rank."""
    length: int = 1
    """Number of tokens of a sequence, on all context ranks together."""
    device: Device = "cpu"
    capability: tuple[int, int] = AMPERE
    """Compute capability of the GPU."""
    compute: str = "float32"
    """Data type of activations and products, by its name in torch."""
    compute_bytes: int = 4
    sums_bytes: int = 4
    """Bytes of one element of parameters, gradients and the sums of the loss."""
    compiled: bool = False
    """Whether layers are compiled, so that one kernel runs several operators."""
    fuses_attention: bool = True
    """Whether attention may run in a fused kernel, which stores no scores, if the device has such a kernel."""
    document_mask: bool = False
    """Whether a mask hides the documents of a sequence from each other, and positions restart at each document."""
    predicted: int | None = None
    """Number of tokens of a micro-batch for which the head of a masked language model computes logits. None means all
    tokens."""
    eight_bit: bool = False
    """Whether layers multiply in 8 bits, and cast the factors of each product. A large message of a split sequence is
    then sent whole. Otherwise, it may be sent in two halves, and each half overlaps with the product of the other."""

    @classmethod
    def of(cls, layout: Layout) -> "Target":
        """Return the target of one token on a layout, with defaults for everything that does not follow from the
        layout. Use `dataclasses.replace` to set the micro-batch, the device and the data types.
        """
        return _of_parameters(layout.tensor, layout.sequence_parallel, layout.context, layout.expert)

    @cached_property
    def of_parameters(self) -> "Target":
        """The target without the properties that the parameters of a rank do not depend on."""
        return _of_parameters(self.tensor, self.split, self.context, self.expert)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that compute the same micro-batch together."""
        return self.tensor * self.context

    def own(self, elements: int) -> int:
        """Elements of one rank, if the ranks divide `elements` evenly inside a parallel region."""
        return elements // self.tensor

    def own_experts(self, experts: int) -> int:
        """Number of experts of one rank, if ranks share `experts` experts."""
        return experts // self.expert

    def own_heads(self, heads: int) -> int:
        """Number of heads of one rank. Each rank has whole heads, and at least one: if there are more ranks than heads,
        ranks share a head.
        """
        return max(heads // self.tensor, 1)

    def share_heads(self, heads: int) -> bool:
        """Whether there are more ranks than heads, so that several ranks share a head."""
        return self.tensor > heads

    @property
    def way(self) -> ContextAttention | None:
        """Way in which ranks attend to sequences that they share; None if every rank has whole sequences."""
        return self.context_attention if self.context > 1 else None

    @property
    def shared_tokens(self) -> int:
        """Number of tokens of a micro-batch inside a parallel region, of all ranks that share its sequences."""
        return self.sequences * self.length

    def exchanged_heads(self, heads: int) -> int:
        """Number of heads that a rank has of its `heads` heads after the ranks that share sequences have exchanged
        heads for tokens.
        """
        return heads // self.context

    def repeats_of_heads(self, heads: int, shared: int) -> int:
        """Number of times that a rank sends each of `shared` heads, which it has for `heads` heads, so that ranks that
        share sequences can exchange heads for tokens.
        """
        return repeats_of_heads(heads, shared, self.context)

    @property
    def own_length(self) -> int:
        """Number of tokens of a sequence on one context rank."""
        return self.length // self.context

    @property
    def tokens(self) -> int:
        """Number of tokens of a micro-batch inside a parallel region, on one context rank."""
        return self.sequences * self.own_length

    @property
    def received_tokens(self) -> float:
        """Number of tokens of a micro-batch of which the fullest rank receives one row for each expert of a token."""
        return self.tokens * self.skew

    @property
    def gathers(self) -> bool:
        """Whether context ranks gather the keys of whole sequences, or what the keys are computed from."""
        return self.way is ContextAttention.GATHER

    @property
    def key_tokens(self) -> int:
        """Number of tokens of a micro-batch whose keys one rank computes, if it computes them from what context ranks
        may gather.
        """
        return self.shared_tokens if self.gathers else self.tokens

    def ranks_of(self, axis: str) -> int:
        """Number of ranks along the axis `tensor`, `context` or `expert`."""
        return {"context": self.context, "expert": self.expert}.get(axis, self.tensor)

    @property
    def predicted_tokens(self) -> int:
        """Number of tokens of a micro-batch for which the head computes logits."""
        return self.tokens if self.predicted is None else self.predicted

    @property
    def own_tokens(self) -> int:
        """Number of tokens of a micro-batch that this rank holds outside of the parallel regions."""
        return self.tokens // self.tensor if self.split else self.tokens

    def bytes_of(self, kind: Kind) -> int:
        """Bytes of one element of this kind.

        On CUDA, a mask takes one byte, and the statistics of a layer norm are float32 or wider. On the CPU, masks and
        layer-norm statistics have the data type of the activations.
        """
        size, on_cuda = self.compute_bytes, self.device == "cuda"
        if kind is Kind.COMPUTE:
            return size
        if kind is Kind.MASK:
            return 1 if on_cuda else size
        if kind is Kind.INDEX:
            return 9
        if kind is Kind.POSITION:
            return 8
        if kind is Kind.WIDENING:
            return max(0, 4 - size)
        return size if kind is Kind.DEVIATION and not on_cuda else max(size, 4)


@lru_cache(maxsize=1024)
def _of_parameters(tensor: int, split: bool, context: int, expert: int) -> Target:
    return Target(tensor=tensor, split=split, context=context, expert=expert)


@lru_cache(maxsize=4096)
def shared_target(target: Target) -> Target:
    """Return the first of all equal targets, so that caches compare their keys by identity."""
    return target
