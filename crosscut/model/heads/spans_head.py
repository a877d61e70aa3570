"""Head that finds the span of an answer in a text.

Shapes: B sequences, S tokens of a sequence, H hidden, T tensor ranks. Under sequence parallelism, hidden states are [B,
S/T, H].
"""

import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.architecture import Matrix
from crosscut.architecture.sublayers.heads.spans_head import SpansHead as Part
from crosscut.architecture.sublayers.heads.task_head import NAME
from crosscut.model.batch import Batch
from crosscut.model.building import Builder
from crosscut.model.heads.head import HeadBuilder
from crosscut.model.heads.task_head import Classifier, TaskHead, cross_entropies
from crosscut.parallel import join_from_sequence_parallel, local_on_sequence


class SpansHead(TaskHead[Part]):
    """Two logits per token: of the first and of the last token of the answer."""

    def __init__(self, part: Part, builder: HeadBuilder) -> None:
        super().__init__(part, builder)
        self.reader = TokenClassifier(part.matrix, builder.build)

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The classifier of the tokens."""
        return {NAME: self.reader}

    def inputs(self, batch: Batch, num_filled: int) -> tuple[Batch, int]:
        """Return the batch with its mask, because padding has logits, too."""
        return batch.padded(num_filled, hides=True), num_filled

    def task_logits(self, hidden: Tensor, batch: Batch, num_choices: int) -> Tensor:
        """Return the logits [B, S, 2]."""
        del num_choices
        logits: Tensor = self.reader(hidden)
        return logits[:, : batch.tokens.shape[1]]

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of `labels` [B, 2], the indexes of the first and of the last token of each
        answer. A sequence adds the mean of both cross entropies.
        """
        return cross_entropies(logits, labels) / 2


class TokenClassifier(nn.Module):
    """Classifier of every token, which maps [B, S, H] to [B, S, C].

    Under sequence parallelism, each rank computes the logits of its own tokens. Forward: all-gather of the logits.
    Backward: no communication, because every rank computes the whole loss. The gradients of the weight on different
    ranks come from different tokens; they are summed over the tensor ranks once per step.
    """

    def __init__(self, matrix: Matrix, build: Builder) -> None:
        super().__init__()
        self.mesh = build.mesh
        self.classifier = Classifier(matrix, build)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the logits from the last hidden states. Every tensor rank gets the logits of all tokens."""
        weight = local_on_sequence(self.classifier.weight, self.mesh, hidden.dtype)
        bias = self.classifier.bias
        own = F.linear(hidden, weight, None if bias is None else local_on_sequence(bias, self.mesh, hidden.dtype))
        return join_from_sequence_parallel(own, self.mesh.tensor) if self.mesh.sequence_parallel else own
