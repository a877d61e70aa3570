"""Head of a decoder: the final norm, the product with the vocabulary, and the loss (paper, section 3). A model whose
norms come after the residual sums has no final norm. A model that solves a task has another head (`task_head`) in place
of the product with the vocabulary.

The loss works on one chunk of tokens after the other, so the logits of all tokens never exist at the same time. For
each chunk, the forward pass also computes the gradients of the hidden states and of the output projection's weight. The
loss therefore differs from the steps of a layer, and the class `Loss` counts its memory and messages separately.
"""

from dataclasses import dataclass, replace

from crosscut.architecture.inputs import LossTerm, Read
from crosscut.architecture.parameters import Cut, Parameter, Role
from crosscut.architecture.steps import Multiply, Passes, Product, Rows, Step, Value, enter
from crosscut.architecture.sublayers.masked_head import MaskedPrediction, order_head
from crosscut.architecture.sublayers.norm import Norm, stream_norm
from crosscut.architecture.sublayers.pooled_head import PooledHead
from crosscut.architecture.sublayers.task_head import TaskHead
from crosscut.architecture.target import Target
from crosscut.config import ModelConfig
from crosscut.config.model import NormPosition


@dataclass(frozen=True)
class Head:
    """Head of a decoder: final norm, output projection and loss."""

    norm: Norm | None
    """Norm after the last layer; None if the last layer ends with a norm."""
    output: Parameter | None
    """Weight of the output projection; None if the projection is tied to the token embedding."""
    vocabulary: Parameter
    """Weight that computes the logits of the vocabulary: `output`, or the token embedding if `output` is None. A model
    that solves a task computes no such logits."""
    caps_logits: bool
    """Whether the model has a soft cap on its logits."""
    prediction: MaskedPrediction | None
    """Layers before the output projection of a model that predicts masked tokens; None for other models."""
    order: PooledHead | None
    """Head that predicts the order of two segments; None if the model does not predict the order."""
    task: TaskHead | None
    """Head of a model that solves a task; None for models that predict tokens."""

    @classmethod
    def of(cls, model: ModelConfig, tokens: Parameter) -> "Head":
        """Describe the head of a model whose token embedding is `tokens`."""
        shape = (model.vocab_size, model.hidden_size)
        output = (
            None if model.tied else Parameter(name="output.weight", shape=shape, role=Role.HEAD, cut=Cut.VOCABULARY)
        )
        return cls(
            norm=stream_norm(model, "final_norm") if model.norm_place is NormPosition.BEFORE else None,
            output=output,
            vocabulary=tokens if output is None else output,
            caps_logits=model.logit_softcap > 0,
            prediction=MaskedPrediction.of(model) if model.predicts_masked else None,
            order=order_head(model) if model.sentence_order else None,
            task=TaskHead.of(model) if model.solves_task else None,
        )

    @property
    def reads(self) -> dict[str, Read]:
        """Fields of a batch that the head and the loss read, by name."""
        if self.task is not None:
            return self.task.reads
        found = [Read("targets", num_values=self.vocabulary.shape[0])]
        if self.order is not None:
            found.append(Read("order", num_values=2))
        if self.prediction is not None:
            found.append(Read("predicted"))
        return {read.name: read for read in found}

    @property
    def loss_terms(self) -> tuple[LossTerm, ...]:
        """Terms of the loss."""
        if self.task is not None:
            return (LossTerm("task", "labels"),)
        of_tokens = LossTerm("tokens", "targets")
        return (of_tokens,) if self.order is None else (of_tokens, LossTerm("order", "order"))

    def steps(self, x: Value) -> list[Step]:
        """Steps that compute the loss from the last layer's result `x`."""
        steps: list[Step] = []
        if self.norm is not None:
            x, normalise = self.norm.step("final_norm", x)
            steps.append(normalise)
        if self.task is not None:
            return [*steps, *self.task.steps(x)]
        entered, entering = enter(x, "output projection input", overlaps=False)
        steps.append(entering)
        if self.order is not None:
            _, ordering = self.order.steps(replace(entered, name="first tokens", rows=Rows.SEQUENCES))
            steps += ordering
        if self.prediction is not None:
            entered, predicting = self.prediction.steps(entered)
            steps += predicting
        return [*steps, self._loss(entered)]

    def products(self, target: Target) -> list[Product]:
        """Matrix products of the head's forward pass on one rank in one micro-batch. The product that computes the
        logits comes last.
        """
        steps = self.steps(Value("last hidden states", self.vocabulary.shape[1], Rows.STREAM))
        inner = [product for step in steps if isinstance(step, Multiply) for product in step.products(target)]
        return [*inner, *(step.product(target) for step in steps if isinstance(step, Loss))]

    def flops(self, target: Target) -> int:
        """FLOPs of the head's forward pass on one rank in one micro-batch, without the padding of the vocabulary."""
        *products, logits = self.products(target)
        if self.task is None:
            rows, hidden = self.vocabulary.shape
            logits = logits._replace(k=hidden, n=rows)
        return sum(product.flops for product in [*products, logits])

    def _loss(self, entered: Value) -> "Loss":
        parameters = () if self.output is None else (self.output,)
        if self.prediction is not None:
            parameters = (*parameters, self.prediction.bias)
        return Loss(
            reads=(entered,),
            gives=(Value("loss", 1),),
            parameters=parameters,
            vocabulary=self.vocabulary,
            caps_logits=self.caps_logits,
        )


