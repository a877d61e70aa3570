"""Saving beside the training: consistent, one at a time, told when it fails, old ones dropped."""

import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from crosscut.checkpoint import (
    GoodCheckpoint,
    Saver,
    find_damage,
    latest_good_checkpoint,
    list_checkpoints,
    load_checkpoint,
    mark_passed_over,
)
from crosscut.checkpoint.saving.staging import HostBuffers
from crosscut.checkpoint.storage import LocalFolder
from crosscut.config import CheckpointConfig, CheckpointError, RankFailure
from crosscut.config.system.markers import MARKER_FILE
from crosscut.launch import launch, process_group
from tests.checkpoint.states import progress_at, save_steps, small_state, step
from tests.ranks import RankPool


@contextmanager
def saving(root: Path, *, size: int = 64, **settings: object):
    """Saver of a small state, with its model and optimizer. The first rank publishes."""
    model, optimizer = small_state(size=size)
    config, is_first = CheckpointConfig(**{"keep": 100, **settings}), dist.get_rank() == 0
    with Saver(root, model=model, optimizer=optimizer, config=config, is_first_rank=is_first) as saver:
        yield saver, model, optimizer


def save_one(saver: Saver, number: int) -> None:
    saver.save(progress_at(number))
    saver.finish()


def names(root: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in list_checkpoints(root)]


def state_in(root: Path) -> dict[str, torch.Tensor]:
    """Tensors in the newest checkpoint, by name."""
    model, optimizer = small_state(seed=9, size=512)
    load_checkpoint(latest_good_checkpoint(root).folder, model=model, optimizer=optimizer)
    return copy_of(model, optimizer)


def copy_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    moments = {
        f"{index}.{key}": value.clone()
        for index, state in enumerate(optimizer.state.values())
        for key, value in state.items()
    }
    return {**{name: p.detach().clone() for name, p in model.named_parameters()}, **moments}


def train_on_while_saving(root: Path) -> tuple[dict, dict, int]:
    with saving(root, size=512) as (saver, model, optimizer):
        expected = copy_of(model, optimizer)
        saver.save(progress_at(1))
        steps = 0
        while not saver._writing.done():
            step(model, optimizer)
            steps += 1
        saver.finish()
    return expected, state_in(root), steps


def test_what_is_saved_is_the_state_at_the_save(ranks, tmp_path):
    """Training goes on at full speed during the save; a step that changed a tensor too early would show."""
    for repeat in range(3):
        expected, saved, steps = ranks.run(1, train_on_while_saving, tmp_path / str(repeat))[0]
        assert steps > 0, "the save must leave room for steps"
        for name, value in expected.items():
            assert torch.equal(saved[name], value), name


def step_during_a_slow_copy(root: Path) -> tuple[float, dict, dict]:
    """Whether a step waits for the copy is not left to chance: the copy takes half a second."""
    copy = HostBuffers.copy

    def slow(*arguments: object) -> object:
        time.sleep(0.5)
        return copy(*arguments)

    with pytest.MonkeyPatch.context() as patch, saving(root, size=512) as (saver, model, optimizer):
        patch.setattr(HostBuffers, "copy", slow)
        expected = copy_of(model, optimizer)
        saver.save(progress_at(1))
        model(torch.ones(1, 512)).sum().backward()  # a step's forward and backward pass need not wait
        held = saver.copying.seconds_held
        assert held == 0
        optimizer.step()
        saver.finish()
        return saver.copying.seconds_held, expected, state_in(root)


def test_optimizer_step_waits_for_the_copy(ranks, tmp_path):
    held, expected, saved = ranks.run(1, step_during_a_slow_copy, tmp_path)[0]
    assert held > 0.3
    for name, value in expected.items():
        assert torch.equal(saved[name], value), name


def save_twice_and_count(root: Path) -> list[int]:
    before = set(threading.enumerate())  # a rank may hold what other tests left
    with saving(root) as (saver, _, _):
        pointers = []
        for number in (1, 2):
            save_one(saver, number)
            pointers.append({name: buffer.data_ptr() for name, buffer in saver._buffers._buffers.items()})
    assert pointers[0] == pointers[1]
    return [thread.name for thread in set(threading.enumerate()) - before]


