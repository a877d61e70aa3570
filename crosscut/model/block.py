"""One transformer layer, with norms before attention and MLP (paper, section 2.2, Figure 2)."""

import torch
from torch import Tensor, nn

from crosscut.config import ModelConfig
from crosscut.kernels.functions import Call, call
from crosscut.model.attention import SelfAttention
from crosscut.model.cache import LayerCache
from crosscut.model.mlp import make_mlp
from crosscut.model.rotary import Rotation
from crosscut.model.running import PLAIN, Runner
from crosscut.parallel import Dropout, LayerNorm, ParallelMesh, RandomStreams, RMSNorm


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [B, S, H] to the same.

    The `runner` calls the layer and functions inside it; the plain runner does nothing else.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        mesh: ParallelMesh,
        streams: RandomStreams,
        dtype: torch.dtype,
        runner: Runner = PLAIN,
    ) -> None:
        super().__init__()
        self.runner = runner
        self.attention_norm = make_norm(config, mesh=mesh, dtype=dtype, call=runner.cheap)
        self.attention = SelfAttention(config, mesh=mesh, streams=streams, dtype=dtype, runner=runner)
        self.mlp_norm = make_norm(config, mesh=mesh, dtype=dtype, call=runner.cheap)
        self.mlp = make_mlp(config, mesh=mesh, dtype=dtype, runner=runner)
        self.dropout = Dropout(config.dropout, streams=streams)

    def forward(self, x: Tensor, rotation: Rotation | None = None, cache: LayerCache | None = None) -> Tensor:
        """Apply the layer; how far queries and keys turn and what was read before only attention needs to know."""
        return self.runner.layer(self._forward, x, rotation, cache)

    def _forward(self, x: Tensor, rotation: Rotation | None, cache: LayerCache | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation, cache))
        y: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return y


def make_norm(config: ModelConfig, *, mesh: ParallelMesh, dtype: torch.dtype, call: Call = call) -> LayerNorm | RMSNorm:
    """The norm of the residual stream that `model.norm` names; `call` calls its computation."""
    kind = RMSNorm if config.norm == "rms" else LayerNorm
    return kind(config.hidden_size, mesh=mesh, epsilon=config.norm_epsilon, dtype=dtype, call=call)
