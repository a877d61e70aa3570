"""Embeddings: tokens cut along the vocabulary, positions whole on every rank.

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
    """An embedding's weight [V/T, H] for its second use, the product that gives logits; to be used once.

    A plain object: sharding takes tensors that a module returns, also in tuples and dataclasses, for activations.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class VocabParallelEmbedding(nn.Module):
    """E = [E_1, E_2]: each rank holds the rows of its part of the vocabulary and looks up only these; g adds up.

    Input [B, S] of token ids below `vocab_size`, output [B, S, H] in `output_dtype` (under sequence parallelism
    [B, S/T, H]). Parameter: `weight` [V, H] as Shard(0); zeros until initialised.

    Forward: all-reduce of the output (sequence parallelism: reduce-scatter). Backward: nothing is sent (sequence
    parallelism: all-gather). Source: paper, section 3. Raises `RuntimeError` on an id that is not below `vocab_size`
    (on CUDA when the device gets there).
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
        """Look up: [B, S] to [B, S, H] (or [B, S/T, H]).

        `with_weight` gives the weight too, for its second use. The gradients of both uses are then added up in one
        tensor, in place of two and their sum (`kernels.look_up`).
        """
        torch._assert_async(
            ((tokens >= 0) & (tokens < self.vocab_size)).all(),
            f"Token ids must be from 0 to {self.vocab_size - 1}, the last of the vocabulary, but one is not. Tokenize "
            "with this model's tokenizer.",
        )
        index, elsewhere = self._own_index(tokens)
        weight = local(self.weight, self.weight.dtype)
        rows, again = look_up(weight, index) if with_weight else (F.embedding(index, weight), weight)
        rows = rows.to(self.output_dtype).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        hidden = leave_tensor_parallel(rows, self.mesh)
        return (hidden, TiedWeight(again)) if with_weight else hidden

    def _own_index(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's row on this rank, and whether it is elsewhere: then any row, not one for all of these."""
        elsewhere = (tokens < self.first) | (tokens >= self.first + self.local_size)
        return tokens.remainder(self.local_size), elsewhere  # parts begin at multiples of their size


class VocabParallelOutput(nn.Module):
    """The rows that logits are products with, where they are not the embedding's: cut along the vocabulary as those.

    Parameter: `weight` [V, H] as Shard(0); zeros until initialised. `vocab_parallel_cross_entropy` multiplies by it.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, mesh: ParallelMesh, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.products = ORDINARY  # of scores; the loss has its own
        shape = (padded_vocab_size(vocab_size, mesh.tensor.size), hidden_size)
        self.weight = sharded_parameter(shape, mesh.tensor, dim=0, dtype=dtype, device=mesh.parameter_device)


class PositionEmbedding(nn.Module):
    """Learned positions, added between the parallel regions.

    Gives [S, H] for a sequence length S (under sequence parallelism this rank's [S/T, H]). Parameter: `weight` [P, H]
    as Replicate, P the longest sequence; zeros until initialised. Sends nothing; under sequence parallelism the
    gradient is partial. Source: paper, section 2.2. Raises `ConfigError` for a longer sequence.
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
        """The embeddings of positions 0 to `length` - 1: [S, H] (or [S/T, H]).

        The last `num_filled` are zeros; they fill up a sequence that is to be split, and may lie beyond P.
        """
        num_real = length - num_filled
        if num_real > self.weight.shape[0]:
            raise ConfigError(
                f"A sequence must be at most as long as the model's positions ({self.weight.shape[0]}), but is "
                f"{num_real}. Shorten it, or train with a larger `model.max_sequence_length`."
            )
        weight = local_on_sequence(self.weight, self.mesh, self.weight.dtype)
        rows = F.pad(weight[:num_real], (0, 0, 0, num_filled))
        return part_of_sequence(rows, self.mesh, 0).to(self.output_dtype)

    def at(self, places: Tensor) -> Tensor:
        """The embeddings of any positions [B, S], to read text that goes on: [B, S, H] (or [B, S/T, H]).

        Those beyond P, which may only fill up a sequence, get the last one.
        """
        weight = local_on_sequence(self.weight, self.mesh, self.weight.dtype)
        rows = F.embedding(places.clamp(max=self.weight.shape[0] - 1), weight)
        return part_of_sequence(rows, self.mesh, 1).to(self.output_dtype)
