"""One transformer layer, with norms before attention and before the feed-forward part (paper, section 2.2, Figure 2),
or after the residual sums, as in the original BERT (Devlin et al. 2018, arXiv 1810.04805).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from crosscut import architecture
from crosscut.config.model import NormPosition
from crosscut.flight import ModelPart
from crosscut.flight.places import enter_part, leave_part
from crosscut.model.attention import SelfAttention
from crosscut.model.building import Builder
from crosscut.model.cache import LayerCache
from crosscut.model.documents import AttentionMask
from crosscut.model.gated_mlp import GatedMLP
from crosscut.model.mlp import MLP
from crosscut.model.rotary import Rotation


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); or, with the norms after the residual sums,
    norm(x + attention(x)), then norm(x + mlp(x)). Maps [B, S, H] to [B, S, H].

    `build` is the builder of the layer's modules. The builder's runner calls the layer and the functions inside the
    layer. The plain runner adds nothing to these calls.
    """

    def __init__(self, part: architecture.Layer, build: Builder) -> None:
        super().__init__()
        self.runner, self.norm_place = build.runner, part.norm_place
        if part.norm_place is NormPosition.AFTER:  # the last norm keeps its input, so the last product is repeated
            build = replace(build, runner=replace(build.runner, skips_last_product=False))
        self.attention_norm = build.stream_norm(part.mixer_norm)
        self.attention = SelfAttention(part.mixer, build)
        self.mlp_norm = build.stream_norm(part.feed_forward_norm)
        self.mlp = MODULES[type(part.feed_forward)](part.feed_forward, build)
        self.dropout = build.dropout(part.dropout)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        cache: LayerCache | None = None,
        mask: AttentionMask | None = None,
    ) -> Tensor:
        """Apply the layer. `rotation` (for queries and keys), `cache` (earlier keys and values) and `mask` (keys that
        each query may see) are passed to attention.
        """
        return self.runner.layer(self._forward, x, rotation, cache, mask)

    def _forward(
        self, x: Tensor, rotation: Rotation | None, cache: LayerCache | None, mask: AttentionMask | None
    ) -> Tensor:
        if self.norm_place is NormPosition.AFTER:
            x = self.attention_norm(x + self.dropout(self._attend(x, rotation, cache, mask)))
            y: Tensor = self.mlp_norm(x + self.dropout(self._feed(x)))
        else:
            x = x + self.dropout(self._attend(self.attention_norm(x), rotation, cache, mask))
            y = x + self.dropout(self._feed(self.mlp_norm(x)))
        return y

    def _attend(
        self, x: Tensor, rotation: Rotation | None, cache: LayerCache | None, mask: AttentionMask | None
    ) -> Tensor:
        """Apply attention, and note in the flight recorder that this part of the layer runs."""
        attended: Tensor
        if self.runner.compiler is not None:  # compiled code records nothing
            attended = self.attention(x, rotation, cache, mask)
            return attended
        enter_part(ModelPart.ATTENTION)
        attended = self.attention(x, rotation, cache, mask)
        return leave_part(attended, ModelPart.ATTENTION)

    def _feed(self, x: Tensor) -> Tensor:
        """Apply the feed-forward part, and note in the flight recorder that this part of the layer runs."""
        fed: Tensor
        if self.runner.compiler is not None:
            fed = self.mlp(x)
            return fed
        enter_part(ModelPart.MLP)
        fed = self.mlp(x)
        return leave_part(fed, ModelPart.MLP)


MODULES: dict[type, Callable[[Any, Builder], nn.Module]] = {
    architecture.MLP: MLP,
    architecture.GatedMLP: GatedMLP,
}
"""Module class of each kind of feed-forward part, by the class that describes this part in `architecture`."""
