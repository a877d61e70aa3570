"""Runners call the functions of a layer. The plain runner calls them and does nothing else.

Training gives each layer another runner when the model is built. Such a runner computes activations again instead of
keeping them, or calls compiled code (`training.runners`). The layers' own code is the same under every runner.
"""

from dataclasses import dataclass
from typing import Protocol

from crosscut.kernels import ORDINARY, LossPasses, Products
from crosscut.kernels.functions import Call, call
from crosscut.parallel import Multiplication


class Pausable(Protocol):
    """Compiler of layers, or of the loss, that can be told to run the plain code for a while."""

    is_paused: bool
    """Whether the plain code runs now."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Runner:
    """Calls the functions of one layer, and chooses the products of its linear layers. Layers may share a runner."""

    layer: Call = call
    """Calls the whole layer."""
    core: Call = call
    """Calls the attention core: scores, softmax, dropout and values."""
    cheap: Call = call
    """Calls a function that is cheap to compute again: a norm, or the activation between the products of an MLP."""
    products: Products = ORDINARY
    """Matrix products of the linear layers."""
    skips_last_product: bool = False
    """Whether recomputation skips the product and the message of the last linear layer."""
    compiler: Pausable | None = None
    """Compiler of the layer, whose modules are then not called one by one; None if the layer runs as it is written."""

    @property
    def linear(self) -> Multiplication:
        """Multiplication of every linear layer except the last."""
        return Multiplication(self.products)

    @property
    def last_linear(self) -> Multiplication:
        """Multiplication of the last linear layer, whose result goes to the residual sum."""
        return Multiplication(self.products, skips_repetition=self.skips_last_product)


@dataclass(frozen=True, kw_only=True, eq=False)
class LossRunner:
    """Compiled code and working size of the loss. The plain one compiles nothing and uses the device's default size."""

    compiled: LossPasses | None = None
    """Compiled passes over the logits; None if they are not compiled."""
    compiler: Pausable | None = None
    """Compiler of these passes."""
    chunk_tokens: int | None = None
    """Number of tokens whose logits the loss holds at once; None means the device's default."""

    @property
    def passes(self) -> LossPasses | None:
        """Compiled passes, or None while the compiler is paused."""
        return None if self.compiler is None or self.compiler.is_paused else self.compiled


PLAIN = Runner()
"""Runner that calls functions as they are written, with products in the type of their arguments."""

PLAIN_LOSS = LossRunner()
"""Runner of the loss that compiles nothing."""


def plain_runner(_index: int) -> Runner:
    """Return the plain runner for the layer at any index."""
    return PLAIN
