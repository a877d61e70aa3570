"""The account of memory, on allocations whose sizes are known."""

import inspect

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from crosscut.kernels import ORDINARY
from crosscut.model.block import Block
from crosscut.model.sublayers.mlp import MLP
from crosscut.training.watching.memory_account import PACKAGE, Account, account_of, holder_of, read_snapshot
from tests.training.jobs import CPU


def test_peak_is_where_most_was_held_at_once():
    account = Account(before={1: (10, "parameters")})
    account.events += [(2, 5, "a"), (3, 7, "b"), (2, 0, ""), (2, 6, "a"), (3, 0, ""), (1, 0, ""), (4, 9, "c")]
    assert account.peak() == (23, {"parameters": 10, "b": 7, "a": 6})


def test_nothing_happening_holds_what_was_held_before():
    assert Account(before={1: (10, "parameters"), 2: (3, "gradients")}).peak()[0] == 13


def test_a_name_is_of_the_last_piece_that_had_the_key():
    account = Account(before={1: (10, "before"), 2: (3, "before")}, names={1: "gradients", 2: "gradients"})
    account.events += [(1, 0, ""), (1, 5, "a"), (1, 0, ""), (1, 6, "b"), (3, 7, "c"), (3, 0, "")]
    assert account.peak() == (16, {"c": 7, "gradients": 9})
    account.events += [(1, 0, ""), (1, 20, "d")]
    assert account.peak() == (23, {"gradients": 23})


def test_tensors_get_their_name_when_it_is_known():
    with account_of({}, CPU) as account:
        temporary = torch.zeros(500)
        gradient = torch.zeros(1000) + temporary.sum()
        account.call([gradient], "gradients")
        del gradient
    assert account.peak()[1]["gradients"] == 4000


def test_tensors_on_the_cpu_are_seen_to_come_and_go():
    weight = torch.zeros(1000)
    with account_of({"parameters": [weight]}, CPU) as account:
        first = weight + 1
        view = first[:10]
        del first
        second = weight * 2  # noqa: F841 - `view` still holds the first one
        del view
        third = weight * 3  # noqa: F841
    peak, holders = account.peak()
    assert peak == 3 * 4000
    assert holders == {"outside of crosscut": 8000, "parameters": 4000}
    assert [size for _, size, _ in account.events] == [4000, 4000, 0, 4000]


def test_storages_that_change_their_size_are_seen():
    with account_of({}, CPU) as account:
        gathered = torch.zeros(1000)
        gathered.untyped_storage().resize_(0)
        other = torch.zeros(1500)  # noqa: F841 - takes the place of the first
    assert account.peak()[0] == 6000
    with account_of({}, CPU) as account:
        gathered.untyped_storage().resize_(4000)
    assert account.peak()[0] == 4000


def test_tensors_that_pytorch_pretends_to_have_take_no_memory():
    with account_of({}, CPU) as account, FakeTensorMode():
        torch.zeros(1000)
    assert account.peak() == (0, {})


def line_of(function: object) -> tuple[str, int]:
    """File of a function of the package, and the number of its first line."""
    return inspect.getsourcefile(function), inspect.getsourcelines(function)[1]


def test_holder_is_the_innermost_module_with_its_line_and_the_next_file_outwards():
    forward, multiply = line_of(MLP.forward), line_of(type(ORDINARY).output)
    frames = [
        ("/torch/functional.py", 1),
        multiply,
        (f"{PACKAGE}/kernels/functions.py", 40),
        forward,
        line_of(Block.forward),
    ]
    assert holder_of(frames) == f"MLP (kernels/products.py:{multiply[1]} < model/sublayers/mlp.py:{forward[1]})"
    assert holder_of(frames[1:2]) == f"kernels/products.py:{multiply[1]}"
    assert holder_of(frames[:1]) == "outside of crosscut"


def test_history_of_the_caching_allocator_is_read():
    line = [{"filename": f"{PACKAGE}/training/step.py", "line": 27, "name": "step"}]
    snapshot = {
        "device_traces": [
            [],
            [
                {"action": "alloc", "addr": 300, "size": 30, "frames": line},
                {"action": "segment_alloc", "addr": 1000, "size": 4096, "frames": line},
                {"action": "free_requested", "addr": 200, "size": 20, "frames": []},
                {"action": "free_completed", "addr": 200, "size": 20, "frames": []},
                {"action": "alloc", "addr": 200, "size": 15, "frames": []},
                {"action": "free_completed", "addr": 300, "size": 30, "frames": []},
            ],
        ],
        "segments": [
            {"device": 0, "blocks": [{"address": 100, "size": 999, "state": "active_allocated"}]},
            {
                "device": 1,
                "blocks": [
                    {"address": 100, "size": 10, "state": "active_allocated"},
                    {"address": 200, "size": 15, "state": "active_allocated"},
                    {"address": 300, "size": 30, "state": "inactive"},
                ],
            },
        ],
    }
    account = Account()
    read_snapshot(snapshot, 1, {100: "parameters"}, account)
    peak, holders = account.peak()
    assert peak == 60
    assert holders == {"training/step.py:27": 30, "held before the step": 20, "parameters": 10}
