"""Ranks of a teacher: another arrangement of the ranks that compute the loss.

The teacher's tensor size may differ from that of the model. Adjacent ranks form blocks, the smallest ones in which both
arrangements are whole. The ranks of a block gather their tokens, each group of the teacher's tensor ranks computes the
teacher for a share of the sequences, and the ranks gather the results. For example, with a model at tensor 2 x data 2
and a teacher at tensor 4, a block has 4 ranks, and its one group computes the sequences of both data ranks. With a
teacher at tensor 1, a block has 2 ranks, and each computes half of the sequences.
"""

from dataclasses import dataclass
from functools import cached_property
from math import lcm

from crosscut.config.checks import divisors, listed
from crosscut.config.errors import LayoutError
from crosscut.config.layout import Layout
from crosscut.config.layouts.ranks import Line

TEACHER, TEACHER_TOKENS, TEACHER_SHARES = "teacher", "teacher_tokens", "teacher_shares"
"""Names of the axes along which the teacher's messages are sent: ranks that share its matrices, ranks of a block that
read different tokens, and ranks of a block that compute the teacher for different sequences."""


@dataclass(frozen=True)
class TeacherRanks:
    """Arrangement of the ranks for a teacher on `tensor` tensor ranks, beside a model on the layout `student`."""

    student: Layout
    tensor: int

    def require_possible(self) -> None:
        """Raise `LayoutError` unless the teacher's tensor ranks divide the ranks that compute the loss."""
        ranks = self.student.ranks.per_owner
        if ranks % self.tensor:
            of_stage = " of the last stage" if self.student.num_stages > 1 else ""
            raise LayoutError(
                f"`teacher.tensor` must divide the number of ranks{of_stage} ({ranks}), but is {self.tensor}. "
                f"Try {listed(divisors(ranks))}."
            )

    @property
    def of_model(self) -> int:
        """Number of adjacent ranks that read the same sequences, whole or in parts."""
        return self.student.tensor * self.student.context

    @cached_property
    def block(self) -> int:
        """Number of ranks of a block."""
        return lcm(self.tensor, self.of_model)

    @property
    def is_apart(self) -> bool:
        """Whether the teacher is cut in another way than the model."""
        return self.tensor != self.student.tensor

    @cached_property
    def lines(self) -> dict[str, Line]:
        """Lines of the teacher's messages, by name."""
        tensor = self.student.tensor
        steps = {
            TEACHER: (self.tensor, 1),
            TEACHER_TOKENS: (self.block // tensor, tensor),
            TEACHER_SHARES: (self.block // self.tensor, self.tensor),
        }
        return {name: Line(name, (name,), (step,)) for name, step in steps.items()}

    def sequences(self, micro_batch: int) -> int:
        """Number of sequences of the micro-batches of all ranks of a block, for micro-batches of this size."""
        return micro_batch * self.block // self.of_model

    def share(self, micro_batch: int) -> int:
        """Number of sequences for which one group of the teacher's tensor ranks computes the teacher. The last groups
        may repeat sequences.
        """
        return -(-self.sequences(micro_batch) * self.tensor // self.block)