def test_buffers_are_used_again_and_the_thread_ends(ranks, tmp_path):
    assert ranks.run(1, save_twice_and_count, tmp_path) == [[]]


def threads_left_by_a_save(root: Path) -> int:
    """Threads of the operating system that a save leaves, with a state whose description is large.

    Nothing waits for the save, because training goes on while a checkpoint is written.
    """
    torch.set_num_threads(2)
    try:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(100)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = CheckpointConfig(keep=100)
        with Saver(root, model=model, optimizer=optimizer, config=config, is_first_rank=True) as saver:
            step(model, optimizer)
            before = set(Path("/proc/self/task").iterdir())
            saver.save(progress_at(1))
            deadline = time.monotonic() + 10.0
            while left := set(Path("/proc/self/task").iterdir()) - before:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        return len(left)
    finally:
        torch.set_num_threads(1)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux to list its threads")
def test_a_save_of_one_rank_leaves_no_thread_that_would_slow_the_training(ranks, tmp_path):
    assert ranks.run(1, threads_left_by_a_save, tmp_path) == [0]


def test_next_save_waits_for_the_one_before(ranks, tmp_path):
    ranks.run(2, save_steps, tmp_path, [1, 2, 3, 4])
    assert names(tmp_path) == [1, 2, 3, 4]


def save_steps_with(root: Path, steps: list[int], settings: dict) -> None:
    save_steps(root, steps, **settings)


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"keep": 2}, [5, 6]),
        ({"keep": 1}, [6]),
        ({"keep": 1, "every": 1, "keep_every": 2}, [2, 4, 6]),
        ({"keep": 2, "every": 1, "keep_every": 3}, [3, 5, 6]),
    ],
)
def test_newest_and_every_nth_are_kept(ranks, tmp_path, settings, left):
    ranks.run(1, save_steps_with, tmp_path, [1, 2, 3, 4, 5, 6], settings)
    assert names(tmp_path) == left


def test_damaged_later_checkpoint_does_not_push_out_a_good_one(ranks, tmp_path):
    """A run that fell back from step 6 to 3 and saves at 4 must not drop 4 because 6 is newer."""
    ranks.run(1, save_steps, tmp_path, [3, 6])
    (tmp_path / "step-00000006" / "rank-0.safetensors").unlink()
    ranks.run(1, save_steps_with, tmp_path, [4], {"keep": 1})
    assert names(tmp_path) == [4, 6]
    assert latest_good_checkpoint(tmp_path).manifest.progress.step == 4


def passed_over(ranks: RankPool, root: Path) -> tuple[Path, GoodCheckpoint]:
    """Damaged checkpoint of step 137, and the good one of step 100 to which a run falls back."""
    ranks.run(1, save_steps, root, [100, 137])
    damaged = root / "step-00000137"
    (damaged / "rank-0.safetensors").write_bytes(b"short")
    return damaged, latest_good_checkpoint(root)


@pytest.mark.parametrize(("keep", "left"), [(2, [100, 137, 200]), (1, [200]), (3, [100, 137, 200])])
def test_damaged_checkpoint_that_was_passed_over_does_not_count_as_kept(ranks, tmp_path, keep, left):
    """The run fell back from step 137 to 100, and saves at 200, not at 137; also when it is started twice for that."""
    damaged, good = passed_over(ranks, tmp_path)
    assert [folder.name for folder in good.passed_over] == [damaged.name]
    mark_passed_over(good)
    assert (damaged / "passed-over.txt").read_text().startswith(f"`{damaged}/rank-0.safetensors` must have")
    ranks.run(1, save_steps_with, tmp_path, [200], {"keep": keep})
    assert names(tmp_path) == left


def test_step_that_is_saved_again_counts_again(ranks, tmp_path):
    mark_passed_over(passed_over(ranks, tmp_path)[1])
    ranks.run(1, save_steps_with, tmp_path, [137, 200], {"keep": 2})
    assert names(tmp_path) == [137, 200]


