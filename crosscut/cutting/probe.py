"""Search for a plan, and its proof."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from crosscut.config import ConfigError
from crosscut.cutting.finding.playback import Draw, draw, find_matrices
from crosscut.cutting.finding.rules import Finding
from crosscut.cutting.finding.search import Search
from crosscut.cutting.finding.wires import find_wires
from crosscut.cutting.plan import Plan
from crosscut.verification.foreign.wide import to_float64

NUM_DRAWS = 3


def find_plan(module: nn.Module, inputs: Mapping[str, Any], tensor: Sequence[int] = (2, 4)) -> Plan:
    """Find how a module can be cut, without proof."""
    was_training = {each: each.training for each in module.modules()}
    module.double().eval()
    try:
        subject = find_matrices(module, to_float64(inputs))
        draws = [draw(subject, seed) for seed in range(NUM_DRAWS)]
        _require_alike(draws)
        wires = find_wires(draws[0])
        finding = Finding(subject, wires, Search(draws, tuple(tensor), wires.sources))
        finding.find_cuts(draws[0].run.calls)
        finding.add_single()
        return finding.plan()
    finally:
        for each, mode in was_training.items():
            each.training = mode


def _require_alike(draws: Sequence[Draw]) -> None:
    for each in draws:
        if each.run.failure is not None:
            raise ConfigError(str(each.run.failure))
        if each.run.calls != draws[0].run.calls:
            raise ConfigError("calls differ")
