"""Loads of experts under which a layout is verified: as the router chooses, uneven, and all tokens to the same experts.

A new router spreads tokens almost evenly, so bugs with empty groups, or with groups of different sizes on different
ranks, would stay hidden. The other two routings add a number to each expert's score for the choice, the same in the cut
and in the uncut model.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from crosscut.architecture import describe
from crosscut.architecture.sublayers.experts import LOAD
from crosscut.config import RunConfig
from crosscut.config.checks import Choice
from crosscut.config.parts.experts import ExpertsConfig
from crosscut.model.sublayers.experts import Experts
from crosscut.verification.report import LOADS, ReportCheck

ROUTINGS = "routings"
"""Name of the check that lists the routings that were verified."""

_FAR = 8.0
"""Number that is larger than every difference of two scores, which are between 0 and 1, and of their biases."""


class Forced(Choice):
    """Loads of experts in a verified step."""

    AS_CHOSEN = "as the router chooses"
    UNEVEN = "uneven, with experts without tokens"
    COLLAPSED = "all tokens to the same experts"


def has_experts(run: RunConfig) -> bool:
    """Whether layers of the run's model count the loads of experts."""
    return any(name == LOAD for _, _, name in describe(run.model).layer_figures)


def force(model: nn.Module, forced: Forced) -> None:
    """Make all mixtures of a model choose experts with these loads."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.router.offset = offset_of(module.sizes, forced)


def offset_of(sizes: ExpertsConfig, forced: Forced) -> Tensor | None:
    """Return the numbers [E] to add to the scores. `UNEVEN` sends every token to the first expert, and none to the last
    half of the experts, or as many as can be spared. `COLLAPSED` sends every token to the first experts.
    """
    offset = torch.zeros(sizes.number)
    if forced is Forced.AS_CHOSEN:
        return None
    if forced is Forced.COLLAPSED:
        offset[: sizes.per_token] = _FAR
    else:
        offset[0] = _FAR
        offset[max(-(-sizes.number // 2), sizes.per_token) :] = -_FAR
    return offset


def compare_loads(loads: Iterable[Tensor], expected: int) -> list[ReportCheck]:
    """Check that each layer counted every row once: the loads [E] of all experts add up to the number of tokens of the
    step times the experts of a token. At least one layer must have counted.
    """
    found = [int(load.sum()) for load in loads]
    wrong = next((total for total in found if total != expected), None)
    told = f"{expected:,} rows in each of {len(found)} layers" if found else "no layer counted its experts' rows"
    if wrong is not None:
        told = f"the experts of a layer have {wrong:,} rows in all, but its tokens have {expected:,}"
    return [ReportCheck(LOADS, None, bool(found) and wrong is None, told)]
