"""Faults of processes: kills, signals, and memory that is full."""

import os
import random
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks.faulting.inside import Place
from benchmarks.faulting.scene import EVERY, Scene
from benchmarks.faulting.trial import Cause, Fault

STEP = "crosscut.training.step:Trainer.step"
IN_SIXTH = Place(STEP, call=6, rank=0)
_WRITE = "crosscut.checkpoint.saving.writer:CheckpointWriter.write_data"
_FINISH = "crosscut.checkpoint.saving.writer:CheckpointWriter.finish"
_PUBLISH = "crosscut.checkpoint.storage:LocalFolder.publish"
_MEMORY = Path("/sys/fs/cgroup/memory")
_ALL = "the checkpoints, bit by bit"


def kill(*targets: int | str) -> Cause:
    """Return the cause that sends SIGKILL to ranks by number, and to the launching process by the name `launcher`."""
    return lambda scene, _: scene.kill(*targets)


def killed_rank(rank: int, places: dict[str, tuple[str, Place]]) -> list[Fault]:
    """Faults that kill one rank at each of the places. The keys are names, the values layouts and places."""
    named = (rf"rank {rank} of 2 was ended by SIGKILL", "other ranks were stopped")
    return [
        Fault(name=f"SIGKILL of rank {rank} {name}", layout=layout, named=named, place=place,
              cause=kill(rank), survives=_ALL)
        for name, (layout, place) in places.items()
    ]  # fmt: skip


def _send(scene: Scene, _: random.Random, *, number: signal.Signals, again: float = 0.0, to_all: bool = False) -> None:
    """Send a signal to the launching process (with `to_all`, also to the ranks), and again after some seconds."""
    for pid in (scene.launcher(), *(process.pid for process in scene.ranks().values() if to_all)):
        os.kill(pid, number)
    if again:
        time.sleep(again)
        with suppress(ProcessLookupError):
            os.kill(scene.launcher(), number)


def control_group(scene: Scene, kind: Path) -> Path:
    """Make a control group that is removed after the trial."""
    group = kind / f"crosscut-faults-{os.getpid()}"
    group.mkdir()
    scene.undo.append(group.rmdir)
    return group


def _fill_memory(scene: Scene, _: random.Random) -> None:
    """Put one rank into a control group with less memory than the rank has, so that the kernel kills the rank."""
    group, process = control_group(scene, _MEMORY), scene.ranks()[1]
    (group / "memory.limit_in_bytes").write_text(str(16 << 20), encoding="ascii")
    (group / "cgroup.procs").write_text(str(process.pid), encoding="ascii")
    (group / "memory.force_empty").write_text("0", encoding="ascii")


def _needs_group() -> str:
    return "" if os.access(_MEMORY / "cgroup.procs", os.W_OK) else "control groups of memory are not writable"


def _stopped(name: str, number: signal.Signals, layout: str, status: tuple[int, ...], **more: object) -> Fault:
    cause = partial(_send, number=number, to_all=bool(more.pop("to_all", False)))
    named = more.pop("named", (r"stopped after step \d+ of 12", r"checkpoints/step-\d+", "--resume auto"))
    place = more.pop("place", Place(STEP, call=7, rank=0))
    return Fault(name=name, layout=layout, named=named, place=place, cause=cause, status=status,
                 may_lose=0, survives="a checkpoint of the last step", **more)  # type: ignore[arg-type]  # fmt: skip


def _launcher(name: str, layout: str, place: Place, **more: object) -> Fault:
    return _killed(f"the launching process {name}", layout, place, kill("launcher"), **more)


def _all(name: str, layout: str, place: Place, **more: object) -> Fault:
    return _killed(f"all processes {name}", layout, place, kill(0, 1, "launcher"), **more)


def _killed(name: str, layout: str, place: Place, cause: Cause, **more: object) -> Fault:
    """Fault after which no process is left that could name it."""
    settings = {"survives": _ALL, **more}
    return Fault(name=f"SIGKILL of {name}", layout=layout, named=(), place=place, cause=cause, status=(-9,),
                 **settings)  # type: ignore[arg-type]  # fmt: skip


KILLED = [
    _launcher("at the start", "tensor 2", Place("crosscut.training.step:Trainer.__init__", rank=1),
              survives="nothing was done"),
    _launcher("in a step", "data 2", Place(STEP, call=7, rank=0)),
    _launcher("while a checkpoint is written", "pipeline 2", Place(_WRITE, call=2, rank=1), may_lose=2 * EVERY),
    _all("in a step", "context 2", Place(STEP, call=8, rank=1)),
    _all("between a checkpoint's files and its manifest", "tensor 2", Place(_FINISH, call=2, rank=0),
         may_lose=2 * EVERY),
    _all("between a checkpoint's manifest and its new name", "data 2", Place(_PUBLISH, call=2, rank=0),
         may_lose=2 * EVERY),
    *killed_rank(1, {
        "at the start": ("data 2", Place("crosscut.training.step:Trainer.__init__", rank=1)),
        "in a forward pass": ("pipeline 2", Place("crosscut.model.block:Block.forward", call=60, rank=1)),
        "in a backward pass": ("context 2", Place("torch:Tensor.backward", call=25, rank=1)),
        "in the reduction of gradients": ("data 2", Place("crosscut.parallel.state.gradients:GradientReducer.finish",
                                                          call=7, rank=1)),
        "in the optimizer's step": ("tensor 2", Place("crosscut.training.step:Trainer.update", call=6, rank=1)),
        "while a checkpoint is written": ("context 2", Place(_WRITE, call=1, rank=1)),
        "in a validation": ("tensor 2", Place("crosscut.training.loop:evaluate_loss", call=2, rank=1)),
    }),
    *killed_rank(0, {
        "between a checkpoint's files and its manifest": ("pipeline 2", Place(_FINISH, call=1, rank=0)),
        "while the report is written": ("tensor 2", Place("crosscut.training.job:write_report", rank=0)),
    }),
    _stopped("SIGTERM", signal.SIGTERM, "tensor 2", (75,)),
    _stopped("SIGUSR1", signal.SIGUSR1, "pipeline 2", (75,)),
    _stopped("SIGINT", signal.SIGINT, "context 2", (130,)),
    _stopped("SIGTERM to all processes", signal.SIGTERM, "data 2", (75,), to_all=True),
    _stopped("SIGTERM in a validation", signal.SIGTERM, "context 2", (75,),
             place=Place("crosscut.training.loop:evaluate_loss", call=2, rank=0)),
    Fault(name="SIGTERM, and again after 3 s", layout="tensor 2", named=(), status=(143,),
          place=Place(STEP, call=7, rank=0), cause=partial(_send, number=signal.SIGTERM, again=3.0), survives=_ALL),
    Fault(name="SIGINT, and again after 1 s", layout="data 2", named=("Interrupted", "--resume auto"),
          status=(130,), place=Place(STEP, call=7, rank=0), survives=_ALL,
          cause=partial(_send, number=signal.SIGINT, again=1.0)),
    Fault(name="the kernel kills a rank that needs too much memory", layout="data 2",
          named=("rank 1 of 2 was ended by SIGKILL", "ran out of memory"),
          place=Place(STEP, call=7, rank=1, act="grow", meets=True),
          cause=_fill_memory, needs=_needs_group, survives=_ALL),
    Fault(name="an allocation fails on one rank", layout="tensor 2",
          named=("rank 1 of 2 ran out of memory in `crosscut/", "training.micro_batch_size"),
          place=Place(STEP, call=7, rank=1, act="limit_memory"), survives=_ALL),
]  # fmt: skip
