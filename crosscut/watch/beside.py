"""Page beside a training run, in a process of its own, so that the training is the same with and without the page."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from crosscut.config.system.terminal import echo


@contextmanager
def page_beside(folder: Path) -> Iterator[None]:
    """Context in which a page shows the run in `folder`, which need not exist yet. Does nothing on ranks other than the
    first one.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    command = [sys.executable, "-m", "crosscut.watch", str(folder)]
    with subprocess.Popen(  # noqa: S603 (a session of its own, as Ctrl-C is for the training)
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        echo(f"{process.stdout.readline()}{process.stdout.readline()}", nl=False)
        try:
            yield
        finally:
            process.stdin.close()
    echo(f"watch  crosscut watch {folder} shows the run again")
