"""GPT-2 as in the paper's section 2.2: learned positions, pre-layer-norm blocks, a final layer norm, tied embeddings.

Nothing here asks for the layout: on one device the layers of `parallel` are ordinary layers.

Shapes: B batch, S sequence, H hidden, V vocabulary, T tensor ranks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import ModelConfig
from crosscut.model.block import Block
from crosscut.parallel import (
    Dropout,
    LayerNorm,
    LossPasses,
    ParallelMesh,
    PositionEmbedding,
    RandomStreams,
    VocabParallelEmbedding,
    enter_tensor_parallel,
    gather_from_tensor_parallel,
    vocab_parallel_cross_entropy,
)
from crosscut.parallel.parameters import local


class GPT(nn.Module):
    """The model, its weights zero until `initialize` or a checkpoint fills them.

    Parameters are kept in `dtype`; activations and products are in `compute_dtype` (the same by default).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        mesh: ParallelMesh,
        streams: RandomStreams,
        dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        self.loss_passes: LossPasses | None = None
        """What goes over the logits, where it is compiled."""
        embedding_dtype = {"dtype": dtype, "output_dtype": compute_dtype or dtype}
        self.tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, mesh=mesh, **embedding_dtype)
        self.positions = PositionEmbedding(config.max_sequence_length, config.hidden_size, mesh=mesh, **embedding_dtype)
        self.dropout = Dropout(config.dropout, streams=streams)
        self.blocks = nn.ModuleList(
            Block(config, mesh=mesh, streams=streams, dtype=dtype) for _ in range(config.num_layers)
        )
        self.final_norm = LayerNorm(config.hidden_size, mesh=mesh, dtype=dtype)

    @property
    def padded_rows(self) -> dict[str, int]:
        """Real rows of the parameters that are padded, by name, for loading a checkpoint of another layout."""
        return {"tokens.weight": self.config.vocab_size}

    def forward(self, tokens: Tensor, *, num_filled: int = 0) -> Tensor:
        """Token ids [B, S] to the last hidden states [B, S, H] (the sequence split where the layout splits it).

        The last `num_filled` tokens of each sequence only fill it up to a length that can be split.
        """
        x = self.dropout(self.tokens(tokens) + self.positions(tokens.shape[1], num_filled=num_filled))
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.final_norm(x)
        return y

    def loss(self, tokens: Tensor, targets: Tensor, *, scale: float | Tensor = 1.0) -> Tensor:
        """`scale` times the sum of the cross entropies of `targets` [B, S] given `tokens` [B, S]; a scalar.

        To train on a mean, divide by the number of targets over all data ranks: `scale = 1 / count`, a number or a
        scalar tensor on the device.
        """
        hidden = enter_tensor_parallel(self(tokens), self.mesh).flatten(0, 1)
        return vocab_parallel_cross_entropy(
            hidden,
            local(self.tokens.weight, self.tokens.weight.dtype),
            targets.flatten(),
            vocab_size=self.config.vocab_size,
            axis=self.mesh.tensor,
            scale=scale,
            passes=self.loss_passes,
        )

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores of the next token after the last position of `tokens` [B, S]: [B, V], the same on all ranks.

        Where the layout splits the sequence, any length will do: it is filled up after the last position, which does
        not see what comes later.
        """
        length = tokens.shape[1]
        num_filled = -length % self.mesh.tensor.size if self.mesh.sequence_parallel else 0
        hidden = self(F.pad(tokens, (0, num_filled)), num_filled=num_filled)
        last = enter_tensor_parallel(hidden, self.mesh)[:, length - 1]
        columns = last @ local(self.tokens.weight, last.dtype).t()
        return gather_from_tensor_parallel(columns, self.mesh.tensor)[:, : self.config.vocab_size]
