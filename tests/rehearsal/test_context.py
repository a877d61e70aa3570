"""Dry runs of a rank that shares each sequence with other ranks send and hold what is planned."""

import pytest

from crosscut.rehearsal import rehearse
from tests.rehearsal.cases import LLAMA, check_formulas, small

UNDROPPED = {"dropout": 0.0}
EXCHANGED = {"context": 2, "context_attention": "all_to_all"}

CASES = (
    small(
        "exchanged documents, shared, layers again",
        "cuda",
        {**EXCHANGED, "data": 2, "sharding": "zero3"},
        {"document_mask": True, "recompute": "full"},
        LLAMA,
    ),
    small(
        "exchanged, split",
        "cuda",
        {**EXCHANGED, "tensor": 2, "sequence_parallel": True},
        {"precision": "bfloat16"},
        LLAMA,
    ),
    small("gathered", "cpu", {"context": 4, "context_attention": "gather"}, {}, UNDROPPED),
    small("ring", "cpu", {"context": 4, "context_attention": "ring"}, {}, UNDROPPED),
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_formulas_and_dry_run_agree(case):
    """The formulas count all pairs of a query and a key, also those that the ring skips."""
    rehearsal = rehearse(case.run, device=case.device)
    assert any(figure.planned for figure in check_formulas(rehearsal, flops=0.2 if case.name == "ring" else 0.05))
