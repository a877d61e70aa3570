"""Ranks that torchrun starts again find each other, or are refused where they could not."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

from crosscut.config import Layout, LayoutError
from crosscut.launch import Ranks
from crosscut.launch.processes import process_group
from tests.nursery import forked
from tests.refusals import refusal


def test_restarts_on_several_machines_need_a_new_store_for_each_start(monkeypatch):
    started = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "GROUP_WORLD_SIZE": 2}
    for name, value in (started | {"TORCHELASTIC_MAX_RESTARTS": 1, "TORCHELASTIC_USE_AGENT_STORE": True}).items():
        monkeypatch.setenv(name, str(value))
    assert refusal(LayoutError, Ranks, layout=Layout(data=2), device="cpu") == (
        "With --max-restarts on several machines, torchrun needs `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, but the "
        "variable is not 1. Without it, restarted ranks find the addresses of ranks that have ended, and wait for "
        "them. Start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend=c10d, or with "
        "--max-restarts=0."
    )
    for name, value in (
        ("TORCHELASTIC_USE_AGENT_STORE", "False"), ("TORCHELASTIC_MAX_RESTARTS", "0"), ("GROUP_WORLD_SIZE", "1"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            Ranks(layout=Layout(data=2), device="cpu")


def start_again(rank: int, start: int, port: int, results: Any) -> None:
    """One of two ranks that torchrun starts with the store of all its starts. At the first start, the rank dies."""
    names = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    of_torchrun = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": start, "GROUP_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in (names | of_torchrun).items()})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    with process_group(torch.device("cpu")):
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        results.put(int(total))
        results.close()
        results.join_thread()
        if not start:
            os._exit(1)


def test_ranks_of_a_second_start_do_not_wait_for_the_ranks_of_the_first_one():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = forked().Queue()
    for start in range(2):
        ranks = [
            forked().Process(target=start_again, args=(rank, start, store.port, results), daemon=True)
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        assert [results.get(timeout=60) for _ in ranks] == [3, 3]
        for process in ranks:
            process.join(timeout=60)
        assert [process.exitcode for process in ranks] == [1 - start, 1 - start]
