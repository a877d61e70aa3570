"""Heads that read one token of each text, its summary: classify a text, predict a number, or choose the right one of
several texts.

The summary is the first token in bidirectional attention, and the last token that is not padding in causal attention.
Only the summaries enter the parallel region, so the messages have H numbers (the hidden size) per sequence, not per
token. Under sequence parallelism, the rank that holds a summary sends it to the other ranks:

    X --> summaries --f--> pooler A_i --tanh--> Y_i B_i --sum--> logits          bidirectional
    X --> summaries --> classifier --> logits                                    causal, the same on every rank
"""

from dataclasses import dataclass, replace
from typing import Any, Self

from crosscut.architecture.inputs import Element, Read
from crosscut.architecture.parameters import Matrix, Parameter, Role
from crosscut.architecture.steps import Message, Multiply, Operation, Rows, Step, Value
from crosscut.architecture.sublayers.heads.abilities import Ability, abilities
from crosscut.architecture.sublayers.heads.head import final_norm
from crosscut.architecture.sublayers.heads.pooled_head import PooledHead
from crosscut.architecture.sublayers.heads.task_head import NAME, TaskHead
from crosscut.architecture.target import Target
from crosscut.config import ModelConfig


@dataclass(frozen=True)
class SummaryClassifier:
    """Classifier of the last tokens, in causal attention. Every rank computes it whole."""

    matrix: Matrix

    @classmethod
    def of(cls, hidden: int, num_outputs: int) -> "SummaryClassifier":
        """Describe a classifier with `num_outputs` logits per sequence."""
        name = f"{NAME}.classifier.weight"
        return cls(Matrix(Parameter(name=name, shape=(num_outputs, hidden), role=Role.HEAD, on_whole=True)))

    def steps(self, first: Value) -> tuple[Value, list[Step]]:
        """Return the logits, and the step that computes them from the summaries."""
        logits = Value("logits", self.matrix.out_features, Rows.SEQUENCES)
        parameters = self.matrix.parameters
        multiply = Multiply(reads=(first,), gives=(logits,), keeps=(first,), parameters=parameters, matrix=self.matrix)
        return logits, [multiply]


@dataclass(frozen=True, kw_only=True)
class SummaryHead(TaskHead):
    """Head that reads the summaries: the pooler and the classifier of the first tokens in bidirectional attention, or
    a classifier of the last tokens in causal attention.
    """

    reader: PooledHead | SummaryClassifier

    @classmethod
    def made(cls, model: ModelConfig, labels: Read, **pooler: Any) -> Self:
        """Describe a head with one logit per class, or with one logit. `pooler` are further arguments of
        `PooledHead.of`.
        """
        hidden, outputs = model.hidden_size, model.num_classes or 1
        reader: PooledHead | SummaryClassifier = SummaryClassifier.of(hidden, outputs)
        if not model.is_causal:
            reader = PooledHead.of(NAME, hidden, outputs, role=Role.HEAD, dropout=model.dropout, **pooler)
        return cls(
            name=model.head,
            hidden=hidden,
            norm=final_norm(model),
            abilities=abilities(Ability.SOLVE, is_causal=model.is_causal),
            labels=labels,
            reader=reader,
        )

    def logits(self, x: Value) -> tuple[Value, list[Step]]:
        """Return the logits of each sequence, and the steps that compute them from the hidden states `x`."""
        first = replace(x, name="summaries", rows=Rows.SEQUENCES, is_cheap=False)
        is_entered = isinstance(self.reader, PooledHead)
        take = Summarise(reads=(x,), gives=(first,), name="summaries", is_entered=is_entered)
        logits, steps = self.reader.steps(first)
        return logits, [take, *steps]


@dataclass(frozen=True, kw_only=True)
class ClassesHead(SummaryHead):
    """Head that predicts the class of a text."""

    @classmethod
    def of(cls, model: ModelConfig, _tokens: Parameter) -> "ClassesHead":
        """Describe the head of a model."""
        return cls.made(model, Read("labels", num_values=model.num_classes))


@dataclass(frozen=True, kw_only=True)
class NumberHead(SummaryHead):
    """Head that predicts a number, such as the similarity of two texts."""

    @classmethod
    def of(cls, model: ModelConfig, _tokens: Parameter) -> "NumberHead":
        """Describe the head of a model."""
        return cls.made(model, Read("labels", element=Element.REAL))


@dataclass(frozen=True, kw_only=True)
class ChoiceHead(SummaryHead):
    """Head that chooses the right one of several texts, by a softmax over their logits."""

    @classmethod
    def of(cls, model: ModelConfig, _tokens: Parameter) -> "ChoiceHead":
        """Describe the head of a model."""
        return cls.made(model, Read("labels", is_shared=True), compares=True)


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