def test_note_that_cannot_be_left_is_told(ranks, tmp_path, capsys, monkeypatch):
    _, good = passed_over(ranks, tmp_path)
    monkeypatch.setattr(LocalFolder, "create", failing(errno.EDQUOT))
    mark_passed_over(good)
    told = capsys.readouterr().err
    assert (
        f"`{tmp_path}/step-00000137` cannot be marked as damaged, so `checkpoint.keep` counts this checkpoint as good: "
        "Disk quota exceeded (`" in told
    )


def fail_on_one_rank(root: Path, on_failure: str, kind: str = "copy") -> tuple[list[str], list[int]]:
    """The second rank cannot copy at step 2: what each save and the end raise on this rank."""
    told = []
    with saving(root, on_failure=on_failure) as (saver, _, _):
        for number in (1, 2, 3):
            with pytest.MonkeyPatch.context() as patch:
                if number == 2 and dist.get_rank() == 1:
                    if kind == "copy":
                        patch.setattr(HostBuffers, "copy", out_of_memory)
                    else:
                        patch.setattr(LocalFolder, "create", failing(errno.EDQUOT))
                try:
                    save_one(saver, number)
                except CheckpointError as error:
                    told.append(f"{number}: {error}")
    return told


def out_of_memory(*_: object) -> None:
    raise MemoryError("no room for the copy")


def failing(error: int) -> Callable[..., AbstractContextManager[None]]:
    """Replacement of `LocalFolder.create` that fails with an error of the system."""

    @contextmanager
    def create(folder: LocalFolder, name: str):
        raise OSError(error, os.strerror(error), str(folder.path / name))
        yield

    return create


def test_file_that_one_rank_cannot_write_fails_all_alike(ranks, tmp_path, capfd):
    first, second = ranks.run(2, fail_on_one_rank, tmp_path, "stop", "write")
    assert first == second
    assert "must be writable, but is not: Disk quota exceeded (`" in first[0]
    assert "rank-1.safetensors`)" in first[0], "the file is named"
    assert names(tmp_path) == [1, 3]


def leave_parts_and_save(root: Path) -> None:
    for name in (".step-00000001.partial", ".step-00000005.partial", ".step-00000002.dropped"):
        (LocalFolder(root) / name).make()
        (root / name / "rank-0.safetensors").write_bytes(b"half")
    save_steps(root, [5])