@dataclass(frozen=True, kw_only=True)
class Loss(Step):
    """Compute logits and loss of a chunk of tokens, and the gradients of the hidden states and of the output weight."""

    vocabulary: Parameter
    """Weight of the output projection."""
    caps_logits: bool

    def local_vocabulary(self, target: Target) -> int:
        """Number of vocabulary entries on one rank, including padding."""
        return self.vocabulary.on(target).shape[0]

    def product(self, target: Target) -> Product:
        """Matrix product that computes the logits of a micro-batch on one rank."""
        hidden, is_frozen = self.vocabulary.shape[1], self.vocabulary.is_frozen
        return Product(target.predicted_tokens, hidden, self.local_vocabulary(target), is_frozen=is_frozen)

    def ends_passes(self, target: Target) -> Passes:
        """Bytes that the embedding and the loss read and write in one micro-batch.

        The forward pass reads or writes the residual stream six times. For each logit, a compiled loss reads and writes
        four numbers in the compute type (the data type of matrix products), and an uncompiled loss ten numbers in the
        accumulation type. A soft cap adds ten numbers to an uncompiled loss: two each to divide, to apply tanh, to
        compute the derivatives, to multiply, and to multiply by the derivatives. The backward pass reads or writes the
        residual stream five times and, unless the output weight is frozen, the gradient of the output weight three
        times.
        """
        product = self.product(target)
        stream = target.tokens * product.k * target.compute_bytes
        uncompiled = (20 if self.caps_logits else 10) * target.sums_bytes
        of_logit = 4 * target.compute_bytes if target.compiled else uncompiled
        vocabulary_gradient = 0 if product.is_frozen else 3 * product.n * product.k * target.sums_bytes
        return Passes(forward=6 * stream + of_logit * product.m * product.n, backward=5 * stream + vocabulary_gradient)

    def logit_bytes(self, target: Target) -> int:
        """Bytes that the loss holds for each logit of a chunk.

        A compiled loss holds each logit twice in the compute type, which is the data type of matrix products. An
        uncompiled loss holds each logit in the accumulation type, and also in the compute type if the two types differ.
        With a soft cap, an uncompiled loss also holds the derivatives in the accumulation type.
        """
        is_mixed = target.compute_bytes != target.sums_bytes
        if target.compiled:
            return 2 * target.compute_bytes
        return target.sums_bytes * (2 if self.caps_logits else 1) + target.compute_bytes * is_mixed

    def statistics(self) -> tuple[tuple[str, int], ...]:
        """Name and size of each all-reduce that the loss runs over the tensor ranks. The size is in numbers per token.

        The first all-reduce finds the largest logit. The second all-reduce sums two numbers over the ranks: the sum of
        the exponentials, and the target's logit.
        """
        return ("loss maximum", 1), ("loss sums", 2)
