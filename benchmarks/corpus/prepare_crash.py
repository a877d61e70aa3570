"""`crosscut prepare` is killed at random instants, again and again, and must end with what it makes unharmed.

    python benchmarks/corpus/prepare_crash.py                       # ten kills over the corpus that comes with Crosscut
    python benchmarks/corpus/prepare_crash.py --text BOOKS.jsonl.zst --kills 10

First the command runs unharmed. Then it starts over in another folder, and SIGKILL hits the command, one of its
workers or all of them at a random instant, after some more tasks or while it starts; the same command starts again,
until the kills are spent and it may end. Compared are all files that it leaves, byte by byte: tokens, tokenizer,
report, and every stage's parts. Times and the page that shows them differ, of course; a record's times are left out.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import tomli_w

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.machine import print_machine
from crosscut.data.sources import BUILTIN_CORPORA

TIMES = ("timings.json", "report.html", "config.toml", ".lock")
"""Files of a corpus that tell when, or where, it was made."""


@dataclass(frozen=True)
class Kill:
    """One kill and what it came to."""

    target: str
    seconds: float
    """After the start of the command."""

    before: int
    """Tasks that earlier starts had done."""

    finished: int
    """Tasks that were done by then."""


def main(arguments: list[str] | None = None) -> int:
    """Kill and compare; returns the exit status."""
    parser = argparse.ArgumentParser(description="Kill `crosscut prepare` at random instants and compare the result.")
    parser.add_argument("--text", type=Path, default=BUILTIN_CORPORA["builtin:state-of-the-union"])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    options = parser.parse_args(arguments)
    print_machine("pyarrow")
    with tempfile.TemporaryDirectory(prefix="crosscut-prepare-crash-", dir=options.folder) as temporary:
        unharmed, killed = (Corpus(Path(temporary) / name, options.text) for name in ("unharmed", "killed"))
        started = time.monotonic()
        unharmed.complete()
        print(f"unharmed: {time.monotonic() - started:.1f} s, {unharmed.finished()} tasks")
        kills, differing = kill_repeatedly(killed, unharmed, options.kills, random.Random(options.seed))
    for kill in kills:
        done = f"{kill.finished} tasks done, {kill.finished - kill.before} of them in this start"
        print(f"killed {kill.target:<8} after {kill.seconds:5.1f} s with {done}")
    print(f"{len(kills)} kills, {len(differing)} files differ{': ' if differing else ''}{', '.join(differing[:10])}")
    return 1 if differing or len(kills) < options.kills else 0


class Corpus:
    """A corpus and the one command that makes it, whatever state it is in."""

    def __init__(self, folder: Path, text: Path) -> None:
        self.folder = folder
        self._config = folder.with_suffix(".toml")
        table = {
            "folder": str(folder),
            "sources": [{"name": "text", "files": [str(text)]}],
            "ingest": {"part_mb": 1},
            "tokens": {"vocab_size": 2048},
            "engine": {"workers": 2},
        }
        self._config.write_text(tomli_w.dumps(table), encoding="utf-8")

    def start(self) -> subprocess.Popen[bytes]:
        """Start it in a session of its own."""
        command = [sys.executable, "-m", "crosscut", "prepare", str(self._config)]
        with self.folder.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def complete(self) -> None:
        """Let it run to its end."""
        if status := self.start().wait():
            told = self.folder.with_suffix(".log").read_text(errors="replace")[-4000:]
            sys.exit(f"the command must end well, but exited with {status}:\n{told}")

    def finished(self) -> int:
        """Tasks that are done."""
        return len(list(self.folder.glob("work/*/*.json")))

    def digests(self) -> dict[str, str]:
        """Name to hash of what it left."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file() and path.name not in TIMES)
        return {path.relative_to(self.folder).as_posix(): digest(path) for path in files}


def digest(path: Path) -> str:
    """SHA-256 of a file; a record's times are left out."""
    content = path.read_bytes()
    if path.suffix == ".json" and b'"seconds"' in content:
        content = json.dumps({**json.loads(content), "seconds": 0}).encode()
    return hashlib.sha256(content).hexdigest()


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Names of the files that only one has, or that are not the same in both."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def kill_repeatedly(
    killed: Corpus, unharmed: Corpus, count: int, chance: random.Random
) -> tuple[list[Kill], list[str]]:
    """Kill the command `count` times, each when it has done some more tasks, or while it starts, and let it end.

    Returns also the files that differ from the unharmed ones; where the command ends before it is killed, they are
    compared, and it begins anew, so that there is something to kill.
    """
    kills: list[Kill] = []
    differing: list[str] = []
    expected, tasks = unharmed.digests(), unharmed.finished()
    while len(kills) < count:
        started, before = time.monotonic(), killed.finished()
        process = killed.start()
        wanted = before + chance.randrange(2 * tasks // count)
        while process.poll() is None and killed.finished() < wanted:
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.2))  # anywhere in a task, between two, or in what follows the last
        if process.poll() is None:
            target = kill(process, chance.choice(["command", "worker", "all"]), chance)
            kills.append(Kill(target, time.monotonic() - started, before, killed.finished()))
        else:
            killed.complete()
            differing += differences(expected, killed.digests())
            shutil.rmtree(killed.folder)
    killed.complete()
    return kills, differing + differences(expected, killed.digests())


def kill(process: subprocess.Popen[bytes], target: str, chance: random.Random) -> str:
    """Kill the command, one of its workers (where there is one yet), or all; wait until all have ended."""
    family = psutil.Process(process.pid).children(recursive=True)
    if target == "all":
        os.killpg(process.pid, signal.SIGKILL)
    elif target == "worker" and family:
        chance.choice(family).kill()
    else:
        target = "command"
        process.kill()
    process.wait()
    psutil.wait_procs(family, timeout=30)
    return target


if __name__ == "__main__":
    sys.exit(main())
