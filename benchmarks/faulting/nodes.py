"""Faults of the nodes of an elastic run under torchrun (`layout.elastic`), with the nodes of `recovery/elastic.py`.

A run adds the same numbers in another order after its number of ranks has changed. Its losses are therefore compared
with those of an undisturbed run up to rounding: in float64, they may differ by `MOST_APART`, relative to the loss.
"""

import random
import re
import time
from collections.abc import Callable

from benchmarks.faulting.scene import EVERY, Scene
from benchmarks.faulting.trial import LIMIT, Fault, Row, Trial
from benchmarks.recovery.elastic import MOST_APART, RUN, Failed, Group, compare, group
from benchmarks.recovery.runs import newest_step

NODES = "tensor 2 x data 2"
"""Layout of the runs: two nodes with two ranks each."""
_SETTINGS = (f"checkpoint.every={EVERY}",)
_CONTINUES = re.compile(r"The run continues on the layout .*?Steps to repeat: \d+\.", re.DOTALL)

Change = Callable[[Group, random.Random], None]


def _changed(change: Change, settings: tuple[str, ...] = _SETTINGS) -> Trial:
    """Return the trial that changes the nodes of a run, and compares the losses with an undisturbed run."""

    def trial(fault: Fault, scene: Scene, chance: random.Random, row: Row) -> None:
        settings_of_all = (f"data.text={scene.text}", *settings)
        try:
            with group(scene.run, *settings_of_all) as nodes:
                nodes.start_all()
                nodes.wait_for_steps(6)
                began = time.monotonic()
                change(nodes, chance)
                row.seconds = time.monotonic() - began
                nodes.wait_for_steps(3)
                nodes.stop()
                _judge(fault, nodes, row)
            row.status = 0
            _compare(scene, settings_of_all, row)
        except Failed as failure:
            row.problems.append(str(failure))

    return trial


def _judge(fault: Fault, nodes: Group, row: Row) -> None:
    """Note the messages of the restarts, and the steps that the run has repeated."""
    told = [" ".join(found.split()) for log in nodes.logs() for found in _CONTINUES.findall(log)]
    row.message = " ".join(dict.fromkeys(told))
    rows = nodes.restarts()
    seen = f"{row.message} {' '.join(str(each['restored_from']) for each in rows)}"
    row.right = all(re.search(text, seen) for text in fault.named)
    row.lose(max(int(each["steps_lost"]) for each in rows))
    if not row.right:
        row.problems.append(f"the output must name {fault.named}, but is: {seen}")


def _compare(scene: Scene, settings: tuple[str, ...], row: Row) -> None:
    """Train the same steps without torchrun and without a fault, and compare the losses."""
    disturbed, steps = scene.run, newest_step(scene.run)
    scene.base = (*RUN, *settings)
    scene.start_beside("layout.elastic=off", f"training.steps={steps}", "checkpoint.in_memory=0")
    if not scene.has_ended(LIMIT) or scene.status:
        row.problems.append(f"the undisturbed run must end well, but ends with {scene.status}: {scene.told()}")
        return
    _, apart = compare(disturbed, scene.run)
    row.same = apart <= MOST_APART
    if not row.same:
        row.problems.append(f"losses may differ by {MOST_APART:g} of the loss, but differ by {apart:.1e}")


def _lose(nodes: Group, chance: random.Random) -> int:
    """Kill all processes of a node, and return the node when the run has continued."""
    node = chance.randrange(2)
    nodes.restart_after(lambda: nodes.kill(node), f"after the loss of node {node}")
    return node


def _lose_and_bring_back(nodes: Group, chance: random.Random) -> None:
    node = _lose(nodes, chance)
    nodes.restart_after(lambda: nodes.start(node), f"after the return of node {node}")


def _kill_one_rank(nodes: Group, chance: random.Random) -> None:
    ranks = nodes.ranks_of(chance.randrange(2))
    nodes.restart_after(chance.choice(ranks).kill, "after the loss of a rank")


def _fault(name: str, trial: Trial, *named: str, survives: str = "the run, on the ranks that are left") -> Fault:
    return Fault(name=name, layout=NODES, named=named, trial=trial, status=(0,), compared="losses to 1e-10",
                 survives=survives)  # fmt: skip


_FEWER = r"continues on the layout tensor 2 x data 1\b.* instead of tensor 2 x data 2\b"
_MORE = r"continues on the layout tensor 2 x data 2\b.* instead of tensor 2 x data 1\b"
ELASTIC = [
    _fault("SIGKILL of a node of an elastic run", _changed(_lose), _FEWER, "disk"),
    _fault("SIGKILL of a node, which comes back", _changed(_lose_and_bring_back), _FEWER, _MORE,
           survives="the run, on all ranks again"),
    _fault("SIGKILL of a node, with checkpoints in memory",
           _changed(_lose, ("checkpoint.every=1000", "checkpoint.in_memory=2")), _FEWER, "memory"),
    _fault("SIGKILL of one rank of an elastic run", _changed(_kill_one_rank),
           r"continues on the layout tensor 2 x data 2\b", survives="the run, on all ranks"),
]  # fmt: skip
