"""The pool of ranks that the other tests stand on."""

import os
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from crosscut.config import Layout, LayoutError
from crosscut.parallel import make_mesh
from tests.ranks import RankError, RankPool


def _place() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def _sum(value: float) -> float:
    x = torch.tensor(value + dist.get_rank())
    dist.all_reduce(x)
    return x.item()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise LayoutError("the cause")
    dist.all_reduce(torch.ones(1))


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(100)


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _leave_a_ring() -> None:
    """Objects that refer to each other and to a mesh, as a model and its trainer do; Python collects them some day."""
    ring: list[object] = [make_mesh(Layout(tensor=2), torch.device("cpu"))]
    ring.append(ring)


def _warn() -> None:
    warnings.warn("a warning", stacklevel=1)


def test_each_job_has_a_process_group_of_its_own_size(ranks: RankPool) -> None:
    for num_ranks in (1, 2, 4):
        places = ranks.run(num_ranks, _place)
        assert [place[:2] for place in places] == [(i, num_ranks) for i in range(num_ranks)]
    assert ranks.run(2, _sum, 1.0) == [3.0, 3.0]


def test_ranks_are_kept_from_job_to_job(ranks: RankPool) -> None:
    assert [place[2] for place in ranks.run(4, _place)] == [place[2] for place in ranks.run(4, _place)]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_a_job_s_groups_end_with_it_and_their_threads(ranks: RankPool) -> None:
    before = ranks.run(2, _num_threads)
    for _ in range(3):
        ranks.run(2, _leave_a_ring)
    for now, then in zip(ranks.run(2, _num_threads), before, strict=True):
        assert now <= then


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_s_error_is_raised_with_its_traceback_and_the_pool_goes_on(ranks: RankPool, rank: int) -> None:
    with pytest.raises(LayoutError, match=r"^the cause$") as caught:
        ranks.run(2, _fail_on, rank)
    assert f"on rank {rank}" in str(caught.value.__cause__)
    assert "in _fail_on" in str(caught.value.__cause__)
    assert ranks.run(2, _sum, 1.0) == [3.0, 3.0]


def test_warnings_are_errors_on_ranks_too(ranks: RankPool) -> None:
    with pytest.raises(UserWarning, match="a warning"):
        ranks.run(1, _warn)


@pytest.mark.slow
def test_the_pool_starts_anew_after_a_dead_and_a_hanging_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks.GRACE", 1.0)
    pool = RankPool(size=2)
    try:
        with pytest.raises(RankError, match="rank 1 ended by SIGKILL"):
            pool.run(2, _die_on, 1)
        with pytest.raises(RankError, match=r"ranks \[1\] did not end in time(.|\n)*in _sleep_on"):
            pool.run(2, _sleep_on, 1, time_limit=1.0)
        assert pool.run(2, _sum, 1.0) == [3.0, 3.0]
    finally:
        pool.close()


@pytest.mark.slow
def test_ranks_that_are_not_there_in_time_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ranks.STARTING", 0.0)
    pool = RankPool(size=2)
    try:
        with pytest.raises(RankError, match="rank 0 did not start"):
            pool.run(2, _sum, 1.0)
        monkeypatch.undo()
        assert pool.run(2, _sum, 1.0) == [3.0, 3.0]
    finally:
        pool.close()