def test_what_killed_runs_left_goes_with_the_next_save(ranks, tmp_path):
    ranks.run(1, leave_parts_and_save, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {MARKER_FILE, "step-00000005"}


def save_and_fail_after(root: Path) -> list[int]:
    """The checkpoint is there, but the run's config cannot be written."""
    with saving(root) as (saver, _, _):
        saver.save(progress_at(1), written=lambda: (root / "no-such-folder" / "config.toml").write_text(""))
        saver.finish()
        saver.require_saved()
    return names(root)


def test_what_fails_after_a_checkpoint_fails_no_save(ranks, tmp_path):
    assert ranks.run(1, save_and_fail_after, tmp_path) == [[1]]


def test_failure_of_one_rank_stops_all_alike(ranks, tmp_path):
    first, second = ranks.run(2, fail_on_one_rank, tmp_path, "stop")
    assert first == second
    assert first[0].startswith("2: ")
    assert "step-00000002` must be copied to host memory, but the copy failed: no room for the copy." in first[0]
    assert names(tmp_path) == [1, 3], "a caller that goes on all the same may"


def test_run_goes_on_after_a_failure_if_it_is_to(ranks, tmp_path):
    assert ranks.run(2, fail_on_one_rank, tmp_path, "continue") == [[], []]
    assert names(tmp_path) == [1, 3]


def train_while_the_folder_is_gone(root: Path, on_failure: str) -> list[str]:
    """A mount that vanishes during the run, and is back later: what each save and the end raise on this rank."""
    first = dist.get_rank() == 0
    told = []
    with saving(root, on_failure=on_failure) as (saver, model, optimizer):
        for number in (1, 2, 3, 4):
            if number == 2 and first:
                root.rename(root.with_name("unmounted"))
                root.write_text("what a vanished mount leaves behind may be anything")
            if number == 4 and first:
                root.unlink()
                root.with_name("unmounted").rename(root)
            dist.barrier()
            step(model, optimizer)
            try:
                save_one(saver, number)
            except CheckpointError as error:
                told.append(f"{number}: {error}")
        if on_failure == "continue":
            saver.require_saved()
    return told


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_vanished_folder_is_told_and_earlier_checkpoints_stay(ranks, tmp_path, on_failure, capfd):
    root = tmp_path / "mount"
    first, second = ranks.run(2, train_while_the_folder_is_gone, root, on_failure)
    assert first == second
    assert names(root) == [1, 4]
    for folder in list_checkpoints(root):
        assert find_damage(folder) == []
    if on_failure == "stop":
        assert [text[0] for text in first] == ["2", "3"]
        assert f"`{root}/step-00000002` must be writable, but is not: Not a directory" in first[0]
        assert first[0].endswith(
            "Any earlier checkpoints are unchanged. Free space, grant access, or set `checkpoint.folder` to another "
            "folder, or let the run continue with checkpoint.on_failure=continue."
        )
    else:
        assert first == []


def fill_the_disk(root: Path, room: int) -> str:
    """Save small checkpoints until there is no room for one: the error."""
    with saving(root, size=128, on_failure="continue") as (saver, _, _):
        for number in range(1, room + 2):
            save_one(saver, number)
        with pytest.raises(CheckpointError) as failed:
            saver.require_saved()
    return str(failed.value)


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 2 MB, where one can be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_full_disk_is_told_and_earlier_checkpoints_stay(ranks, small_disk):
    """One checkpoint is 0.4 MB."""
    message = ranks.run(1, fill_the_disk, small_disk, 6)[0]
    assert "must be writable, but is not: No space left on device" in message
    kept = names(small_disk)
    assert kept == list(range(1, len(kept) + 1))
    assert 3 <= len(kept) <= 6
    for folder in list_checkpoints(small_disk):
        assert find_damage(folder) == []


def test_read_only_folder_is_told(ranks, small_disk):
    ranks.run(1, save_steps, small_disk, [1])
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CheckpointError, match="must be writable, but is not: Read-only file system"):
        ranks.run(1, save_steps, small_disk, [2])
    assert [find_damage(folder) for folder in list_checkpoints(small_disk)] == [[]]


def test_folder_without_permission_is_told(ranks, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="must be writable, but is not: Permission denied"):
        ranks.run(1, save_steps, tmp_path, [1])


def save_while_one_rank_dies(root: Path) -> None:
    """The second rank is killed in the middle of a save."""
    with process_group(torch.device("cpu")), saving(root) as (saver, _, _):
        save_one(saver, 1)
        if dist.get_rank() == 1:
            HostBuffers.copy = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        save_one(saver, 2)


@pytest.mark.usefixtures("forked_ranks")
def test_rank_that_dies_during_a_save_is_not_told_as_a_fault_of_the_storage(tmp_path, capfd):
    with pytest.raises(RankFailure, match="rank 1 of 2 was ended by SIGKILL"):
        launch(save_while_one_rank_dies, (tmp_path,), num_ranks=2)
    assert "A checkpoint could not be written" not in capfd.readouterr().err
    assert names(tmp_path) == [1]


def save_over_a_connection_that_is_lost(root: Path) -> str:
    with pytest.MonkeyPatch.context() as patch, saving(root) as (saver, _, _):
        patch.setattr(LocalFolder, "create", failing(errno.ECONNRESET))
        saver.save(progress_at(1))
        with pytest.raises(CheckpointError) as failed:
            saver.finish()
    return str(failed.value)


def test_connection_to_the_storage_that_is_lost_is_a_fault_of_the_storage(ranks, tmp_path, capfd):
    told = ranks.run(1, save_over_a_connection_that_is_lost, tmp_path)[0]
    assert "must be writable, but is not: Connection reset by peer" in told
    assert "Free space, grant access" in told
