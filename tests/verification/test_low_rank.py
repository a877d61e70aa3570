"""Gradients in low rank are those of the uncut model, which sums them in low rank, too."""

import pytest

from crosscut.config import Layout
from tests.verification.runs import LLAMA, proven

EXPERTS = {"layers": ("attention experts",), "experts": {"number": 4, "per_token": 2, "size": 64}, "dropout": 0.0}
CASES = [
    (Layout(tensor=2, data=2, sequence_parallel=True), {}),
    (Layout(data=2), {"training": {"micro_batch_size": 1}}),
    (Layout(tensor=4), {**LLAMA, "num_kv_heads": 2}),  # two ranks share a head of keys and values
    (Layout(context=2, data=2), {}),
    (Layout(pipeline=2, data=2), {}),
    (Layout(pipeline=2, tensor=2, schedule="zero_bubble"), {"tied": False}),
    (Layout(data=4, expert=2), EXPERTS),
    (Layout(data=2, expert=2, tensor=2), EXPERTS),
]


@pytest.mark.one_in(len(CASES))
@pytest.mark.parametrize(("layout", "options"), CASES)
def test_step_in_low_rank_is_proven(ranks, layout, options):
    proven(ranks, layout, optimizer={"gradient_rank": 1}, **options)


@pytest.mark.slow  # another type than in the test above
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_step_in_low_rank_is_proven_in_other_types(ranks, precision):
    proven(ranks, Layout(tensor=2, data=2), precision, optimizer={"gradient_rank": 2})
