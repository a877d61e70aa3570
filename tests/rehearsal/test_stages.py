"""Dry runs of pipeline stages: what each stage holds, computes and sends is what the planner counts for it."""

from typing import Any

import pytest

from crosscut.rehearsal import compare, rehearse
from tests.rehearsal.cases import (
    DEEPSEEK,
    EXPERT_RANKS,
    LLAMA,
    MUON,
    Case,
    check_formulas,
    planned_messages,
    sent_messages,
    small,
)
from tests.rehearsal.showing import check_shown_of_stages

MODEL = {"num_layers": 4, "hidden_size": 256, "vocab_size": 4096, "max_sequence_length": 256}


def staged(
    name: str,
    layout: dict[str, Any],
    training: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **more,
) -> Case:
    own = {"sequence_length": 192, "batch_size": 4 * layout.get("data", 1), "micro_batch_size": 1, **(training or {})}
    own.setdefault("precision", "bfloat16")
    return small(name, "cuda", layout, own, {**MODEL, **(model or {})}, **more)


FOUR_OF_EXPERTS = {**DEEPSEEK, "num_layers": 4}
INTERLEAVED, ZERO_BUBBLE = {"stages_per_rank": 2}, {"schedule": "zero_bubble"}
CASES = [
    staged("split, zero bubble", {"pipeline": 2, "tensor": 2, "sequence_parallel": True, **ZERO_BUBBLE}),
    staged("1F1B", {"pipeline": 2}),
    staged("four ranks", {"pipeline": 4}, {}, {"num_layers": 6}),
    staged("interleaved", {"pipeline": 2, **INTERLEAVED}),
    staged("zero bubble", {"pipeline": 2, **ZERO_BUBBLE}),
    staged("zero bubble, four ranks", {"pipeline": 4, **ZERO_BUBBLE}, {"precision": "float32"}, {"tied": False}),
    staged("few micro-batches", {"pipeline": 4}, {"micro_batch_size": 2}),
    staged("layers again", {"pipeline": 2, **INTERLEAVED}, {"recompute": "full", "recompute_every": 2}),
    staged("operators again", {"pipeline": 2, "tensor": 2}, {"recompute": "operators"}, LLAMA | {"num_layers": 4}),
    staged("split", {"pipeline": 2, "tensor": 2, "sequence_parallel": True, **INTERLEAVED}, {}, LLAMA),
    staged("data", {"pipeline": 2, "data": 4}),
    staged("ZeRO-2", {"pipeline": 2, "data": 2, "sharding": "zero2"}),
    staged("ZeRO-3", {"pipeline": 2, "data": 4, "sharding": "zero3", "shard_group": 2, **INTERLEAVED}),
    staged("ZeRO-3, zero bubble", {"pipeline": 2, "data": 2, "sharding": "zero3", **ZERO_BUBBLE}),
    staged("documents", {"pipeline": 2}, {"document_mask": True}),
    staged("Muon", {"pipeline": 2, "tensor": 2, "data": 2, "sharding": "zero3"}, optimizer=MUON),
    staged("expert ranks", {"pipeline": 2, **EXPERT_RANKS}, {}, FOUR_OF_EXPERTS),
    staged("expert ranks, zero bubble", {"pipeline": 2, **EXPERT_RANKS, **ZERO_BUBBLE}, {}, FOUR_OF_EXPERTS),
    staged(
        "expert ranks, ZeRO-3, interleaved",
        {"pipeline": 2, "data": 4, "expert": 2, "sharding": "zero3", **INTERLEAVED},
        {},
        FOUR_OF_EXPERTS,
    ),
    staged(
        "expert ranks, ZeRO-2, split",
        {"pipeline": 2, **EXPERT_RANKS, "tensor": 2, "sequence_parallel": True, "sharding": "zero2"},
        {"recompute": "full"},
        FOUR_OF_EXPERTS,
    ),
    staged(
        "all together",
        {"pipeline": 2, "tensor": 2, "data": 2, "sharding": "zero2", "sequence_parallel": True, **INTERLEAVED},
        {"recompute": "full"},
    ),
]


@pytest.mark.one_in(len(CASES))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_stage_holds_computes_and_sends_what_is_planned(case):
    layout = case.run.layout
    ranks = [place * layout.ranks.owners.stride for place in range(layout.pipeline)]
    stages = [rehearse(case.run, rank=rank, device=case.device) for rank in ranks]
    for rehearsal in stages:
        check_formulas(rehearsal, memory=0.02)
        assert sent_messages(rehearsal) == planned_messages(rehearsal.planned), rehearsal.rank
    check_shown_of_stages(stages)


def test_a_micro_batch_in_flight_costs_what_is_planned():
    """The first of four ranks holds up to four micro-batches: one more micro-batch is one more of everything."""
    runs = [staged("", {"pipeline": 4}, {"batch_size": number}).run for number in (2, 3, 4)]
    two, three, four = (compare(rehearse(run, device="cuda"))[0] for run in runs)
    assert four.counted - three.counted == pytest.approx(four.planned - three.planned, rel=1e-3)
    assert three.counted - two.counted == pytest.approx(three.planned - two.planned, rel=1e-3)
