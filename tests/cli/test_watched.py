"""System calls of a training with the page beside it, and without."""

import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.cli.conftest import TINY

CHANGES = (
    "openat",
    "write",
    "pwrite64",
    "rename",
    "unlink",
    "unlinkat",
    "mkdir",
    "ftruncate",
    "fsync",
    "link",
    "rmdir",
)
"""Calls that change files."""


def asked_until_the_end(process: subprocess.Popen[str]) -> int:
    """Read the output of a training, and ask its page all the time. Returns the number of answers."""
    answers = []

    def ask(address: str) -> None:
        while process.poll() is None:
            try:
                with urlopen(f"{address}poll") as answer:
                    answers.append(answer.status)
            except OSError:
                return
            time.sleep(0.05)

    for line in process.stdout:
        if address := re.search(r"http://127\.0\.0\.1:\d+/", line):
            threading.Thread(target=ask, args=(address[0],)).start()
    process.wait()
    return answers.count(200)


def changes_of(folder: Path, book: Path, *options: str) -> tuple[Counter[tuple[str, str]], int]:
    """Train under `strace`. Returns the changes by call and file, and the number of the page's answers."""
    trace, run = folder / "trace", folder / "run"
    traced = ("strace", "-ff", "-qq", "-y", "-s", "0", "--seccomp-bpf", "-e", f"trace=execve,{','.join(CHANGES)}")
    training = (sys.executable, "-m", "crosscut", "train", *TINY, f"data.text={book}", f"output.folder={run}", *options)
    with subprocess.Popen((*traced, "-o", str(trace), *training), stdout=subprocess.PIPE, text=True) as process:
        answers = asked_until_the_end(process)
    assert process.returncode == 0
    found = Counter[tuple[str, str]]()
    for path in folder.glob("trace.*"):
        lines = path.read_text().splitlines()
        if not any('"crosscut.watch"' in line and "execve(" in line for line in lines):
            found.update(change for line in lines if (change := change_in(line, folder)))
    return found, answers


def change_in(line: str, folder: Path) -> tuple[str, str] | None:
    """Call and file of a line of the trace that changes a file in the folder."""
    call, _, rest = line.partition("(")
    if call == "execve" or str(folder) not in rest or " = -1 " in rest:
        return None
    if call == "openat" and not re.search(r"O_WRONLY|O_RDWR", rest):
        return None
    name = rest.split(f"{folder}/", 1)[1].split(">")[0].split('"')[0]
    return call, re.sub(r"[0-9a-f]{8,}|\d{9,}|(?<=\.)\d+", "N", name)


@pytest.mark.slow  # starts two trainings
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_training_changes_the_same_files_with_and_without_the_page(tmp_path, book):
    changes = []
    for name, options in (("plain", ()), ("watched", ("--watch",))):
        (tmp_path / name).mkdir()
        found, answers = changes_of(tmp_path / name, book, *options)
        assert (answers > 0) == bool(options)
        changes.append(found)
    plain, watched = changes
    assert ("openat", "run/metrics.jsonl") in plain and plain.total() > 100
    assert watched == plain
