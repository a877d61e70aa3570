"""One transformer layer: parts with a norm and a residual sum each (paper, section 2.2, Figure 2). The norms are before
the sublayers, after the residual sums, as in the original BERT (Devlin et al. 2018, arXiv 1810.04805), or on the
outputs of the sublayers, as in OLMo 2 (Walsh et al. 2024, arXiv 2501.00656).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from crosscut import architecture
from crosscut.architecture.sublayers.attention import Attention
from crosscut.architecture.sublayers.experts import Experts as ExpertsPart
from crosscut.architecture.sublayers.gated_delta import GatedDelta as GatedDeltaPart
from crosscut.architecture.sublayers.latent_attention import LatentAttention as LatentPart
from crosscut.architecture.sublayers.mamba import Mamba as MambaPart
from crosscut.architecture.sublayers.mamba2 import Mamba2 as Mamba2Part
from crosscut.config.model import NormPosition
from crosscut.flight.places import enter_part, leave_part
from crosscut.model.building import Builder
from crosscut.model.cache import LayerMemory
from crosscut.model.shared import NOTHING_SHARED, Shared
from crosscut.model.sublayers.attention import SelfAttention
from crosscut.model.sublayers.experts import Experts
from crosscut.model.sublayers.gated_delta import GatedDelta
from crosscut.model.sublayers.gated_mlp import GatedMLP
from crosscut.model.sublayers.latent_attention import LatentAttention
from crosscut.model.sublayers.mamba import Mamba
from crosscut.model.sublayers.mamba2 import Mamba2
from crosscut.model.sublayers.mlp import MLP
from crosscut.model.sums import Sums, joined


class Block(nn.Module):
    """One layer: for each of its parts, x + part(norm(x)); with the norms after the residual sums, norm(x + part(x));
    or, with the norms on the outputs, x + norm(part(x)). Maps [B, S, H] to [B, S, H].

    `build` is the builder of the layer's modules. The builder's runner calls the layer and the functions inside the
    layer. The plain runner adds nothing to these calls.

    Some sublayers return `Sums` beside their results. The layer returns those of all its parts.
    """

    def __init__(self, layer: architecture.Layer, build: Builder) -> None:
        super().__init__()
        self.runner = build.runner
        self.parts = [(part.name, f"{part.name}_norm", part.norm_place) for part in layer.parts]
        """Name of each part and of its norm, and the place of the norm."""
        self.summing = frozenset(layer.summing)
        """Names of the parts that return sums beside their results."""
        for part in layer.parts:
            is_last = part is layer.parts[-1] and part.norm_place is NormPosition.BEFORE
            of_part = build if is_last else replace(build, runner=replace(build.runner, skips_last_product=False))
            self.add_module(f"{part.name}_norm", build.stream_norm(part.norm))
            self.add_module(part.name, MODULES[type(part.inner)](part.inner, of_part))
        self.dropout = build.dropout(layer.parts[0].dropout)
        self.multiplier = layer.parts[0].multiplier

    def forward(
        self, x: Tensor, shared: Shared = NOTHING_SHARED, memory: LayerMemory | None = None
    ) -> tuple[Tensor, Sums]:
        """Apply the layer. `shared` holds tensors that all layers read, and `memory` what the layer remembers of
        earlier tokens. Return the residual stream, and the sums of the parts.
        """
        return self.runner.layer(self._forward, x, shared, memory)

    def _forward(self, x: Tensor, shared: Shared, memory: LayerMemory | None) -> tuple[Tensor, Sums]:
        sums: dict[str, Sums] = {}
        for name, norm_name, place in self.parts:
            norm = getattr(self, norm_name)
            y = self._run(name, norm(x) if place is NormPosition.BEFORE else x, shared, memory, sums)
            y = self.dropout(norm(y) if place is NormPosition.OUTPUT else y)
            x = self.runner.kept(self._add, x, y)
            x = norm(x) if place is NormPosition.AFTER else x
        return x, joined(sums)

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, y, alpha=self.multiplier)

    def _run(self, name: str, x: Tensor, shared: Shared, memory: LayerMemory | None, sums: dict[str, Sums]) -> Tensor:
        """Run the sublayer of a part, note in the flight recorder that it runs, and put its sums, if it returns any,
        into `sums`.
        """
        part: nn.Module = getattr(self, name)
        of_part = None if memory is None else memory[name]
        records = self.runner.compiler is None  # compiled code records nothing
        if records:
            enter_part(name)
        y = part(x, shared, of_part)
        if name in self.summing:
            y, sums[name] = y
        return leave_part(y, name) if records else y


MODULES: dict[type, Callable[[Any, Builder], nn.Module]] = {
    Attention: SelfAttention,
    MambaPart: Mamba,
    Mamba2Part: Mamba2,
    GatedDeltaPart: GatedDelta,
    LatentPart: LatentAttention,
    architecture.MLP: MLP,
    architecture.GatedMLP: GatedMLP,
    ExpertsPart: Experts,
}
"""Module class of each kind of sublayer, by the class that describes it in `architecture`."""
