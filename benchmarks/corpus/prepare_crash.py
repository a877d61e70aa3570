"""Kill `crosscut prepare` at random instants, again and again, and check that the files are the same as without kills.

    python benchmarks/corpus/prepare_crash.py                       # ten kills on the built-in corpus
    python benchmarks/corpus/prepare_crash.py --text BOOKS.jsonl.zst --kills 10

First the command runs unharmed. Then it starts in another folder, and SIGKILL hits the command, one of its workers, or
all of them at a random instant, while it starts or after some tasks. The same command then starts again, until all
kills are done, and runs to its end. All files of both runs are compared byte by byte: tokens, tokenizer, report, and
the parts of every stage. Files and fields that hold times or random ids are left out.
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
from crosscut.data.text.sources import BUILTIN_CORPORA

OF_THE_RUN = ("timings.json", "report.html", "config.toml", ".lock", ".crosscut")
"""Files of a corpus that hold times, paths or a random id, and so differ between runs."""


@dataclass(frozen=True)
class Kill:
    """One kill and its effect."""

    target: str
    seconds: float
    """Seconds from the start of the command to the kill."""

    before: int
    """Tasks that were done before this start."""

    finished: int
    """Tasks that were done after the kill."""


def main(arguments: list[str] | None = None) -> int:
    """Kill, compare and print. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Kill `crosscut prepare` at random instants and compare the result.")
    parser.add_argument(
        "--text", type=Path, default=BUILTIN_CORPORA["builtin:state-of-the-union"], help="jsonl file of texts"
    )
    parser.add_argument("--kills", type=int, default=10, help="number of kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random instants")
    parser.add_argument("--folder", type=Path, help="folder for temporary files")
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
    """Folder of a corpus, and the command that starts or resumes it."""

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
        """Start the command in a session of its own."""
        command = [sys.executable, "-m", "crosscut", "prepare", str(self._config)]
        with self.folder.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def complete(self) -> None:
        """Run the command to its end."""
        if status := self.start().wait():
            told = self.folder.with_suffix(".log").read_text(errors="replace")[-4000:]
            sys.exit(f"the command must end well, but exited with {status}:\n{told}")

    def finished(self) -> int:
        """Count the tasks that are done."""
        return len(list(self.folder.glob("work/*/*.json")))

    def digests(self) -> dict[str, str]:
        """Hash all files of the corpus, by name."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file() and path.name not in OF_THE_RUN)
        return {path.relative_to(self.folder).as_posix(): digest(path) for path in files}


def digest(path: Path) -> str:
    """Return the SHA-256 of a file. The seconds of a record are left out, and so is the record's own hash, which covers
    the seconds.
    """
    content = path.read_bytes()
    if path.suffix == ".json" and b'"seconds"' in content:
        content = json.dumps({**json.loads(content), "seconds": 0, "sha256": ""}).encode()
    return hashlib.sha256(content).hexdigest()


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return the names of files that differ, or that are in only one of the two folders."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def kill_repeatedly(
    killed: Corpus, unharmed: Corpus, count: int, chance: random.Random
) -> tuple[list[Kill], list[str]]:
    """Kill the command `count` times, while it starts or after some tasks, and let it end.

    Returns the kills and the files that differ from the unharmed run. If the command ends before its kill, its files
    are compared and the corpus starts again from nothing.
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
        time.sleep(chance.uniform(0.0, 0.2))  # any instant: in a task, between tasks, or after the last one
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
    """Kill the command, one of its workers (if one has started), or all. Wait until all processes have ended."""
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
