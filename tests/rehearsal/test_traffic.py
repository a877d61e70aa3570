"""The planner's messages are the messages that the program sends, one by one, on the layouts that `verify` proves."""

import pytest

from crosscut.config.training import Recompute
from crosscut.rehearsal import rehearse
from tests.rehearsal.cases import planned_messages, sent_messages
from tests.rehearsal.showing import check_shown
from tests.verification.test_combinations import ALLOWED, PLAIN, Values, run_of

PRECISIONS = ("float32", "bfloat16", "float8")
"""The others send as the first two do, in other bytes."""


def is_rehearsed(values: Values) -> bool:
    """Whether a combination's messages are not another's: what is dropped or offloaded is sent to nobody, and a dry run
    compiles nothing.
    """
    is_like_another = values["dropout"] or values["offload"] or values["symmetric_memory"] or values["compile"] == "on"
    return values["precision"] in PRECISIONS and not is_like_another


EVERY = 5
"""One of so many combinations is rehearsed. All triples of values still occur, as 5 divides no number of values."""
RUNS = [run_of(values) for values in [*filter(is_rehearsed, ALLOWED)][::EVERY] + [v for v in ALLOWED if v in PLAIN]]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", Recompute)
def test_recorded_messages_are_the_planned_ones(recompute):
    for run in RUNS:
        if run.training.recompute == recompute:
            rehearsal = rehearse(run, device="cpu")
            assert sent_messages(rehearsal) == planned_messages(run), run.layout
            if run.layout.num_stages == 1:
                check_shown(rehearsal)
