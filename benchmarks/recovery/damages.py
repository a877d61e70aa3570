"""Damages of checkpoints: bits, cuts, exchanges and losses of any file of a checkpoint, drawn at random.

`damage_at_random` damages the newest of several checkpoints. `find_all` damages copies of real checkpoints, again and
again, and checks that each damage is found, that the message names a damaged file, and that a run would continue from
the newest checkpoint that is still good.
"""

import contextlib
import io
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress

from crosscut.checkpoint import find_damage, folder_at, latest_good_checkpoint, list_checkpoints
from crosscut.checkpoint.folders import PASSED_OVER_FILE
from crosscut.checkpoint.format.manifest import MANIFEST_FILE
from crosscut.config.system.markers import MARKER_FILE

MOST_DAMAGES = 3
"""Maximum number of damages to one checkpoint."""


@dataclass(frozen=True)
class Damage:
    """One damage to one file."""

    kind: str
    file: str
    """Name of the file, or of the folder of the checkpoint."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.file}"


@dataclass
class Found:
    """Result of all damages."""

    number: int = 0
    """Number of damaged checkpoints."""
    kinds: dict[str, int] = field(default_factory=dict)
    """Number of damages by kind."""
    lost: list[str] = field(default_factory=list)
    """Damages that were not found or not named, and those after which no good checkpoint was left."""
    seconds: float = 0.0


def flip_bit(path: Path, chance: random.Random) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def cut_short(path: Path, chance: random.Random) -> None:
    """Cut the file at a random byte."""
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))])


def _extend(path: Path, chance: random.Random) -> None:
    with path.open("ab") as file:
        file.write(chance.randbytes(1 + chance.randrange(4096)))


def remove(path: Path, _: random.Random) -> None:
    """Remove the file."""
    path.unlink()


def _zero(path: Path, chance: random.Random) -> None:
    """Write zeros over a block, as a disk does that has lost a page."""
    content = bytearray(path.read_bytes())
    nonzero = [i for i in range(0, len(content), 512) if any(content[i : i + 512])]
    start = chance.choice(nonzero)
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(content)


REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "empty": Path.touch,
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nothing-here"),
}
"""Functions that create what takes the place of a file, by name."""


def _replaced(name: str) -> Callable[[Path, random.Random], object]:
    """Return the function that replaces the file."""
    return lambda path, _: (path.unlink(), REPLACEMENTS[name](path))


def _swap(path: Path, chance: random.Random) -> None:
    """Exchange the file with another file of the same checkpoint."""
    content = path.read_bytes()
    other = chance.choice([other for other in files_of(path.parent) if other.read_bytes() != content])
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _swap_steps(path: Path, chance: random.Random) -> None:
    """Replace the file with the file of the same name of another checkpoint."""
    others = [step / path.name for step in path.parent.parent.glob("step-*") if step != path.parent]
    shutil.copyfile(chance.choice([other for other in others if other.is_file()]), path)


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "a flipped bit": flip_bit,
    "a cut": cut_short,
    "bytes at the end": _extend,
    "a removed file": remove,
    "a block of zeros": _zero,
    "a folder in place of a file": _replaced("folder"),
    "a link to nowhere": _replaced("dangling"),
    "a pipe in place of a file": _replaced("fifo"),
    "files exchanged": _swap,
    "the file of another step": _swap_steps,
}


def files_of(checkpoint: Path) -> list[Path]:
    """List the regular files of a checkpoint, except for the mark of a damaged checkpoint and Crosscut's own marker,
    without which a checkpoint is still whole.
    """
    others = (MARKER_FILE, PASSED_OVER_FILE)
    return sorted(path for path in checkpoint.iterdir() if path.is_file() and path.name not in others)


def damage_at_random(checkpoint: Path, chance: random.Random) -> list[Damage]:
    """Damage one to three files of a checkpoint, each file once. Another checkpoint must be in the same folder."""
    damages = []
    if chance.random() < 1 / 20:
        return [_whole_step(checkpoint, chance)]
    for path in chance.sample(files_of(checkpoint), chance.randint(1, MOST_DAMAGES)):
        before = _content(path)
        kind = chance.choice([*DAMAGES])
        DAMAGES[kind](path, chance)
        if _content(path) != before:  # a file that an earlier exchange has replaced may be whole again
            damages.append(Damage(kind, path.name))
    return damages


def _whole_step(checkpoint: Path, chance: random.Random) -> Damage:
    """Replace every file with that of another step."""
    other = chance.choice(
        [step for step in checkpoint.parent.glob("step-*") if (step / MANIFEST_FILE).is_file() and step != checkpoint]
    )
    for path in files_of(other):
        (checkpoint / path.name).unlink(missing_ok=True)
        shutil.copyfile(path, checkpoint / path.name)
    return Damage("all files of another step", checkpoint.name)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def find_all(roots: list[Path], number: int, chance: random.Random, bar: Progress) -> Found:
    """Damage copies of the newest checkpoint in each of the folders `roots` in turn, `number` times in all."""
    found, began = Found(), time.monotonic()
    task = bar.add_task("damages", total=number, told="")
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="crosscut-damages-") as scratch:
        for i in range(number):
            copy = Path(scratch) / str(i)
            for folder in list_checkpoints(roots[i % len(roots)])[-3:]:
                shutil.copytree(str(folder), copy / folder.name)
            _damage_once(copy, chance, found)
            shutil.rmtree(copy)
            bar.update(task, advance=1, told=f"{len(found.lost)} lost")
    found.seconds = time.monotonic() - began
    return found


def _damage_once(root: Path, chance: random.Random, found: Found) -> None:
    """Damage the newest checkpoint, in a third of the cases also the one before, and check what a run would do."""
    *_, oldest, middle, newest = sorted(root.glob("step-*"))
    damaged = {newest: damage_at_random(newest, chance)}
    if chance.random() < 1 / 3:
        damaged[middle] = damage_at_random(middle, chance)
    found.number += 1
    for checkpoint, damages in damaged.items():
        for damage in damages:
            found.kinds[damage.kind] = found.kinds.get(damage.kind, 0) + 1
        told = " ".join(find_damage(folder_at(checkpoint)))
        if damages and not any(damage.file in told or MANIFEST_FILE in told for damage in damages):
            what = ", ".join(map(str, damages))
            found.lost.append(f"not found or not named: {checkpoint.name}, {what}; the message: {told or 'none'}")
    good = next(one for one in (newest, middle, oldest) if not damaged.get(one))
    with contextlib.redirect_stderr(io.StringIO()):
        chosen = latest_good_checkpoint(root).folder.name
    if chosen != good.name:
        found.lost.append(f"a run would continue from {chosen} and not from {good.name}")
