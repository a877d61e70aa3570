"""Embedding layers. Token embeddings are cut along the vocabulary; embeddings of positions and of token types are
replicated.

Shapes: B batch, S sequence, H hidden, V vocabulary padded to a multiple of 128 x T and of `padded_to`, T tensor ranks.
"""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import ConfigError, padded_vocab_size
from crosscut.config.conventions import VOCABULARY_MULTIPLE
from crosscut.kernels.look_up import look_up
from crosscut.kernels.products import ORDINARY
from crosscut.parallel.mesh import ParallelMesh
from crosscut.parallel.operators import leave_tensor_parallel, part_of_sequence
from crosscut.parallel.state.parameters import ParameterMaker, local, local_on_sequence


@final
class TiedWeight:
    """Token embedding weight [V/T, H] that the output projection also uses. Only one matrix product may use this
    weight.

    The weight is wrapped in this class to hide it from `fully_shard`, which would treat a tensor in a module's output
    as an activation, even inside a tuple or a dataclass.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class VocabParallelEmbedding(nn.Module):
    """Token embedding that is cut along the vocabulary, E = [E_1, E_2]. Each rank holds some rows of E, looks up the
    tokens that belong to these rows, and writes zeros for all other tokens. The operator g (`leave_tensor_parallel`)
    then sums the results of all ranks.

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
        padded_to: int = VOCABULARY_MULTIPLE,
    ) -> None:
        super().__init__()
        self.mesh, self.output_dtype = mesh, output_dtype or dtype
        self.vocab_size = vocab_size
        padded = padded_vocab_size(vocab_size, mesh.tensor.size, padded_to)
        self.weight = ParameterMaker(mesh, dtype).sharded(padded, hidden_size, dim=0)
        self.local_size = padded // mesh.tensor.size
        self.first = mesh.tensor.rank * self.local_size

    def forward(self, tokens: Tensor, *, with_weight: bool = False) -> Tensor | tuple[Tensor, TiedWeight]:
        """Look up `tokens` [B, S]: [B, S, H], or [B, S/T, H] under sequence parallelism.

        With `with_weight`, also return the weight, for the product that computes the logits. The gradients of the
        weight from both uses are then accumulated in one tensor, which saves memory (`kernels.look_up`).
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
        """Return each token's row in this rank's weight, and whether another rank holds the token instead. In the
        latter case, the row is arbitrary. Such rows are spread over the weight, so that these tokens do not all read
        the same row.
        """
        elsewhere = (tokens < self.first) | (tokens >= self.first + self.local_size)
        return tokens.remainder(self.local_size), elsewhere  # each rank's first id is a multiple of `local_size`


class VocabParallelOutput(nn.Module):
    """Weight of the output projection, for a model whose output projection does not share the weight of the token
    embedding. The weight is cut along the vocabulary, like the token embedding.

    Parameter: `weight` [V, H] as Shard(0); zeros until initialised. `vocab_parallel_cross_entropy` multiplies by this
    weight to compute the logits.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        mesh: ParallelMesh,
        dtype: torch.dtype = torch.float32,
        padded_to: int = VOCABULARY_MULTIPLE,
    ) -> None:
        super().__init__()
        self.products = ORDINARY  # for scores; the loss calls its own products
        num_rows = padded_vocab_size(vocab_size, mesh.tensor.size, padded_to)
        self.weight = ParameterMaker(mesh, dtype).sharded(num_rows, hidden_size, dim=0)


class _ReplicatedEmbedding(nn.Module):
    """Embedding with `num_rows` rows that every tensor rank holds, used outside the parallel regions."""

    def __init__(
        self,
        num_rows: int,
        hidden_size: int,
        *,
        mesh: ParallelMesh,
        dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.mesh, self.output_dtype = mesh, output_dtype or dtype
        self.weight = ParameterMaker(mesh, dtype).replicated(num_rows, hidden_size)

    def _own_weight(self) -> Tensor:
        return local_on_sequence(self.weight, self.mesh, self.weight.dtype)


class PositionEmbedding(_ReplicatedEmbedding):
    """Learned position embeddings, used outside the parallel regions.

    For a sequence of length S, the output is [S, H], or this rank's [S/T, H] under sequence parallelism. Parameter:
    `weight` [P, H] as Replicate, where P is the length of the longest sequence; zeros until initialised. Sends nothing.
    Under sequence parallelism, each rank's gradient is partial. Source: paper, section 2.2. Raises `ConfigError` if S,
    not counting padding, is larger than P.
    """

    def forward(self, length: int, *, num_filled: int = 0, places: Tensor | None = None) -> Tensor:
        """Return the embeddings of positions 0 to `length` - 1: [S, H], or [S/T, H] under sequence parallelism. If
        context ranks share a sequence, `places` [S] are the positions of this rank's tokens.

        The last `num_filled` positions are padding, which makes the sequence divisible by the number of ranks. Padding
        positions may exceed P, and their embeddings are zeros.
        """
        num_real = length - num_filled
        if num_real > self.weight.shape[0]:
            raise ConfigError(
                f"A sequence must have at most {self.weight.shape[0]} tokens, one for each position of the model, but "
                f"has {num_real}. Shorten the sequence, or train with a larger `model.max_sequence_length`."
            )
        if places is not None:
            return self.at(places)
        rows = F.pad(self._own_weight()[:num_real], (0, 0, 0, num_filled))
        return part_of_sequence(rows, self.mesh, 0).to(self.output_dtype)

    def at(self, places: Tensor) -> Tensor:
        """Return the embeddings of the positions `places` [B, S]: [B, S, H], or [B, S/T, H] under sequence parallelism.
        If all sequences have the same positions, `places` may be [S]; the result then has no dimension B.

        Use this method in generation, or if positions restart at each document. Positions of P or more must be padding,
        and get the embedding of position P - 1.
        """
        own = part_of_sequence(places, self.mesh, places.dim() - 1)
        return F.embedding(own.clamp(max=self.weight.shape[0] - 1), self._own_weight()).to(self.output_dtype)


class TokenTypeEmbedding(_ReplicatedEmbedding):
    """Learned embeddings of token types, used outside the parallel regions.

    Input: types [B, S] below the number of types, the same on all tensor ranks. Output: [B, S, H], or [B, S/T, H] under
    sequence parallelism. Parameter: `weight` [number of types, H] as Replicate; zeros until initialised. Sends nothing.
    Under sequence parallelism, each rank's gradient is partial. Source: Devlin et al. 2018, arXiv 1810.04805, Figure 2.
    Raises `RuntimeError` if a type is not below the number of types (on CUDA, when the device reaches the check).
    """

    def forward(self, types: Tensor) -> Tensor:
        """Look up the embeddings of `types` [B, S]: [B, S, H], or [B, S/T, H] under sequence parallelism."""
        num_types = self.weight.shape[0]
        torch._assert_async(
            ((types >= 0) & (types < num_types)).all(),
            f"Token types must be from 0 to {num_types - 1}, the last type of the model, but a type is outside "
            "this range. Number the segments of a sequence from 0.",
        )
        return F.embedding(part_of_sequence(types, self.mesh, 1), self._own_weight()).to(self.output_dtype)
