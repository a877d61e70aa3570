"""Faults of disks and folders: full at a byte, failing, read-only, slow, moved, and gone."""

import errno
import os
import random
import shutil
import subprocess
from contextlib import suppress
from functools import partial
from typing import Any

from benchmarks.faulting.inside import Place
from benchmarks.faulting.killed import IN_SIXTH, STEP
from benchmarks.faulting.scene import EVERY, Scene
from benchmarks.faulting.trial import Fault

_FULL = "No space left on device"
_NONE_BEFORE = "nothing: this was the first checkpoint"


def _fill(scene: Scene, chance: random.Random, *, pattern: str, size: int, error: int = errno.ENOSPC) -> None:
    """Let all files with `pattern` in their paths take a random number of bytes below `size`, and no more."""
    scene.shim.set(pattern=f"{scene.root}{pattern}", room=chance.randrange(size), error=error)


def _before(name: str, pattern: str, size: int, layout: str, named: tuple[str, ...]) -> Fault:
    """A disk that is full before the run starts to write a file."""
    return Fault(name=f"disk full at a random byte of {name}", layout=layout, named=(*named, _FULL),
                 cause=partial(_fill_without_tokens, pattern=pattern, size=size), status=(2,),
                 survives="nothing was done")  # fmt: skip


def _fill_without_tokens(scene: Scene, chance: random.Random, **disk: Any) -> None:
    """Remove the prepared tokens first, so that the run prepares its text itself."""
    shutil.rmtree(scene.tokens)
    _fill(scene, chance, **disk)


def _during(name: str, pattern: str, size: int, layout: str, named: tuple[str, ...], **more: object) -> Fault:
    """A disk that is full from the sixth step on, for the files with a pattern in their paths."""
    settings = {"status": (2,), "place": IN_SIXTH, "survives": "the run, without this file", **more}
    return Fault(name=f"disk full at a random byte of {name}", layout=layout, named=(*named, _FULL),
                 cause=partial(_fill, pattern=pattern, size=size), **settings)  # type: ignore[arg-type]  # fmt: skip


def _checkpoint(name: str, file: str, size: int, layout: str) -> Fault:
    return _during(name, f"/run/checkpoints/.step-00000004.partial/{file}", size, layout,
                   ("checkpoints/step-00000004", "earlier checkpoints are unchanged"), place=Place(STEP, call=3),
                   survives=_NONE_BEFORE, may_lose=2 * EVERY)  # fmt: skip


def _report(name: str, pattern: str, size: int, layout: str) -> Fault:
    return _during(name, pattern, size, layout, ("report of the run must be written",), may_lose=0,
                   survives="all steps; the report is written by --resume auto")  # fmt: skip


def _mount(scene: Scene, _: random.Random) -> None:
    """Put the folder of a run on a small file system of its own."""
    scene.run.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=420k", "tmpfs", str(scene.run)]
    subprocess.run(command, check=True, capture_output=True)
    undo = ["umount", "--lazy", str(scene.run)]
    scene.undo.append(lambda: subprocess.run(undo, check=False, capture_output=True))


def _enlarge(scene: Scene, _: random.Random) -> None:
    """Make the small file system larger."""
    subprocess.run(["mount", "-o", "remount,size=9000k", str(scene.run)], check=True, capture_output=True)


def _needs_mount() -> str:
    return "" if os.geteuid() == 0 else "mounting a file system needs root"


def _move(scene: Scene, _: random.Random, *, name: str) -> None:
    """Rename a folder of the run."""
    (scene.root / name).rename(scene.root / "moved")


def _move_back(scene: Scene, _: random.Random) -> None:
    """Rename the folder of the run back."""
    with suppress(FileNotFoundError):
        shutil.rmtree(scene.run)
    (scene.root / "moved").rename(scene.run)


def _remove(scene: Scene, _: random.Random, *, name: str) -> None:
    """Remove a folder of the run."""
    shutil.rmtree(scene.root / name, ignore_errors=True)
    with suppress(OSError):
        shutil.rmtree(scene.root / name)


