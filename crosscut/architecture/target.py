"""Conditions under which one rank runs a model, as far as they change what a layer does."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from crosscut.config.conventions import AMPERE

Device = Literal["cuda", "cpu"]


class Kind(Enum):
    """Data type of the elements of a value that the backward pass reads."""

    COMPUTE = "type of the products"
    WIDE = "type of the products, float32 at least"
    WIDENING = "bytes that the wide type has more than the type of the products"
    DEVIATION = "mean or deviation of a layer norm"
    ROOT = "root mean square of an RMS norm"
    MASK = "mask of dropout"
    INDEX = "row of the embedding (8 bytes) and whether another rank has it (1 byte)"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Tensor ranks, micro-batch, device and data types of one rank."""

    tensor: int = 1
    """Tensor ranks."""
    split: bool = False
    """Whether the tensor ranks divide the sequence between the parallel regions."""
    sequences: int = 1
    """Sequences of a micro-batch on one data rank."""
    length: int = 1
    """Tokens of a sequence."""
    device: Device = "cpu"
    capability: tuple[int, int] = AMPERE
    """Compute capability of the GPU."""
    compute: str = "float32"
    """Data type of activations and products, by torch's name."""
    compute_bytes: int = 4
    sums_bytes: int = 4
    """Bytes of an element of parameters, gradients and the loss's sums."""
    compiled: bool = False
    """Whether layers are compiled, so that one kernel runs several operators."""
    fuses_attention: bool = True
    """Whether attention may run in a fused kernel, which keeps no scores, if the device has one."""
    sends_halves: bool = True
    """Whether a large message of a split sequence may be sent in two halves. Each half then overlaps with the product
    of the other half."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch inside a parallel region."""
        return self.sequences * self.length

    @property
    def own_tokens(self) -> int:
        """Tokens of a micro-batch on this rank between the parallel regions."""
        return self.tokens // self.tensor if self.split else self.tokens

    def bytes_of(self, kind: Kind) -> int:
        """Bytes of an element.

        On CUDA a mask takes one byte and a layer norm keeps its statistics in the wide type. On the CPU both are in the
        type of the activations.
        """
        size, on_cuda = self.compute_bytes, self.device == "cuda"
        if kind is Kind.COMPUTE:
            return size
        if kind is Kind.MASK:
            return 1 if on_cuda else size
        if kind is Kind.INDEX:
            return 9
        if kind is Kind.WIDENING:
            return max(0, 4 - size)
        return size if kind is Kind.DEVIATION and not on_cuda else max(size, 4)
