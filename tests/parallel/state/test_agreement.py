"""Replicas that differ in one bit are found, and so is where."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from crosscut.config import Layout
from crosscut.parallel import CollectiveRecorder, make_mesh, replicated_parameter, shard_model, sharded_parameter
from crosscut.parallel.state import agreement
from crosscut.parallel.state.agreement import find_drift, hash_of
from crosscut.parallel.state.parameters import local_part, stacked_parameter
from tests.parallel.twins import CPU, each
from tests.ranks import RankPool

TENSOR_2, DATA_2, SQUARE = Layout(tensor=2), Layout(data=2), Layout(tensor=2, data=2)


HYBRID = Layout(data=4, sharding="zero3", shard_group=2)
SHARED = Layout(tensor=2, data=2, sharding="zero3")


def parameters_on(layout: Layout, dtype: torch.dtype) -> tuple[Any, dict[str, Tensor]]:
    """Two parameters of each kind, with values as if drawn."""
    mesh = make_mesh(layout, CPU)
    model = nn.Module()
    model.first, model.second = nn.Module(), nn.Module()
    for number, part in enumerate(model.children()):
        part.weight = sharded_parameter((8, 8), mesh.tensor, dim=number, dtype=dtype, device=mesh.parameter_device)
        part.bias = replicated_parameter((8,), mesh.tensor, dtype=dtype, device=mesh.parameter_device)
    shard_model(model, mesh, units=[model.first], always_used=True)
    made: dict[str, Tensor] = dict(model.named_parameters())
    for number, (name, parameter) in enumerate(made.items()):
        seed = number * 100 + 10 * (0 if mesh.sharding is None else mesh.sharding.shard.rank)
        seed += mesh.tensor.rank if name.endswith("weight") else 0
        values = torch.randn(parameter.to_local().shape, generator=torch.Generator().manual_seed(seed))
        parameter.data.to_local().copy_(values)
    return mesh, made


Changes = dict[int, list[tuple[str, int, float]]]


def found_after(layout: Layout, changes: Changes, dtype: torch.dtype = torch.float32) -> tuple[Any, list[Any]]:
    """Change elements (name, index, value) on some ranks. Returns the difference that is found, and the messages of the
    search.
    """
    mesh, parameters = parameters_on(layout, dtype)
    for name, index, value in changes.get(dist.get_rank(), []):
        parameters[name].data.to_local().view(-1)[index] = value
    with CollectiveRecorder(mesh) as recorder:
        drift = find_drift(parameters, mesh)
    return drift, [tuple(sent) for sent in recorder.sent]


def drift_after(layout: Layout, changes: Changes, dtype: torch.dtype = torch.float32) -> Any:
    """Where the difference is, and the messages."""
    drift, sent = found_after(layout, changes, dtype)
    return None if drift is None else tuple(drift)[:3], sent


@pytest.mark.parametrize("layout", [Layout(), TENSOR_2, DATA_2, SQUARE], ids=str)
def test_replicas_that_agree_pass_for_two_small_messages(ranks: RankPool, layout: Layout) -> None:
    sent = []
    if layout.data > 1:
        sent.append(("all_reduce", "data", 2 * 4))
    if layout.tensor > 1:
        sent.append(("all_reduce", "tensor", 2 * 2 + 1))
    assert ranks.run(layout.world_size, drift_after, layout, {}) == [(None, sent)] * layout.world_size


@pytest.mark.parametrize(
    ("layout", "sent"),
    [
        (Layout(data=2, sharding="zero3"), []),  # nothing is held twice
        (HYBRID, [("all_reduce", "replica", 2 * 4), ("all_reduce", "shard", 1)]),
        (SHARED, [("all_reduce", "tensor", 2 * 2 + 1), ("all_reduce", "data", 1)]),
    ],
    ids=str,
)
def test_shares_are_compared_with_the_same_shares_of_other_copies(ranks: RankPool, layout: Layout, sent: Any) -> None:
    assert ranks.run(layout.world_size, drift_after, layout, {}) == [(None, sent)] * layout.world_size


CASES = {
    "sharded, data axis": (DATA_2, {1: [("first.weight", 3, 7.0)]}, ("first.weight", (0, 1), ())),
    "replicated, data axis": (DATA_2, {0: [("second.bias", 0, 7.0)]}, ("second.bias", (0, 1), ())),
    "replicated, tensor axis": (TENSOR_2, {1: [("first.bias", 7, 7.0)]}, ("first.bias", (0, 1), ())),
    "one rank of four": (SQUARE, {2: [("first.bias", 7, 7.0)]}, ("first.bias", (2,), (0, 1, 3))),
    "a whole data group": (SQUARE, {r: [("first.bias", 7, 7.0)] for r in (0, 2)}, ("first.bias", (0, 1, 2, 3), ())),
    "sharded, one tensor rank": (SQUARE, {3: [("second.weight", 0, 7.0)]}, ("second.weight", (1, 3), ())),
    "sharded, majority": (Layout(data=4), {2: [("second.weight", 0, 7.0)]}, ("second.weight", (2,), (0, 1, 3))),
    "two of four": (
        Layout(tensor=4),
        {1: [("first.bias", 7, 7.0)], 2: [("first.bias", 6, 7.0)]},
        ("first.bias", (1, 2), (0, 3)),
    ),
    "a share of one copy": (HYBRID, {3: [("first.weight", 3, 7.0)]}, ("first.weight", (1, 3), ())),
    "a share on one tensor rank": (SHARED, {2: [("second.bias", 3, 7.0)]}, ("second.bias", (2, 3), ())),
    "the first of several": (
        DATA_2,
        {1: [("second.bias", 0, 7.0), ("second.weight", 0, 7.0)]},
        ("second.weight", (0, 1), ()),
    ),
}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_drift_is_named_alike_on_all_ranks(ranks: RankPool, num_ranks: int) -> None:
    cases = {name: case for name, case in CASES.items() if case[0].world_size == num_ranks}
    for told in ranks.run(num_ranks, each, drift_after, [case[:2] for case in cases.values()]):
        found = dict(zip(cases, (drift for drift, _ in told), strict=True))
        assert found == {name: expected for name, (_, _, expected) in cases.items()}


def drift_told(layout: Layout, changes: Changes) -> tuple[float, int]:
    """Size of the largest difference between replicas after changes, and number of parameters that differ."""
    drift, _ = found_after(layout, changes)
    return drift.size, drift.num_parameters


EXPERTS = Layout(data=4, expert=2)


def drift_of_experts(layout: Layout, changes: dict[int, str]) -> Any:
    """Where the parameters of these names differ after one element has changed on some ranks, and the messages."""
    mesh = make_mesh(layout, CPU)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": CPU}
    parameters = {
        "experts": stacked_parameter((4, 6, 6), mesh, dim=1, **kind),
        "bias": replicated_parameter((8,), mesh.tensor, **kind),
    }
    local_part(parameters["experts"].detach()).fill_(10 * mesh.expert.rank + mesh.tensor.rank)
    if name := changes.get(dist.get_rank()):
        local_part(parameters[name].detach()).view(-1)[0] = 7.5
    with CollectiveRecorder(mesh) as recorder:
        drift = find_drift(parameters, mesh)
    return None if drift is None else tuple(drift)[:3], [tuple(sent) for sent in recorder.sent]


def test_ranks_that_share_experts_may_hold_different_experts(ranks: RankPool) -> None:
    sent = [("all_reduce", "expert_data", 2), ("all_reduce", "data", 2 + 1)]
    assert ranks.run(4, drift_of_experts, EXPERTS, {}) == [(None, sent)] * 4


@pytest.mark.parametrize(
    ("layout", "changes", "expected"),
    [
        (EXPERTS, {2: "experts"}, ("experts", (0, 2), ())),
        (EXPERTS, {1: "bias"}, ("bias", (1,), (0, 2, 3))),
        (Layout(tensor=2, data=2, expert=2), {1: "bias"}, ("bias", (1,), (0, 2, 3))),
        (Layout(data=4, expert=4), {1: "experts"}, None),
    ],
    ids=str,
)
def test_drift_of_experts_is_found_among_the_ranks_with_the_same_experts(
    ranks: RankPool, layout: Layout, changes: dict[int, str], expected: Any
) -> None:
    assert [drift for drift, _ in ranks.run(4, drift_of_experts, layout, changes)] == [expected] * 4


PLACES = [
    (DATA_2, "first.weight"),
    (SQUARE, "first.weight"),
    (SQUARE, "second.bias"),
    (HYBRID, "second.weight"),
    (SHARED, "first.bias"),
]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_size_of_a_drift_is_told_alike_on_all_ranks(ranks: RankPool, num_ranks: int) -> None:
    cases, sizes = [], []
    for (layout, name), apart in product([p for p in PLACES if p[0].world_size == num_ranks], [12.0, 1.5, 2.0**-20]):
        everywhere = [(name, index, 8.0) for index in range(2)]  # larger than what is drawn
        changes = dict.fromkeys(range(num_ranks), everywhere)
        changes[0] = [*everywhere, (name, 1, 8.0 - apart)]
        cases.append((layout, changes))
        sizes.append((apart / 8.0, 1))
    assert ranks.run(num_ranks, each, drift_told, cases) == [sizes] * num_ranks


def test_what_is_not_finite_is_infinitely_far(ranks: RankPool) -> None:
    values = product(range(4), [math.nan, math.inf, -math.inf])
    cases = [(SQUARE, {rank: [("first.bias", 3, value)]}) for rank, value in values]
    assert ranks.run(4, each, drift_told, cases) == [[(math.inf, 1)] * len(cases)] * 4


def test_an_infinity_on_all_ranks_hides_no_difference(ranks: RankPool) -> None:
    everywhere = [("first.bias", 0, math.inf), ("first.bias", 1, 8.0)]
    changes = {0: everywhere, 1: [*everywhere, ("first.bias", 1, 6.0)]}
    assert ranks.run(2, drift_told, DATA_2, changes) == [(0.25, 1)] * 2


def test_all_drifted_parameters_are_counted(ranks: RankPool) -> None:
    changes = {1: [("first.bias", 0, 7.0)], 2: [("second.weight", 0, 7.0)], 3: [("second.bias", 0, 7.0)]}
    assert [number for _, number in ranks.run(4, drift_told, SQUARE, changes)] == [3] * 4


def test_tensor_ranks_may_hold_different_parts(ranks: RankPool) -> None:
    changes = {1: [("first.weight", 0, 7.0)]}
    assert [drift for drift, _ in ranks.run(2, drift_after, TENSOR_2, changes)] == [None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_smallest_difference_is_seen(ranks: RankPool, dtype: torch.dtype) -> None:
    """In the last bit, and of the two zeros."""
    up = torch.tensor([1.0], dtype=dtype).nextafter(torch.tensor([2.0], dtype=dtype)).item()
    pairs = [(1.0, up), (0.0, -0.0), (1.0, 1.0), (0.0, 0.0)]
    cases = [(DATA_2, {rank: [("first.bias", 3, pair[rank])] for rank in (0, 1)}, dtype) for pair in pairs]
    expected = [("first.bias", (0, 1), ())] * 2 + [None] * 2
    for told in ranks.run(2, each, drift_after, cases):
        assert [drift for drift, _ in told] == expected


def test_every_bit_of_every_element_counts() -> None:
    x = torch.randn(37)
    hashes = {int(hash_of(x))}
    for element in range(37):
        for bit in range(32):
            flipped = x.clone()
            flipped.view(torch.int32)[element] ^= -(1 << 31) if bit == 31 else 1 << bit
            hashes.add(int(hash_of(flipped)))
    assert len(hashes) == 1 + 37 * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_swapped_elements_are_seen(dtype: torch.dtype) -> None:
    """Also those that differ in high bits only, far apart by a power of two, which a plain weighted sum misses."""
    x = torch.ones(8193, dtype=dtype)
    x[0] = 2.0
    places = [1, 2, 64, 4096, 8192]
    hashes = {int(hash_of(x))}
    for place in places:
        swapped = x.clone()
        swapped[0], swapped[place] = 1.0, 2.0
        hashes.add(int(hash_of(swapped)))
    assert len(hashes) == 1 + len(places)


def test_hash_does_not_depend_on_how_many_elements_are_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000)
    hashes = set()
    for count in (1 << 22, 1000, 999, 64, 7):
        monkeypatch.setattr(agreement, "_ELEMENTS_AT_ONCE", count)
        hashes.add(int(hash_of(x)))
    assert len(hashes) == 1


def test_hash_is_the_formulas() -> None:
    """By Python's whole numbers, modulo 2^64."""
    x = torch.tensor([1.5, -2.0, 0.0, -0.0, float("inf")])
    a, b, size = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 1 << 64
    total = 0
    for i, bits in enumerate(x.view(torch.int32).tolist()):
        mixed = (bits + a * i) * b % size
        total += (mixed ^ (mixed >> 32)) * b
    assert int(hash_of(x)) % size == total % size


def test_hash_leaves_the_tensor_alone_and_takes_any_shape() -> None:
    x = torch.randn(6, 4)
    before = x.clone()
    assert int(hash_of(x.t().contiguous().t())) == int(hash_of(x))
    assert torch.equal(x, before)
    assert int(hash_of(torch.empty(0))) == 0
