"""Embeddings: token embeddings are cut along the vocabulary, position embeddings are replicated.

Shapes: B batch, S sequence, H hidden, V vocabulary padded to a multiple of 128 x T, T tensor ranks.
"""

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import ConfigError, padded_vocab_size
from crosscut.kernels.look_up import look_up
from crosscut.kernels.products import ORDINARY
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.operators import leave_tensor_parallel, part_of_sequence
from crosscut.parallel.state.parameters import local, local_on_sequence, replicated_parameter, sharded_parameter


@final
class TiedWeight:
    """Embedding weight [V/T, H] for its second use, the product that gives the logits. It may be used once.

    It is a plain object, because `fully_shard` treats all tensors in a module's output, even those in tuples and
    dataclasses, as activations.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class VocabParallelEmbedding(nn.Module):
    """E = [E_1, E_2]: each rank holds the rows of its part of the vocabulary, looks up only these, and g sums the
    results.

    Input: token ids [B, S] below `vocab_size`. Output: [B, S, H] in `output_dtype` (under sequence parallelism [B, S/T,
    H]). Parameter: `weight` [V, H] as Shard(0); zeros until initialised.

    Forward: all-reduce of the output (sequence parallelism: reduce-scatter). Backward: nothing is sent (sequence
    parallelism: all-gather). Source: paper, section 3. Raises `RuntimeError` if an id is not below `vocab_size` (on
    CUDA, when the device reaches the check).
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        mesh: ParallelMesh,
        dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.mesh, self.output_dtype = mesh, output_dtype or dtype
        self.vocab_size = vocab_size
        padded = padded_vocab_size(vocab_size, mesh.tensor.size)
        place: Any = {"dtype": dtype, "device": mesh.parameter_device}
        self.weight = sharded_parameter((padded, hidden_size), mesh.tensor, dim=0, **place)
        self.local_size = padded // mesh.tensor.size
        self.first = mesh.tensor.rank * self.local_size

    def forward(self, tokens: Tensor, *, with_weight: bool = False) -> Tensor | tuple[Tensor, TiedWeight]:
        """Look up tokens: [B, S] to [B, S, H] (or [B, S/T, H]).

        `with_weight` also returns the weight for its second use. The gradients of both uses are then accumulated in one
        tensor, instead of two tensors and their sum (`kernels.look_up`).
        """
        torch._assert_async(
            ((tokens >= 0) & (tokens < self.vocab_size)).all(),
            f"Token ids must be from 0 to {self.vocab_size - 1}, the last id of the vocabulary, but an id is outside "
            "this range. Tokenize with this model's tokenizer.",
        )
        index, elsewhere = self._own_index(tokens)
        weight = local(self.weight, self.weight.dtype)
        rows, again = look_up(weight, index) if with_weight else (F.embedding(index, weight), weight)
        rows = rows.to(self.output_dtype).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        hidden = leave_tensor_parallel(rows, self.mesh)
        return (hidden, TiedWeight(again)) if with_weight else hidden

    def _own_index(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's row on this rank, and whether another rank holds the token. For such a token the row is
        arbitrary; the rows are spread out so that not all of these tokens read the same row.
        """
        elsewhere = (tokens < self.first) | (tokens >= self.first + self.local_size)
        return tokens.remainder(self.local_size), elsewhere  # each rank's first id is a multiple of `local_size`


class VocabParallelOutput(nn.Module):
    """Output weight of a model whose output is not tied to its embedding. It is cut along the vocabulary like the
    embedding.

    Parameter: `weight` [V, H] as Shard(0); zeros until initialised. `vocab_parallel_cross_entropy` multiplies by this
    weight to get the logits.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, mesh: ParallelMesh, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.products = ORDINARY  # for scores; the loss has its own products
        shape = (padded_vocab_size(vocab_size, mesh.tensor.size), hidden_size)
        self.weight = sharded_parameter(shape, mesh.tensor, dim=0, dtype=dtype, device=mesh.parameter_device)


class PositionEmbedding(nn.Module):
    """Learned position embeddings, added outside the parallel regions.

    For a sequence length S, the output is [S, H] (under sequence parallelism this rank's [S/T, H]). Parameter: `weight`
    [P, H] as Replicate, where P is the longest sequence; zeros until initialised. Sends nothing. Under sequence
    parallelism, the gradient is partial. Source: paper, section 2.2. Raises `ConfigError` if S is larger than P.
    """

    def __init__(
        self,
        max_length: int,
        hidden_size: int,
        *,
        mesh: ParallelMesh,
        dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.mesh, self.output_dtype = mesh, output_dtype or dtype
        place: Any = {"dtype": dtype, "device": mesh.parameter_device}
        self.weight = replicated_parameter((max_length, hidden_size), mesh.tensor, **place)

    def forward(self, length: int, *, num_filled: int = 0) -> Tensor:
        """Return the embeddings of positions 0 to `length` - 1: [S, H] (or [S/T, H]).

        The last `num_filled` positions are padding that makes the sequence divisible by the ranks. They may
        exceed P, and their embeddings are zeros.
        """
        num_real = length - num_filled
        if num_real > self.weight.shape[0]:
            raise ConfigError(
                f"A sequence must be at most as long as the model's positions ({self.weight.shape[0]}), but is "
                f"{num_real}. Shorten the sequence, or train with a larger `model.max_sequence_length`."
            )
        weight = local_on_sequence(self.weight, self.mesh, self.weight.dtype)
        rows = F.pad(weight[:num_real], (0, 0, 0, num_filled))
        return part_of_sequence(rows, self.mesh, 0).to(self.output_dtype)

    def at(self, places: Tensor) -> Tensor:
        """Return the embeddings of the given positions [B, S], for text that is continued: [B, S, H] (or [B, S/T, H]).

        Positions from P on, which may only be padding, get the last embedding.
        """
        weight = local_on_sequence(self.weight, self.mesh, self.weight.dtype)
        rows = F.embedding(places.clamp(max=self.weight.shape[0] - 1), weight)
        return part_of_sequence(rows, self.mesh, 1).to(self.output_dtype)
