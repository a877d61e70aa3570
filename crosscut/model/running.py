"""Runners: objects that call the functions of a layer. The plain runner calls the functions and does nothing else.

Training gives each layer another runner when the model is built. Such a runner recomputes activations in the backward
pass instead of keeping them, or calls compiled code (`training.runners`). The layers' own code is the same under every
runner.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from crosscut.architecture.pipeline import Stage
from crosscut.config.layout import ContextAttention
from crosscut.kernels import ORDINARY, LossPasses, Products
from crosscut.kernels.functions import Caller, LayerCaller, call
from crosscut.parallel import Multiplication


class Pausable(Protocol):
    """Compiler of layers, or of the loss, that can be paused. During a pause, the layers or the loss run uncompiled."""

    is_paused: bool
    """Whether the compiler is paused."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Runner:
    """Object that calls the functions of a layer, and chooses how the layer's linear layers compute their matrix
    products. Several layers may share a runner.
    """

    layer: LayerCaller = call
    """Function that calls the whole layer."""
    core: Caller = call
    """Function that calls the attention core: scores, softmax, dropout and values."""
    cheap: Caller = call
    """Function that calls each cheap part of the layer (a norm, or the activation inside an MLP). A part is cheap if
    computing it again takes little time.
    """
    kept: Caller = call
    """Function that calls each residual sum of the layer, whose result the backward pass keeps."""
    products: Products = ORDINARY
    """Matrix products of the linear layers."""
    skips_last_product: bool = False
    """Whether recomputation skips the product and the collective of the linear layer at the end of a sublayer. True
    only for the last part of a layer."""
    compiler: Pausable | None = None
    """Compiler of the layer; None if the layer is not compiled. The modules inside a compiled layer are not called one
    by one.
    """

    @property
    def linear(self) -> Multiplication:
        """Function that computes the matrix product of every linear layer that does not end a sublayer."""
        return Multiplication(self.products)

    @property
    def last_linear(self) -> Multiplication:
        """Function that computes the matrix product of the linear layer at the end of a sublayer."""
        return Multiplication(self.products, skips_repetition=self.skips_last_product)


@dataclass(frozen=True, kw_only=True, eq=False)
class LossRunner:
    """Runner of the loss. It provides compiled functions for the loss to call, and limits the number of tokens whose
    logits are in memory at once.

    By default, nothing is compiled, and the device's default number of tokens is used.
    """

    compiled: LossPasses | None = None
    """Compiled functions that compute the loss and its gradients from the logits; None if these functions are not
    compiled.
    """
    compiler: Pausable | None = None
    """Compiler that made `compiled`; None if `compiled` is None."""
    chunk_tokens: int | None = None
    """Number of tokens whose logits the loss holds at once; None means the device's default."""

    @property
    def passes(self) -> LossPasses | None:
        """Compiled functions that the loss calls now. None if the loss runs uncompiled, either because it was never
        compiled or because the compiler is paused.
        """
        return None if self.compiler is None or self.compiler.is_paused else self.compiled


PLAIN = Runner()
"""Runner that calls functions unchanged and computes products in the element type of their arguments."""

PLAIN_LOSS = LossRunner()
"""Runner of the loss without compiled functions."""


def plain_runner(_index: int) -> Runner:
    """Return `PLAIN`, the runner without recomputation and compilation, for every layer."""
    return PLAIN


@dataclass(frozen=True, kw_only=True, eq=False)
class Runners:
    """Runners of a model's parts, and the stages that the rank runs."""

    layer: Callable[[int], Runner] = plain_runner
    """Function that returns the runner of the layer with a given index."""
    loss: LossRunner = PLAIN_LOSS
    context_attention: ContextAttention = ContextAttention.GATHER
    """Way in which attention is computed over a sequence that several ranks share. Never `auto`."""
    stages: tuple[Stage, ...] = ()
    """Stages of a pipeline that the rank runs. Empty means one stage, the whole model."""


PLAIN_RUNNERS = Runners()
"""Runners that change nothing, for the whole model."""
