"""Shape of a training step, which follows from the model, the layout and the training of a run."""

from abc import ABC, abstractmethod

from crosscut.config.conventions import predicted_rows
from crosscut.config.layout import Layout
from crosscut.config.layouts.compilation import reason_against_compiling
from crosscut.config.layouts.context import ContextChoice, choose_context_attention
from crosscut.config.layouts.ranks import Line
from crosscut.config.model import ModelConfig
from crosscut.config.teachers import TeacherConfig, TeacherRanks
from crosscut.config.training import Compile, Recompute, TrainingConfig


class StepShape(ABC):
    """Sizes and methods of a run's training step on one rank."""

    model: ModelConfig
    layout: Layout
    training: TrainingConfig
    teacher: TeacherConfig

    @property
    def teacher_ranks(self) -> TeacherRanks:
        """Arrangement of the ranks for the teacher, if the run has one."""
        return TeacherRanks(self.layout, self.teacher.tensor or self.layout.tensor)

    def line(self, name: str) -> Line:
        """Return the line of ranks with this name: a line of the layout, or of the teacher."""
        lines = self.teacher_ranks.lines
        return lines[name] if name in lines else self.layout.line(name)

    @property
    @abstractmethod
    def mask_fraction(self) -> float:
        """Fraction of the tokens that a masked language model predicts."""

    @property
    def micro_batch_size(self) -> int:
        """Number of sequences per forward pass of one data rank."""
        return self.training.sequences_at_once(self.layout.data)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches per step on each data rank. If the batch grows, the first steps have fewer
        micro-batches.
        """
        return self.training.batch_size // (self.layout.data * self.micro_batch_size)

    @property
    def predicted_tokens(self) -> int:
        """Number of tokens of a rank's micro-batch for which the head computes logits of the vocabulary: none for a
        model that solves a task, the expected number for a masked language model, and all tokens for any other model.
        """
        tokens = self.micro_batch_size * self.training.sequence_length // self.layout.context
        if self.model.solves_task:
            return 0
        return predicted_rows(None, tokens, self.mask_fraction) if self.model.predicts_masked else tokens

    @property
    def context_attention(self) -> ContextChoice:
        """Method of computing attention over sequences that several context ranks share, and the reason for it."""
        return choose_context_attention(self.model, self.layout, self.training)

    @property
    def repeats_scores(self) -> bool:
        """Whether the backward pass computes the scores of attention again."""
        return self.model.attends and self.training.recompute is Recompute.SELECTIVE

    @property
    def reason_against_compiling(self) -> str:
        """Reason why the layers of this run cannot be compiled, as a clause to follow a colon. Empty if the layers can
        be compiled.
        """
        return reason_against_compiling(self.model, self.layout)

    @property
    def is_compiled_on_gpus(self) -> bool:
        """Whether the run compiles its layers if it is on GPUs that support compilation."""
        return self.training.compile != Compile.OFF and not self.reason_against_compiling
