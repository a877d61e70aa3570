"""A loss scale that follows overflows (Micikevicius et al. 2018, section 3.2), for gradients that pass through float16.

float16 loses what is smaller than 6e-8 and ends at 65,504. The loss is multiplied by a scale before the backward pass,
so that small gradients survive it, and the float32 gradients are divided by it after. Where the scale was too high they
are no numbers: that step is skipped, and the scale halved. After enough good steps in a row it is doubled.

The scale is a power of two, so multiplying by it rounds nothing, and it stays on the device: nobody waits for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from crosscut.parallel.state.parameters import local_part

FIRST = 2.0**16
GROWTH_INTERVAL = 2000
"""Steps in a row without an overflow after which the scale is doubled. As in PyTorch's `GradScaler`, as is `FIRST`."""
SMALLEST = 1.0
"""Smallest useful scale: a lower one only makes small gradients smaller, and an overflow has another cause."""


class LossScale:
    """The scale of one run, the same on every rank: all see the same overflow, in the norm of all gradients.

    Use in a step: `scaled` before the backward pass, `unscale_` after it, `update` after the optimizer's step.
    """

    def __init__(self, device: torch.device, first: float = FIRST) -> None:
        self.scale = torch.full((), first, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        """Steps without an overflow since the last overflow or growth."""

    def scaled(self, factor: Tensor) -> Tensor:
        """Factor to multiply the loss by: `factor`, which applies without a scale, times the scale."""
        return factor * self.scale

    def unscaled(self, loss: Tensor) -> Tensor:
        """The scaled loss divided by the scale."""
        return loss / self.scale

    @torch.no_grad()
    def unscale_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divide the gradients, float32 by now, by the scale."""
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / self.scale)

    def update(self, overflow: Tensor) -> None:
        """Halve the scale where `overflow`, a float32 scalar, is 1; where it is 0 count a good step.

        The state of a run is copied between its optimizer's steps, so this comes after the optimizer's.
        """
        torch._amp_update_scale_(self.scale, self.good_steps, overflow, 2.0, 0.5, GROWTH_INTERVAL)

    @property
    def exhausted(self) -> Tensor:
        """Whether the scale has fallen below `SMALLEST`: a scalar on the device."""
        return self.scale < SMALLEST

    def state(self) -> dict[str, Tensor]:
        """State of the loss scale in a checkpoint: the tensors themselves."""
        return {"scale": self.scale, "good_steps": self.good_steps}
