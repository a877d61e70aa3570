"""What is planned to be sent is what the program sends, message by message, on every layout that `verify` proves."""

from collections import Counter

import pytest

from crosscut.config import RunConfig
from crosscut.config.training import RECOMPUTATIONS
from crosscut.planner import step_traffic
from crosscut.rehearsal import rehearse
from tests.verification.test_combinations import ALLOWED, run_of

# What is offloaded is sent to nobody.
RUNS = [run_of(values) for values in ALLOWED if not values["offload"]]


def check(run: RunConfig) -> None:
    planned: Counter[tuple[str, str, int, int]] = Counter()
    for c in step_traffic(run, compiled=False):
        planned[(c.operation, c.axis, c.elements, c.element_bytes)] += c.count
    rehearsal = rehearse(run, device="cpu")
    sizes = zip(rehearsal.sent, rehearsal.element_bytes, strict=True)
    assert Counter((*sent, element_bytes) for sent, element_bytes in sizes) == planned, run.layout


@pytest.mark.slow
@pytest.mark.parametrize("recompute", RECOMPUTATIONS)
def test_recorded_messages_are_the_planned_ones(recompute: str) -> None:
    for run in RUNS:
        if run.training.recompute == recompute:
            check(run)
