"""Dynamic loss scale for gradients in float16 (Micikevicius et al. 2018, section 3.2).

float16 loses values below 6e-8 and overflows above 65,504. The loss is multiplied by a scale before the backward pass,
so that small gradients do not underflow, and the float32 gradients are divided by the scale afterwards. If the scale
was too high, the gradients overflow to infinity or NaN: the step is skipped and the scale is halved. After
`GROWTH_INTERVAL` good steps in a row, the scale is doubled.

The scale is a power of two, so multiplying by it causes no rounding. The scale stays on the device, so the host never
waits for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from crosscut.config import CheckpointError
from crosscut.parallel.state.parameters import local_part

FIRST = 2.0**16
"""Scale at the first step, as in PyTorch's `GradScaler`."""
GROWTH_INTERVAL = 2000
"""Number of steps in a row without overflow after which the scale is doubled, as in PyTorch's `GradScaler`."""
SMALLEST = 1.0
"""Smallest useful scale. If gradients overflow at a lower scale, the scale is not the cause."""


class LossScale:
    """Loss scale of one run. All ranks have the same scale, because all ranks agree on an overflow (`Trainer.update`).

    Call `scaled` before the backward pass, `unscale_` after the backward pass, and `update` after the optimizer's step.
    """

    def __init__(self, device: torch.device, first: float = FIRST) -> None:
        self.scale = torch.full((), first, dtype=torch.float32, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        """Number of steps since the last overflow or the last increase of the scale. An int32 scalar on the device."""

    def scaled(self, factor: Tensor) -> Tensor:
        """Return `factor` times the loss scale. Multiply the loss by this product instead of by `factor`."""
        return factor * self.scale

    def unscaled(self, loss: Tensor) -> Tensor:
        """Divide the scaled loss by the scale."""
        return loss / self.scale

    @torch.no_grad()
    def unscale_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place. The gradients must be float32."""
        gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / self.scale)

    def update(self, overflow: Tensor) -> None:
        """Halve the scale if `overflow` (a float32 scalar) is 1. If `overflow` is 0, count a good step, and double the
        scale after `GROWTH_INTERVAL` good steps in a row.

        Call this method after the optimizer's step. Before this step, a checkpoint may still be copying the scale.
        """
        torch._amp_update_scale_(self.scale, self.good_steps, overflow, 2.0, 0.5, GROWTH_INTERVAL)

    @property
    def exhausted(self) -> Tensor:
        """Whether the scale has fallen below `SMALLEST`: a bool scalar on the device."""
        return self.scale < SMALLEST

    def state(self) -> dict[str, Tensor]:
        """State of the loss scale for a checkpoint. The tensors are live, not copied."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def require_usable(self, checkpoint: object) -> None:
        """Raise `CheckpointError` unless the scale that was loaded from `checkpoint` is a positive, finite number. With
        NaN or infinity, every step would be skipped, and the scale would never fall. All ranks have the same scale.
        """
        scale, good_steps = self.scale.item(), self.good_steps.item()
        if not 0 < scale < float("inf") or good_steps < 0:
            raise CheckpointError(
                f"`{checkpoint}` must hold a loss scale that is a positive number, and a number of good steps that is "
                f"at least 0, but holds {scale} and {good_steps}. Use an earlier checkpoint."
            )
