"""Head of a decoder: the final norm, the product with the vocabulary, and the loss (paper, section 3).

The loss computes the gradients of the hidden states and of the vocabulary in its forward pass, chunk by chunk, so that
the logits of all tokens never exist at once. `Loss` therefore counts its own memory and messages.
"""

from dataclasses import dataclass

from crosscut.architecture.norm import Norm, stream_norm
from crosscut.architecture.parameters import Cut, Parameter, Role
from crosscut.architecture.steps import Passes, Product, Step, Value, enter
from crosscut.architecture.target import Target
from crosscut.config import ModelConfig


@dataclass(frozen=True)
class Head:
    """The residual stream to the loss."""

    norm: Norm
    output: Parameter | None
    """Weight of the output projection; None if the projection is tied to the token embedding."""
    vocabulary: Parameter
    """Weight of the output projection, or the token embedding if both are tied."""

    @classmethod
    def of(cls, model: ModelConfig, tokens: Parameter) -> "Head":
        """The head of a model whose token embedding is `tokens`."""
        shape = (model.vocab_size, model.hidden_size)
        output = None if model.tied else Parameter("output.weight", shape, Role.EMBEDDING, Cut.VOCABULARY)
        return cls(stream_norm(model, "final_norm"), output, tokens if output is None else output)

    def steps(self, x: Value) -> list[Step]:
        """Steps from the last layer's result to the loss."""
        normed, normalise = self.norm.step("final_norm", x)
        entered, entering = enter(normed, "output projection input", overlaps=False)
        return [normalise, entering, self._loss(entered)]

    def flops_per_token(self) -> int:
        """FLOPs of a token's logits, without the padding of the vocabulary."""
        rows, hidden = self.vocabulary.shape
        return 2 * rows * hidden

    def _loss(self, entered: Value) -> "Loss":
        parameters = () if self.output is None else (self.output,)
        return Loss(reads=(entered,), gives=(Value("loss", 1),), parameters=parameters, vocabulary=self.vocabulary)


@dataclass(frozen=True, kw_only=True)
class Loss(Step):
    """Logits of a chunk of tokens, their loss, and the gradients of hidden states and vocabulary."""

    vocabulary: Parameter
    """Weight of the output projection."""

    def local_vocabulary(self, target: Target) -> int:
        """Rows of the vocabulary on one rank, padding included."""
        return self.vocabulary.padded_shape(target.tensor)[0] // target.tensor

    def product(self, target: Target) -> Product:
        """Logits of a micro-batch on one rank."""
        return Product(target.tokens, self.vocabulary.shape[1], self.local_vocabulary(target))

    def ends_passes(self, target: Target) -> Passes:
        """Bytes that embedding and loss read and write: the stream twice each way, and the logits.

        Compiled, the loss finds the largest logit, sums the exponentials and turns logits into their gradient, in the
        type of the products. Eager, it does so in the type of sums, in one pass per operator.
        """
        product = self.product(target)
        stream = product.m * product.k * target.compute_bytes
        of_logit = 4 * target.compute_bytes if target.compiled else 10 * target.sums_bytes
        vocabulary_gradient = 3 * product.n * product.k * target.sums_bytes
        return Passes(forward=6 * stream + of_logit * product.m * product.n, backward=5 * stream + vocabulary_gradient)

    def logit_bytes(self, target: Target) -> int:
        """Bytes that the loss holds for each logit of a chunk: the logit and its gradient, both narrow if compiled."""
        is_mixed = target.compute_bytes != target.sums_bytes
        if target.compiled:
            return 2 * target.compute_bytes
        return target.sums_bytes + target.compute_bytes * is_mixed

    def statistics(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the two sums over the tensor ranks, in numbers per token.

        The largest logit comes first, then the sum of the exponentials together with the target's logit.
        """
        return ("loss maximum", 1), ("loss sums", 2)
