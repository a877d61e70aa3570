"""Hangs: a rank that stops in the middle of its work, without an error and without an end."""

import random
import signal
from contextlib import suppress

import psutil

from benchmarks.faulting.inside import Place
from benchmarks.faulting.killed import STEP
from benchmarks.faulting.scene import Scene
from benchmarks.faulting.trial import Fault


def _signal(scene: Scene, number: signal.Signals) -> None:
    with suppress(psutil.Error, KeyError):
        scene.ranks()[1].send_signal(number)


def stop(scene: Scene, _: random.Random) -> None:
    """Stop rank 1, as a debugger or an overloaded machine would."""
    _signal(scene, signal.SIGSTOP)


def go_on(scene: Scene, _: random.Random) -> None:
    """Let rank 1 go on."""
    _signal(scene, signal.SIGCONT)


def _hang(name: str, layout: str, place: Place, axis: str = "") -> Fault:
    named = ("DID NOT ARRIVE: rank 1", "is stopped", rf"over the axis `{axis}`" if axis else "WAITING: rank 0")
    return Fault(name=f"SIGSTOP of rank 1 {name}", layout=layout, named=named, place=place, cause=stop,
                 answer=go_on, status=(0,), may_lose=0,
                 survives="the run, which goes on as soon as the rank does")  # fmt: skip


HANGING = [
    _hang("before it takes its data", "data 2", Place("crosscut.training.batches:BatchesAhead.take", call=7, rank=1)),
    _hang("in a forward pass", "tensor 2", Place("crosscut.model.block:Block.forward", call=60, rank=1), "tensor"),
    _hang("in a backward pass", "context 2", Place("torch:Tensor.backward", call=25, rank=1)),
    _hang("in the reduction of gradients", "data 2",
          Place("crosscut.parallel.state.gradients:GradientReducer.finish", call=7, rank=1), "data"),
    _hang("in a pipeline stage", "pipeline 2", Place("crosscut.model.block:Block.forward", call=25, rank=1)),
    _hang("between two steps", "context 2", Place(STEP, call=7, rank=1)),
]  # fmt: skip
