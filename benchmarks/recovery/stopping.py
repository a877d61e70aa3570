"""Seconds from a stop signal to the exit of the demo run with status 75 and a checkpoint to resume from.

    python benchmarks/recovery/stopping.py

The command starts the demo and sends SIGTERM after a few steps. Then it resumes the same run and sends SIGUSR1.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.machine import print_machine
from crosscut.checkpoint import list_checkpoints
from crosscut.cli.main import EXIT_REQUEUE

STEPS_BEFORE = 5
LIMIT = 10.0
"""Maximum number of seconds that a stop may take."""


def steps_done(run: Path) -> int:
    """Count the training steps in `metrics.jsonl`."""
    metrics = run / "metrics.jsonl"
    return metrics.read_text(encoding="utf-8").count('"loss"') if metrics.exists() else 0


def seconds_to_stop(run: Path, number: signal.Signals) -> float:
    """Start or resume the demo, send the signal, and check the exit status and the last checkpoint."""
    command = [sys.executable, "-m", "crosscut", "train", f"output.folder={run}", "--resume", "auto"]
    before = steps_done(run)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    try:
        while steps_done(run) < before + STEPS_BEFORE and process.poll() is None:
            time.sleep(0.02)
        begin = time.perf_counter()
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        seconds = time.perf_counter() - begin
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    step = int(list_checkpoints(run / "checkpoints")[-1].name.removeprefix("step-"))
    if process.returncode != EXIT_REQUEUE or step != steps_done(run):
        sys.exit(f"the run must stop with a checkpoint, but exited with {process.returncode}:\n{errors.decode()}")
    print(f"{number.name:<8} after step {step:>3}: {seconds:.2f} s, checkpoint of step {step}")
    return seconds


def main() -> None:
    """Measure and print. The exit status is 1 if a stop took too long."""
    print_machine("torch")
    with tempfile.TemporaryDirectory(prefix="crosscut-stopping-") as folder:
        seconds = [seconds_to_stop(Path(folder) / "demo", number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    sys.exit(max(seconds) > LIMIT)


if __name__ == "__main__":
    main()
