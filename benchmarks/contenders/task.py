"""The task of a contender: the model and the batch, and the way in which a step runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and of the batch."""

    num_layers: int = 6
    hidden_size: int = 384
    num_heads: int = 6
    sequence_length: int = 256
    batch_size: int = 8
    vocab_size: int = 50_304
    family: Literal["GPT-2", "Llama", "BERT", "Mamba-2", "Mixtral", "Qwen3-MoE"] = "GPT-2"
    """A `Llama` has rotary positions, root mean square norms, SwiGLU, no biases. A `BERT` reads a text in both
    directions, has its norms after the residual sums, and predicts masked tokens or a class. A `Mixtral` and a
    `Qwen3-MoE` are a `Llama` with experts in place of each MLP.
    """
    is_sublayer: bool = False
    """Whether only one sublayer is measured, without embeddings and loss: a mixer or a mixture of experts."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    """Width of an expert."""
    num_classes: int = 0
    """Number of classes of a BERT that is fine-tuned on labelled texts. 0 means that it predicts masked tokens."""

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the model by their names in Crosscut."""
        return {name: getattr(self, name) for name in ("num_layers", "hidden_size", "num_heads", "vocab_size")}

    @property
    def mlp_size(self) -> int:
        """Width between the matrices of the MLP or of an expert.

        A GPT-2 and a BERT have four times the hidden size. A Llama has three matrices in place of two, so its width is
        chosen for about as many parameters.
        """
        if self.expert_size:
            return self.expert_size
        return max(1, round(self.hidden_size / 48)) * 128 if self.family == "Llama" else 4 * self.hidden_size


@dataclass(frozen=True, kw_only=True)
class Way:
    """Device, precision and compilation of a contender."""

    compiled: bool = False
    device: str = "cpu"
    precision: str = "float32"
    overrides: tuple[str, ...] = ()
    """Further settings of a Crosscut run, such as `training.recompute=full`."""
    loss_chunk_tokens: int = 0
    """Tokens whose logits the plain program holds at once. 0 means all tokens of a micro-batch."""


Step = Callable[[int, Sequence[tuple[Any, Any]]], Callable[[], float]]
"""A training step: from the step number and the micro-batches of (tokens, targets), each [B, S], to a function that
waits for the mean loss and returns it. The targets of texts with classes are [B].
"""

MASKED = 0.15
"""Fraction of the tokens that a BERT predicts."""


def draw(shape: Shape, generator: Any) -> tuple[Any, Any]:
    """Draw a random batch of (tokens, targets), as a `Step` takes it. For one sublayer, these are inputs, and the
    gradient of its outputs.
    """
    import torch

    if shape.is_sublayer:
        inputs = torch.randn(2, shape.batch_size, shape.sequence_length, shape.hidden_size, generator=generator)
        return inputs[0], inputs[1]
    size = (shape.batch_size, shape.sequence_length + 1)
    ids = torch.randint(0, shape.vocab_size, size, generator=generator)
    tokens = ids[:, :-1]
    if shape.family != "BERT":
        return tokens, ids[:, 1:]
    if shape.num_classes:
        return tokens, torch.randint(0, shape.num_classes, (shape.batch_size,), generator=generator)
    chosen = torch.rand(tokens.shape, generator=generator) < MASKED
    return tokens, tokens.where(chosen, torch.tensor(-100))


class NotActiveError(Exception):
    """A setting was asked for but would have no effect in this contender."""
