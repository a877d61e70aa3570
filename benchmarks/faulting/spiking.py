"""Faults after which a run returns to an earlier state and leaves batches out (`training.on_spike=skip`).

The run trains other batches than the undisturbed run, so its end is compared with a second run, which has no fault and
leaves out the same batches by the record of the first run (`training.skips`).
"""

import random
import shutil

from benchmarks.faulting.inside import Place
from benchmarks.faulting.scene import Scene
from benchmarks.faulting.trial import LIMIT, Fault, Row, hit, require_same, resume
from benchmarks.processes import wait_until
from crosscut.config import write_toml
from crosscut.logbook.schema import SKIPS_FILE, SPIKES_FOLDER
from crosscut.logbook.skips import own_record

_UPDATE = "crosscut.training.step:Trainer.update"
_SKIP = ("training.on_spike=skip", "training.steps=100", "training.validate_every=0", "checkpoint.every=25")
"""Settings of a run that is long enough for a return: at most a tenth of its batches may be left out."""
_NOISE = ("training.on_spike=skip", "training.steps=240", "data.verify=false")
"""Settings of the run with a shard of noise, which the run reads near step 185."""
_FAULTY = 56
"""Call of `Trainer.update` that has the fault: step 56. The run keeps a copy of its state after step 50."""
_RETURNS = rf"Spike at step {_FAULTY}: .*The run rolls back to step 50 and leaves out"


def _repeat(fault: Fault, scene: Scene, chance: random.Random, row: Row) -> None:
    """Cause the fault, let the run end, and compare it with a run that repeats it from its record."""
    hit(fault, scene, chance, row)
    done = scene.steps_done()
    if scene.status:
        resume(None, scene, row)
        row.lost = max(0, done - scene.first_step())
    record = own_record(scene.run)
    if record is None or not record.events:
        row.problems.append(f"the run must record the spike, but does not: {scene.told()[-600:]}")
    if row.problems or record is None:
        return
    row.lose((row.lost or 0) + sum(event.spike_step - event.back_to for event in record.events))
    end = scene.end()
    scene.start_beside("training.on_spike=off", f"training.skips={scene.run / SPIKES_FOLDER / SKIPS_FILE}")
    if not scene.has_ended(fault.limit) or scene.status:
        row.problems.append(f"the run from the record must end well, but ends with {scene.status}: {scene.told()}")
        return
    repeated = scene.end()
    require_same(end, repeated, row, compared={*end, *repeated}, run="repeated")


def _kill_after_record(scene: Scene, _: random.Random) -> None:
    """SIGKILL all processes as soon as the return is recorded."""
    wait_until((scene.run / SPIKES_FOLDER / SKIPS_FILE).exists, LIMIT)
    scene.kill(0, 1, "launcher")


def _noise(scene: Scene, _: random.Random) -> None:
    """Make the run of `benchmarks/spikes.py` the run of the scene, with a shard of random tokens."""
    from benchmarks.spikes import make_corpora, make_run

    corpora = scene.root / "corpora"
    corpora.mkdir()
    make_corpora(corpora)
    scene.base = (str(scene.root / "run.toml"),)
    scene.text = corpora / "text.jsonl"
    write_toml(make_run(corpora, "noise", *_NOISE), scene.root / "run.toml")
    shutil.rmtree(scene.tokens, ignore_errors=True)
    (corpora / "noise").rename(scene.tokens)


def _spike(name: str, layout: str, *, act: str, may_lose: int = 8, **more: object) -> Fault:
    """Fault of rank 1 in step `_FAULTY`."""
    given = {"named": (_RETURNS,), "status": (0,), "survives": "the run, without the batches since step 50", **more}
    return Fault(name=f"{name}, with on_spike=skip", layout=layout, place=Place(_UPDATE, call=_FAULTY, rank=1, act=act),
                 trial=_repeat, compared="as the run from its record", may_lose=may_lose, **given)  # type: ignore[arg-type]  # fmt: skip


SPIKING = [
    _spike("NaN in a summed gradient of one data rank", "data 2", act="plant_nan", more=_SKIP),
    _spike("noise in one rank's shard of the gradients", "data 2", act="replace_gradients",
           more=(*_SKIP, "layout.sharding=zero2")),
    _spike("SIGKILL of all processes after a return was recorded", "context 2", act="plant_nan", more=_SKIP,
           cause=_kill_after_record, named=(), status=(-9,), may_lose=8 + 25,
           survives="the checkpoints and the record of the batches that are left out"),
    Fault(name="a shard of random tokens, with on_spike=skip", layout="data 2", cause=_noise, status=(0,),
          named=(r"Spike at step \d+: loss .*usually .*The run rolls back to step \d+ and leaves out",), trial=_repeat,
          compared="as the run from its record", may_lose=40, limit=2 * LIMIT,
          survives="the run, without the batches of the spikes"),
]  # fmt: skip
