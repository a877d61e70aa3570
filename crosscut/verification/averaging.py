"""Check that the moving average of the weights follows its formula on every rank (`optimizer.ema_decay`).

This module computes the formula again, without the code that updates the average during training. `comparison` compares
the cut average with the uncut average and finds differences between layouts. This check finds errors that the cut and
the uncut average have in common.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from crosscut.parallel.state.parameters import local_part
from crosscut.verification.comparison import check_of_largest, relative_difference
from crosscut.verification.report import AVERAGE, ReportCheck

_ROUNDINGS = 16
"""Allowed difference from the formula, as a multiple of the machine epsilon of the parameters' type. Each element takes
two products and a sum."""


def parts_of(model: nn.Module) -> dict[str, Tensor]:
    """Copy this rank's own part of each parameter."""
    with torch.no_grad():
        return {name: local_part(parameter).clone() for name, parameter in model.named_parameters()}


def compare_average(
    average: Mapping[str, Tensor], *, before: Mapping[str, Tensor], after: Mapping[str, Tensor], decay: float
) -> list[ReportCheck]:
    """Check the average after step 0. `before` and `after` are this rank's parts of the parameters before and after the
    step (`parts_of`), and `decay` is `optimizer.ema_decay`. Every rank must call this function. The list has one check
    on the first rank and is empty on the others.
    """
    first = min(decay, 1 / 10)  # the decay of step 0, with its warm-up
    found = {}
    for name, tensor in average.items():
        expected = first * before[name].double() + (1 - first) * after[name].double()
        found[name] = relative_difference(local_part(tensor).double(), expected)
    allowed = _ROUNDINGS * torch.finfo(next(iter(after.values())).dtype).eps
    return check_of_largest(AVERAGE, found, allowed, f"decay {first:g} in the first step")
