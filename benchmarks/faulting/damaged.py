"""Faults of memory and of files: flipped bits, NaN, damaged tokens and checkpoints, and folders of other runs."""

import random
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.commands import environment_here
from benchmarks.faulting.inside import Place
from benchmarks.faulting.killed import STEP
from benchmarks.faulting.scene import COMMAND, EVERY, Scene
from benchmarks.faulting.trial import Fault
from benchmarks.processes import wait_until
from benchmarks.recovery.damages import cut_short, flip_bit, remove

_IN_NINTH = Place(STEP, call=10, rank=0)
_UPDATE = "crosscut.training.step:Trainer.update"
_DEVICE = ("Probably a value has changed in the memory of a device",)

Damage = Callable[[Path, random.Random], object]


def _damage_newest(scene: Scene, chance: random.Random, *, file: str, damage: Damage) -> None:
    """Kill the run and damage a file of the newest checkpoint."""
    # A thread of the run may still be writing the checkpoint.
    wait_until((scene.checkpoints / "step-00000008").exists, 60)
    scene.kill(0, 1, "launcher")
    scene.has_ended(30)
    damage(scene.newest() / file, chance)


def _checkpoint(name: str, file: str, damage: Damage, layout: str, *told: str) -> Fault:
    named = ("step-00000008", f"{file}|{told[0] if told else file}", "Continuing from `.*step-00000004`")
    return Fault(name=f"the newest checkpoint: {name}", layout=layout, named=named, place=_IN_NINTH,
                 cause=partial(_damage_newest, file=file, damage=damage), status=(-9,), may_lose=2 * EVERY + 1,
                 damages=True, at_resume=True, survives="the checkpoint before")  # fmt: skip


def _tokens(name: str, layout: str, file: str, damage: Damage, status: tuple[int, ...], *named: str) -> Fault:
    """Fault of a file of the tokens, before the run starts."""
    return Fault(name=name, layout=layout, named=(re.escape(file), *named), cure=_restore_tokens, status=status,
                 cause=partial(_damage_tokens, file=file, damage=damage), survives="nothing was done")  # fmt: skip


def _damage_tokens(scene: Scene, chance: random.Random, *, file: str, damage: Damage) -> None:
    shutil.copytree(scene.tokens, scene.root / "good tokens")
    damage(scene.tokens / file, chance)


def _restore_tokens(scene: Scene, _: random.Random) -> None:
    shutil.rmtree(scene.tokens)
    (scene.root / "good tokens").rename(scene.tokens)


def _summed_nan(axis: str) -> Fault:
    """Fault of one rank after the gradients have been summed over the ranks."""
    named = (rf"at step 7 they were not on rank 1 \(position 1 on the axis `{axis}`\)", *_DEVICE)
    return Fault(name=f"NaN in a summed gradient of one {axis} rank", layout=f"{axis} 2", status=(2,), named=named,
                 place=Place(_UPDATE, call=7, rank=1, act="plant_nan"),
                 survives="the weights from before the step")  # fmt: skip


def _second_run(scene: Scene, _: random.Random) -> None:
    """Start a second run in the folder of the first, and keep its output."""
    command, environment = [*COMMAND, *scene.arguments], environment_here(**scene.variables)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    with scene.logs()[-1].open("a", encoding="utf-8") as log:
        log.write(f"{done.stderr}second run ended with {done.returncode}\n")


def _other_settings(scene: Scene, _: random.Random) -> None:
    """Edit the config that one rank reads: a run with another width continues from these checkpoints."""
    scene.kill(0, 1, "launcher")
    scene.has_ended(30)
    scene.more = ("model.hidden_size=64",)


def _own_settings(scene: Scene, _: random.Random) -> None:
    scene.more = ()


DAMAGED = [
    *(Fault(name=f"a flipped bit in a weight {whose}", layout=layout,
            named=("`final_norm.bias` must have identical values", r"rank"), status=(2,),
            place=Place(STEP, call=7, rank=1, act="flip_bit"), survives="the checkpoints from before", may_lose=EVERY)
      for whose, layout in (("of one rank", "data 2"), ("that tensor ranks share", "tensor 2"))),
    Fault(name="NaN in a gradient of one rank", layout="data 2", status=(2,),
          named=("at step 7 they were not", *_DEVICE),
          place=Place("crosscut.parallel.state.gradients:GradientReducer.arm", call=7, rank=1, act="plant_nan"),
          survives="the weights from before the step"),
    *(_summed_nan(axis) for axis in ("data", "tensor", "context", "pipeline")),
    _tokens("a flipped bit in a token shard", "context 2", "train-0.tokens", flip_bit, (65,), "SHA-256"),
    _tokens("a token shard that is cut", "pipeline 2", "train-1.tokens", cut_short, (65,)),
    _tokens("a token shard that is missing", "data 2", "validation.tokens", remove, (2, 65)),
    _tokens("the manifest of the tokens is cut", "tensor 2", "manifest.json", cut_short, (2, 65)),
    _checkpoint("a flipped bit in a rank's tensors", "rank-1.safetensors", flip_bit, "tensor 2"),
    _checkpoint("a rank's tensors are cut", "rank-0.safetensors", cut_short, "data 2"),
    _checkpoint("a rank's tensors are missing", "rank-1.safetensors", remove, "pipeline 2"),
    _checkpoint("a flipped bit in the index", "tensors.json", flip_bit, "context 2"),
    _checkpoint("the manifest is cut", "manifest.json", cut_short, "data 2"),
    _checkpoint("the manifest is missing", "manifest.json", remove, "context 2"),
    Fault(name="a second run in the same folder", layout="context 2",
          named=("in use by process", "second run ended with 2"), place=Place(STEP, call=6, rank=0),
          cause=_second_run, status=(0,), survives="the first run"),
    Fault(name="a resumed run with another model", layout="tensor 2", at_resume=True,
          named=("hidden_size",), place=_IN_NINTH, cause=_other_settings, then=_own_settings, status=(-9,),
          survives="the checkpoints, bit by bit"),
]  # fmt: skip
