"""Heads for tasks about whole texts, in place of the output projection: classify a text, predict a number, choose the
right one of several texts, or find the span of an answer in a text (Devlin et al. 2018, arXiv 1810.04805, section 4).

The heads that classify, predict a number or choose read one token of each sequence, its summary: the first token in
bidirectional attention, and the last token that is not padding in causal attention. Only the summaries enter the
parallel region, so the messages have H numbers (the hidden size) per sequence, not per token. Under sequence
parallelism, the rank that holds a summary sends it to the other ranks:

    X --> summaries --f--> pooler A_i --tanh--> Y_i B_i --sum--> logits          bidirectional
    X --> summaries --> classifier --> logits                                    causal, the same on every rank

The span of an answer has two logits per token. Under sequence parallelism, each rank computes the logits of its own
tokens, and the ranks gather the logits:

    X --> classifier --gather--> logits of the start and of the end
"""

from dataclasses import dataclass, replace

from crosscut.architecture.inputs import Element, Read
from crosscut.architecture.parameters import Matrix, Parameter, Role
from crosscut.architecture.steps import Message, Multiply, Operation, Passes, Rows, Step, Value
from crosscut.architecture.sublayers.pooled_head import PooledHead
from crosscut.architecture.target import Target
from crosscut.config import ModelConfig
from crosscut.config.model import HeadKind

_NAME = "task"
"""Name of the module."""

_LABELS = {
    HeadKind.CLASSES: Read("labels"),
    HeadKind.NUMBER: Read("labels", element=Element.REAL),
    HeadKind.CHOICE: Read("labels", is_shared=True),
    HeadKind.SPANS: Read("labels", width=2, element=Element.PLACE),
}
"""Form of the labels of each kind of task."""


@dataclass(frozen=True)
class TaskHead:
    """Head for a task. Exactly one of the fields `pooled`, `of_summaries` and `of_tokens` is given."""

    labels: Read
    """Form of the labels."""
    pooled: PooledHead | None = None
    """Pooler and classifier of the first tokens, in bidirectional attention."""
    of_summaries: Matrix | None = None
    """Classifier of the last tokens, in causal attention. Every rank computes it whole."""
    of_tokens: Matrix | None = None
    """Classifier of every token, for spans. Every rank computes it for its own tokens."""

    @classmethod
    def of(cls, model: ModelConfig) -> "TaskHead":
        """Describe the head of a model that solves a task: `model.head` is "classes", "number", "choice" or "spans"."""
        hidden = model.hidden_size
        if model.head is HeadKind.SPANS:
            weight = Parameter(name=f"{_NAME}.classifier.weight", shape=(2, hidden), role=Role.HEAD)
            # A bias has no effect on the softmax over the tokens. Its gradient would consist of rounding errors.
            return cls(
                labels=_LABELS[model.head],
                of_tokens=Matrix(
                    weight, Parameter(name=f"{_NAME}.classifier.bias", shape=(2,), role=Role.BIAS, is_frozen=True)
                ),
            )
        num_outputs = model.num_classes or 1
        labels = replace(_LABELS[model.head], num_values=model.num_classes)
        if model.has_pooler:
            compares = model.head is HeadKind.CHOICE
            pooled = PooledHead.of(_NAME, hidden, num_outputs, role=Role.HEAD, dropout=model.dropout, compares=compares)
            return cls(labels=labels, pooled=pooled)
        return cls(
            labels=labels,
            of_summaries=Matrix(
                Parameter(name=f"{_NAME}.classifier.weight", shape=(num_outputs, hidden), role=Role.HEAD, on_whole=True)
            ),
        )

    @property
    def reads(self) -> dict[str, Read]:
        """Fields of a batch that the head and the loss read, by name. The texts of a task have different lengths, so
        every batch has padding.
        """
        return {"mask": Read("mask"), "labels": self.labels}

    def steps(self, x: Value) -> list[Step]:
        """Steps that compute the loss from the last hidden states `x`."""
        if self.of_tokens is not None:
            logits, steps = _token_logits(x, self.of_tokens)
        else:
            first = replace(x, name="summaries", rows=Rows.SEQUENCES, is_cheap=False)
            take = Summarise(reads=(x,), gives=(first,), name="summaries", is_entered=self.pooled is not None)
            if self.pooled is not None:
                logits, steps = self.pooled.steps(first)
            else:
                assert self.of_summaries is not None
                logits, steps = _summary_logits(first, self.of_summaries)
            steps = [take, *steps]
        return [*steps, TaskLoss(reads=(logits,), gives=(Value("loss", 1),), hidden=x.width)]


def _summary_logits(first: Value, matrix: Matrix) -> tuple[Value, list[Step]]:
    logits = Value("logits", matrix.out_features, Rows.SEQUENCES)
    parameters = matrix.parameters
    return logits, [Multiply(reads=(first,), gives=(logits,), keeps=(first,), parameters=parameters, matrix=matrix)]


def _token_logits(x: Value, matrix: Matrix) -> tuple[Value, list[Step]]:
    own = Value("own logits", matrix.out_features, Rows.STREAM)
    logits = replace(own, name="logits", rows=Rows.TOKENS)
    kept = replace(x, is_cheap=False)
    return logits, [
        Multiply(reads=(x,), gives=(own,), keeps=(kept,), parameters=matrix.parameters, matrix=matrix),
        GatherLogits(reads=(own,), gives=(logits,), name="logits of tokens"),
    ]


@dataclass(frozen=True, kw_only=True)
class Summarise(Step):
    """Take the summary of each sequence from the residual stream.

    If a parallel region follows, the gradients of the summaries are summed over the tensor ranks. With a split
    sequence, the rank that holds a summary also sends it to the other ranks, in the forward pass.
    """

    is_entered: bool

    def on(self, target: Target) -> Step:
        """Return the step with its messages."""
        summaries = (Message(Operation.ALL_REDUCE, self.gives[0].elements(target)),)
        return replace(self, forward=summaries if target.split else (), backward=summaries if self.is_entered else ())


@dataclass(frozen=True, kw_only=True)
class GatherLogits(Step):
    """Gather the logits of all tokens, if the tensor ranks split the sequence. The backward pass sends nothing, because
    every rank computes the whole loss.
    """

    def on(self, target: Target) -> Step:
        """Return the step with its message."""
        gather = (Message(Operation.ALL_GATHER, self.gives[0].elements(target)),)
        return replace(self, forward=gather if target.split else ())


@dataclass(frozen=True, kw_only=True)
class TaskLoss(Step):
    """Compute the loss of a task: the cross entropy or, for numbers, the squared difference. Every rank computes the
    whole loss and sends nothing.
    """

    hidden: int
    """Width of the residual stream."""

    def local_vocabulary(self, target: Target) -> int:
        """Number of vocabulary entries on one rank whose logits the loss computes: 0."""
        del target
        return 0

    def ends_passes(self, target: Target) -> Passes:
        """Bytes that the embedding, the final norm and the head of the task read and write in one micro-batch.

        The bytes are counted as in a language model, without the logits: the forward pass reads or writes the whole
        residual stream six times, and the backward pass five times.
        """
        stream = target.tokens * self.hidden * target.compute_bytes
        return Passes(forward=6 * stream, backward=5 * stream)

    def logit_bytes(self, target: Target) -> int:
        """Bytes that the loss holds for each logit of a vocabulary: 0."""
        del target
        return 0

    def statistics(self) -> tuple[tuple[str, int], ...]:
        """Name and size of each all-reduce that the loss runs over the tensor ranks: none."""
        return ()
