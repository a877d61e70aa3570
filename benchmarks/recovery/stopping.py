"""Seconds from a stop signal to the exit of the demo run with status 75 and a checkpoint to resume from.

    python benchmarks/recovery/stopping.py

The command starts the demo and sends SIGTERM after a few steps. Then it resumes the same run and sends SIGUSR1.
"""

import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.machine import print_machine
from benchmarks.processes import session, told_in, wait_until
from benchmarks.recovery.runs import newest_step, steps_done
from crosscut.cli.main import EXIT_REQUEUE

STEPS_BEFORE = 5
LIMIT = 10.0
"""Maximum number of seconds that a stop may take."""


def seconds_to_stop(run: Path, number: signal.Signals) -> float:
    """Start or resume the demo, send the signal, and check the exit status and the last checkpoint."""
    command = [sys.executable, "-m", "crosscut", "train", f"output.folder={run}", "--resume", "auto"]
    wanted, log = steps_done(run) + STEPS_BEFORE, run.with_suffix(".log")
    with session(command, log) as process:
        wait_until(lambda: steps_done(run) >= wanted or process.poll() is not None, 600, every=0.02)
        begin = time.perf_counter()
        process.send_signal(number)
        status = process.wait(120)
        seconds = time.perf_counter() - begin
    step = newest_step(run)
    if status != EXIT_REQUEUE or step != steps_done(run):
        sys.exit(f"the run must stop with a checkpoint, but exited with {status}:\n{told_in(log)}")
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
