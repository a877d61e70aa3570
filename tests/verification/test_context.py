"""Context ranks, which share each sequence: the proof holds for each way of attention and with every other axis."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from crosscut.config import Layout, RunConfig
from crosscut.parallel import make_mesh
from crosscut.verification import LayoutReport, for_verification, verify_on_mesh
from tests.ranks import RankPool
from tests.verification.runs import CPU, LLAMA, tiny_run

GQA: dict[str, Any] = {**LLAMA, "num_kv_heads": 2, "tied": False}


class Case(NamedTuple):
    """A layout, and what differs from the tiny run."""

    layout: dict[str, Any]
    training: Mapping[str, Any] = MappingProxyType({})
    model: Mapping[str, Any] = MappingProxyType({"dropout": 0.0})
    optimizer: Mapping[str, Any] = MappingProxyType({})


RING, EXCHANGE, GATHER = ({"context": 2, "context_attention": way} for way in ("ring", "all_to_all", "gather"))

CASES = {
    "gather": Case(GATHER),
    "all-to-all": Case(EXCHANGE),
    "ring": Case(RING),
    "gather with dropout": Case(GATHER, model={"dropout": 0.1}),
    "all-to-all with dropout": Case(EXCHANGE, model={"dropout": 0.1}),
    "ring over four ranks, recomputed core": Case({**RING, "context": 4}, {"recompute": "selective"}),
    "gather over four ranks, recomputed layers": Case({**GATHER, "context": 4}, {"recompute": "full"}),
    "ring, key-value heads, tensor ranks that split the sequence": Case(
        {**RING, "tensor": 2, "sequence_parallel": True}, model={"dropout": 0.0, **GQA}
    ),
    "gather, key-value heads, tensor ranks": Case({**GATHER, "tensor": 2}, model={"dropout": 0.0, **GQA}),
    "all-to-all, zero3 over data and context": Case(
        {**EXCHANGE, "data": 2, "sharding": "zero3"}, model={"dropout": 0.0, **GQA}
    ),
    "gather, zero2 over context": Case(
        {**GATHER, "sharding": "zero2"}, {"document_mask": True}, {"dropout": 0.0, **GQA}
    ),
    "ring over documents, data ranks": Case(
        {**RING, "data": 2},
        {"document_mask": True},
        {"dropout": 0.0, "num_heads": 6, "num_kv_heads": 3, "hidden_size": 48},
    ),
    "all-to-all over documents, recomputed core": Case(
        EXCHANGE, {"document_mask": True, "recompute": "selective"}, {"dropout": 0.0}
    ),
    "all-to-all, recomputed layers": Case(EXCHANGE, {"recompute": "full"}),
    "Muon, zero2 over context": Case(
        {**GATHER, "sharding": "zero2"}, optimizer={"matrices": "muon", "matrix_learning_rate": 0.02}
    ),
    "accumulation": Case({**RING, "data": 2}, {"micro_batch_size": 1, "batch_size": 8}),
}  # fmt: skip


def _run(case: Case) -> RunConfig:
    run = tiny_run(training=case.training, optimizer=case.optimizer, **{"max_sequence_length": 32, **case.model})
    return for_verification(run, Layout(**case.layout), "float64")


def _verify(run: RunConfig) -> LayoutReport:
    return verify_on_mesh(run, make_mesh(run.layout, CPU))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_context_ranks_compute_what_one_rank_computes(ranks: RankPool, name: str) -> None:
    run = _run(CASES[name])
    report = ranks.run(run.layout.world_size, _verify, run)[0]
    assert [check for check in report.checks if not check.same] == []
    assert report.first is None
    assert report.largest_tolerance <= 1e-10


COMPILED = {
    "ring": Case(RING, {"compile": "on"}),
    "all-to-all, recomputed operators": Case(EXCHANGE, {"compile": "on", "recompute": "operators"}),
    "gather over documents": Case(GATHER, {"compile": "on", "document_mask": True}),
}


@pytest.mark.slow  # compilation takes long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_compute_the_same(ranks: RankPool, name: str) -> None:
    run = _run(COMPILED[name])
    report = ranks.run(run.layout.world_size, _verify, run, time_limit=300.0)[0]
    assert [check for check in report.checks if not check.same] == []
    assert report.first is None
