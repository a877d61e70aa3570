"""Runs that continue from a checkpoint in the memory of their machines."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from crosscut.checkpoint import list_checkpoints
from crosscut.checkpoint.in_memory import FOLDER_VARIABLE, memory_folder
from crosscut.config import ConfigError, RunConfig
from crosscut.logbook.contents import read_metrics, read_restarts
from crosscut.logbook.schema import KEY_FILE
from crosscut.training.loop import Loop
from tests.training.conftest import tiny_run
from tests.training.jobs import whole_run


class KilledError(Exception):
    """End of a run's processes at a step."""


def on_machines(run: RunConfig, tops: list[Path], killed_after: int = 0) -> None:
    """Train on ranks that are machines of their own, until the end or until `killed_after` steps are done."""
    launch = Loop._launch_step

    def launch_or_end(loop: Loop, course) -> None:
        if killed_after and course.done == killed_after:
            for saver in loop.checkpoints.savers:
                saver.finish()
            raise KilledError
        launch(loop, course)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(tops[dist.get_rank()]))
        patch.setattr(Loop, "_launch_step", launch_or_end)
        with suppress(SystemExit):  # of a rank that failed
            whole_run(run)


def losses_of(folder: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(folder) if "loss" in row]


EXACT = (
    "layout.data=2", "layout.sharding=zero2", "model.dropout=0.0", "training.precision=float64",
    "training.validate_every=0",
)  # fmt: skip


@pytest.fixture
def killed(ranks, run_with, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run on two machines that was killed after step 5. Its newest checkpoint on disk is of step 3, in memory of
    step 4. Returns the run, the folders in memory, and the folders of the checkpoints in them.
    """
    run = run_with(*EXACT, "layout.elastic=data", "checkpoint.in_memory=2")
    tops = [tmp_path / "first", tmp_path / "second"]
    ranks.run(2, on_machines, run, tops, 5)
    folder = Path(run.output.folder)
    places = []
    for top in tops:
        monkeypatch.setenv(FOLDER_VARIABLE, str(top))
        places.append(memory_folder(folder, (folder / KEY_FILE).read_text()) / "step-00000004")
    return run, tops, places


@pytest.fixture(scope="module")
def undisturbed(ranks, tokens_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """Losses of the same run, which was not killed."""
    run = tiny_run(tokens_folder, tmp_path_factory.mktemp("whole") / "run", *EXACT)
    ranks.run(2, whole_run, run)
    return losses_of(Path(run.output.folder))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("survivors", [1, 2])
def test_a_run_that_loses_a_machine_continues_without_reading_the_disk(ranks, killed, undisturbed, survivors):
    run, tops, _ = killed
    shutil.rmtree(tops[0])
    for checkpoint in list_checkpoints(run.checkpoints_folder):
        shutil.rmtree(str(checkpoint))
    ranks.run(survivors, on_machines, run, tops[::-1])
    (restart,) = read_restarts(Path(run.output.folder))
    assert (restart["step"], restart["restored_from"], restart["steps_lost"]) == (4, "memory", 0)
    assert [step for step, _ in losses_of(Path(run.output.folder))] == [1, 2, 3, 4, 5, 6]
    mine = [loss for _, loss in losses_of(Path(run.output.folder))]
    assert mine == pytest.approx([loss for _, loss in undisturbed], rel=1e-10, abs=0)
    assert not any(path for top in tops for path in top.glob("*/*")), "a complete run leaves nothing in memory"


def damage_a_shard(places: list[Path]) -> None:
    for place in places:
        path = place / "rank-1.safetensors"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def belong_to_another_run(places: list[Path]) -> None:
    for place in places:
        place.parent.rename(place.parent.with_name("0123456789abcdef"))


@pytest.mark.slow  # test_elastic.py continues from the disk; tests/checkpoint/test_in_memory.py chooses a checkpoint
@pytest.mark.parametrize("fault", [belong_to_another_run, damage_a_shard])
def test_faulty_checkpoints_in_memory_are_not_loaded(ranks, killed, undisturbed, fault):
    run, tops, places = killed
    fault(places)
    ranks.run(2, on_machines, run, tops)
    (restart,) = read_restarts(Path(run.output.folder))
    assert (restart["step"], restart["restored_from"]) == (3, "disk")
    assert losses_of(Path(run.output.folder)) == undisturbed


def refused(run: RunConfig, tops: list[Path]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crosscut.training.in_memory.free_bytes", lambda _: 1000)
        try:
            on_machines(run, tops)
        except ConfigError as error:
            return str(error)
    return ""


def test_too_little_room_is_refused_before_the_first_step(ranks, run_with, tmp_path):
    run = run_with("layout.data=2", "checkpoint.in_memory=2")
    first, second = ranks.run(2, refused, run, [tmp_path / "a", tmp_path / "b"])
    assert first == second
    assert first.startswith("`checkpoint.in_memory` needs 0.0")
    assert first.endswith(
        " GB in memory on each machine, but `" + str(next((tmp_path / "a").iterdir())) + "` has room for 1e-06 GB. "
        "Enlarge this file system, name another file system in CROSSCUT_MEMORY_FOLDER, or set checkpoint.in_memory=0."
    )
    assert losses_of(Path(run.output.folder)) == []