def _slow(scene: Scene, _: random.Random) -> None:
    scene.shim.set(pattern=f"{scene.root}/run", delay=0.1)


_RUN_GONE = (r"/run", r"must stay the folder of this run, but was moved or removed|No such file or directory")
"""The second message comes first if a checkpoint is being written when the folder goes."""

DISKS = [
    _before("the tokens", "/.tokens", 60_000, "tensor 2", ("tokens` must be writable", "MB are free")),
    _before("the tokens' manifest", "/.tokens", 75_000, "context 2", ("tokens` must be writable",)),
    _before("the run's lock", "/run/.lock", 100, "data 2", ("run` is not",)),
    _before("the run's config", "/run/.config.toml", 1_000, "pipeline 2", ("config.toml",)),
    _during("metrics.jsonl", "/run/metrics.jsonl", 300, "context 2", ("Some rows of `metrics.jsonl` cannot be written",
            "Training continues"), status=(0,), loses_rows=True, survives="the run; some rows are lost"),
    _during("TensorBoard's file", "/run/tensorboard", 300, "pipeline 2", ("Some scalars in `tensorboard` cannot be",
            "Training continues"), status=(0,), survives="the run; some scalars are lost"),
    _checkpoint("a rank's tensors (rank 0)", "rank-0", 100_000, "tensor 2"),
    _checkpoint("a rank's tensors (rank 1)", "rank-1", 100_000, "data 2"),
    _checkpoint("a checkpoint's index", "tensors.json", 20_000, "pipeline 2"),
    _checkpoint("a checkpoint's manifest", "manifest.json", 5_000, "context 2"),
    _report("the picture of the losses", "/run/.loss.png", 30_000, "data 2"),
    _report("the sample of text", "/run/.sample.txt", 4, "tensor 2"),
    _report("the summary", "/run/.summary.json", 500, "context 2"),
    Fault(name="a file system that is full in the middle of the run", layout="tensor 2",
          named=("No space left on device", "checkpoints/step-"), cause=_mount, cure=_enlarge,
          needs=_needs_mount, may_lose=3 * EVERY, survives=_NONE_BEFORE),
    Fault(name="a disk that fails (EIO) while a checkpoint is written", layout="pipeline 2",
          named=("checkpoints/step-00000004", "Input/output error"), place=Place(STEP, call=3), may_lose=2 * EVERY,
          cause=partial(_fill, pattern="/run/checkpoints/.step-00000004", size=50_000, error=errno.EIO),
          survives=_NONE_BEFORE),
    Fault(name="a slow disk (0.1 s for each write and flush)", layout="context 2", named=(),
          place=Place(STEP, call=3, rank=0), cause=_slow, status=(0,), may_lose=0, survives="the run"),
    Fault(name="the folder of the run is removed", layout="data 2", named=_RUN_GONE, place=IN_SIXTH, may_lose=12,
          cause=partial(_remove, name="run"), loses_all=True, survives="nothing: the checkpoints were in the folder"),
    Fault(name="the folder of the run is renamed", layout="pipeline 2", named=_RUN_GONE, place=IN_SIXTH,
          cause=partial(_move, name="run"), cure=_move_back),
    Fault(name="the folder of the checkpoints is removed", layout="context 2", named=(), place=IN_SIXTH, status=(0,),
          cause=partial(_remove, name="run/checkpoints"), survives="the run, which creates the folder again"),
    Fault(name="the folder of the tokens is removed", layout="tensor 2", named=(), place=IN_SIXTH,
          cause=partial(_remove, name="tokens"), status=(0,), survives="the run, which has the files open"),
    Fault(name="the folder of the tokens is renamed", layout="data 2", named=(), place=IN_SIXTH,
          cause=partial(_move, name="tokens"), status=(0,), survives="the run, which has the files open"),
]  # fmt: skip
