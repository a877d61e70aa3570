"""Kill nodes of an elastic run at random instants, bring them back, and compare the losses with an undisturbed run.

    python benchmarks/recovery/elastic.py --kills 20                  # about half an hour on two cores
    python benchmarks/recovery/elastic.py --kills 20 --in-memory 5    # with checkpoints in the memory of the nodes

Two "nodes" of two ranks each train under torchrun in float64: an agent and its ranks are a node, and this program,
which is part of neither node, hosts the rendezvous. SIGKILL hits all processes of one node at once, and its memory is
removed. The other node continues on two ranks. The node then comes back, and the run continues on four ranks. The
undisturbed run is the measure: `metrics.jsonl` of the disturbed run must hold every step once, and each loss must
differ by at most 1e-10, relative to the loss.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line, work_folder
from benchmarks.machine import print_machine
from benchmarks.processes import told_in, wait_until
from benchmarks.recovery.runs import TINY, losses_of, newest_step, steps_done, write_text
from crosscut.checkpoint.in_memory import FOLDER_VARIABLE
from crosscut.logbook.contents import read_restarts

MOST_APART = 1e-10
"""Maximum difference of a loss, relative to the loss of the undisturbed run."""
PATIENCE = 1200.0
"""Seconds after which a run that does not continue counts as stuck."""
RANKS_PER_NODE = 2
MEMORY = Path("/dev/shm")

RUN = (
    *TINY, "model.dropout=0.0", "data.verify=false", "training.batch_size=8", "training.validate_every=0",
    "training.precision=float64", "training.steps=1000000", "optimizer.schedule=constant", "layout.tensor=2",
    "layout.data=2", "layout.sharding=zero2", "layout.elastic=data",
)  # fmt: skip


class Failed(SystemExit):
    """Failure of a run. Ends the program with a message unless it is caught."""


@dataclass
class Group:
    """Nodes that train one run, and the rendezvous of their agents."""

    folder: Path
    """Folder of the run."""
    settings: tuple[str, ...]
    port: int
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_all(self) -> None:
        """Start both nodes."""
        for node in range(2):
            self.start(node)

    def start(self, node: int) -> None:
        """Start the agent of a node."""
        rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-id={self.folder.name}",
                      "--rdzv-conf=is_host=0,last_call_timeout=2,keep_alive_interval=1")  # fmt: skip
        command = (sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", f"--nproc-per-node={RANKS_PER_NODE}",
                   "--max-restarts=1000", *rendezvous, "-m", "crosscut", "train", *RUN, *self.settings,
                   f"output.folder={self.folder}")  # fmt: skip
        self.memory_of(node).mkdir(exist_ok=True)
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
                       FOLDER_VARIABLE: str(self.memory_of(node))}  # fmt: skip
        with self.folder.with_suffix(f".node-{node}.log").open("ab") as log:
            self.agents[node] = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **environment}, start_new_session=True
            )

    def memory_of(self, node: int) -> Path:
        """Folder in memory that only this node uses."""
        return MEMORY / f"{self.folder.parent.name}-{self.folder.name}-{node}"

    def kill(self, node: int) -> None:
        """End all processes of a node by SIGKILL, and remove the node's memory, as if the machine were gone."""
        if agent := self.agents.pop(node, None):
            root = psutil.Process(agent.pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            agent.wait(10)
        shutil.rmtree(self.memory_of(node), ignore_errors=True)

    def ranks_of(self, node: int) -> list[psutil.Process]:
        """Processes of the ranks of a node."""
        children = psutil.Process(self.agents[node].pid).children()
        return [process for process in children if "crosscut" in process.cmdline()]

    def stop(self) -> None:
        """Let the ranks write a checkpoint and end, and end the agents."""
        for agent in self.agents.values():
            agent.send_signal(signal.SIGTERM)
        for agent in self.agents.values():
            agent.wait(60)
        self.agents.clear()

    def remove(self) -> None:
        """End all nodes that still run."""
        for node in range(2):
            self.kill(node)

    def steps_done(self) -> int:
        """Last step in `metrics.jsonl`."""
        return steps_done(self.folder)

    def restarts(self) -> list[dict[str, Any]]:
        """Rows of `restarts.jsonl`."""
        return read_restarts(self.folder)

    def wait_for(self, condition: Callable[[], bool], event: str) -> None:
        """Wait until a condition holds. Raises `Failed` if the run is stuck."""

        def is_over() -> bool:
            return condition() or all(agent.poll() is not None for agent in self.agents.values())

        if not wait_until(is_over, PATIENCE, every=0.05) or not condition():
            told = "\n".join(log[-3000:] for log in self.logs())
            raise Failed(f"the run must continue ({event}), but does not:\n{told}")

    def logs(self) -> list[str]:
        """Output of each node."""
        paths = sorted(self.folder.parent.glob(f"{self.folder.name}.node-*.log"))
        return [told_in(path, most=1 << 24) for path in paths]

    def restart_after(self, change: Callable[[], object], event: str) -> dict[str, Any]:
        """Change the nodes, wait until the run continues, and return the row of this restart."""
        seen = len(self.restarts())
        change()
        self.wait_for(lambda: len(self.restarts()) > seen, event)
        return self.restarts()[-1]

    def wait_for_steps(self, number: int) -> None:
        """Wait until the run has done more steps."""
        wanted = self.steps_done() + number
        self.wait_for(lambda: self.steps_done() >= wanted, f"step {wanted}")


@contextmanager
def group(folder: Path, *settings: str) -> Iterator[Group]:
    """Group of nodes with a rendezvous of its own. No process and no memory is left at the end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = Group(folder, settings, store.port)
    try:
        yield nodes
    finally:
        nodes.remove()


def disturb(nodes: Group, kills: int, chance: random.Random, told: Callable[[str], None]) -> None:
    """Kill one node after the other at random instants, and bring each of them back."""
    nodes.start_all()
    nodes.wait_for_steps(10)
    for number in range(kills):
        node = chance.randrange(2)
        time.sleep(chance.uniform(0.0, 2.0))
        lost = nodes.restart_after(lambda node=node: nodes.kill(node), f"after the loss of node {node}")
        time.sleep(chance.uniform(0.0, 1.0))
        back = nodes.restart_after(lambda node=node: nodes.start(node), f"after the return of node {node}")
        nodes.wait_for_steps(3)
        told(f"kill {number + 1}: node {node}, {describe(lost)}; back: {describe(back)}")


def describe(row: dict[str, Any]) -> str:
    """Text about a row of `restarts.jsonl`."""
    where = f"{row['before']} -> {row['after']}" if row["before"] != row["after"] else row["after"]
    lost = f"{row['steps_lost']} steps lost, {row['seconds_lost']:.1f} s"
    return f"{where} after step {row['step']} ({row['restored_from']}), {lost}"


def undisturbed(nodes: Group, steps: int) -> None:
    """Train the same run without a disturbance until it has done at least `steps` steps."""
    nodes.start_all()
    nodes.wait_for(lambda: nodes.steps_done() >= steps, f"step {steps}")
    nodes.stop()


def compare(disturbed: Path, whole: Path) -> tuple[int, float]:
    """Number of steps compared, and the largest relative difference of a loss. Raises `Failed` if the metrics of
    the disturbed run do not hold each step once.
    """
    mine, theirs = losses_of(disturbed), dict(losses_of(whole))
    if [step for step, _ in mine] != list(range(1, len(mine) + 1)):
        raise Failed(f"metrics.jsonl must hold each step from 1 to {len(mine)} once, but does not")
    return len(mine), max(abs(loss - theirs[step]) / theirs[step] for step, loss in mine)


def elastic(folder: Path, options: argparse.Namespace) -> bool:
    """Do all kills and print the figures. Returns whether the losses are those of the undisturbed run."""
    settings = (f"data.text={write_text(folder, copies=5)}", f"checkpoint.every={options.every}")
    if options.in_memory:
        settings = (*settings, f"checkpoint.in_memory={options.in_memory}")
    print_machine("torch")
    began = time.monotonic()
    with group(folder / "disturbed", *settings) as nodes:
        disturb(nodes, options.kills, random.Random(options.seed), lambda text: print(text, flush=True))
        nodes.stop()
        restarts = nodes.restarts()
    steps = newest_step(folder / "disturbed")
    with group(folder / "undisturbed", *settings) as nodes:
        undisturbed(nodes, steps)
    compared, apart = compare(folder / "disturbed", folder / "undisturbed")
    print(f"\n{options.kills} kills, {len(restarts)} restarts, {compared} steps, {time.monotonic() - began:,.0f} s; "
          f"a checkpoint every {options.every} steps, in memory every {options.in_memory or 'no'} steps")  # fmt: skip
    for name, rows in (("node lost", restarts[::2]), ("node back", restarts[1::2])):
        print_losses(name, rows)
    print(f"largest difference of a loss from the undisturbed run: {apart:.1e} of the loss (allowed: {MOST_APART:g})")
    return apart <= MOST_APART


def print_losses(name: str, rows: list[dict[str, Any]]) -> None:
    """Print the steps and seconds that restarts of one kind have lost."""
    if not rows:
        return
    seconds, steps = [row["seconds_lost"] for row in rows], [row["steps_lost"] for row in rows]
    places = {place: sum(row["restored_from"] == place for row in rows) for place in ("disk", "memory")}
    print(f"{name}: {len(rows)} restarts (from disk {places['disk']}, from memory {places['memory']}); seconds lost: "
          f"median {statistics.median(seconds):.1f}, at most {max(seconds):.1f}; steps lost: median "
          f"{statistics.median(steps):g}, at most {max(steps)}")  # fmt: skip


def main() -> None:
    """Read the options, and exit with status 1 if a check has failed."""
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="number of nodes that are killed")
    parser.add_argument("--seed", type=int, default=0, help="seed of the nodes and instants")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints on disk")
    parser.add_argument("--in-memory", type=int, default=0, help="steps between checkpoints in memory; 0 makes none")
    parser.add_argument("--keep", type=Path, help="new folder in which the runs and their logs are kept")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the nodes, too
    with work_folder(options.keep) as folder:
        well = elastic(folder, options)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
