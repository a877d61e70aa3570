"""Spikes of the loss: three kinds of spikes are planted in a small run, found, undone and left out.

    python benchmarks/spikes.py                                          # about 2 minutes on two cores
    python benchmarks/spikes.py --layout layout.tensor=2 --clean 0       # on two tensor ranks, without the clean runs
    python benchmarks/spikes.py --replay runs/demo                       # the rule on a recorded run

Each kind runs with `training.on_spike` off and with skip, and twice more from the record of the second run. The
compared loss is the validation loss at the end. A run without spikes gives the loss to compare with. The faults are
planted at batches, by their position in the order of the samples, so that a run that leaves a batch out also leaves
the fault out:

- gradients: the gradients of one batch are replaced by noise with 1,000 times their norm;
- noise: the tokens of one shard, about a dozen batches in a row, are replaced by random ones;
- learning rate: the learning rate of ten batches is ten times as high as the schedule says. This run has a higher
  maximum of the learning rate, near the largest one at which it trains. At a low rate, ten times as much is harmless:
  the loss rises by less than a clean run's loss does in an unusual passage of the text.

The clean runs have 2,000 steps each and must raise no alarm (`training.on_spike=stop` ends a run at an alarm).
"""

import contextlib
import io
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.commands import aligned, command_line, write_figures
from benchmarks.faulting.inside import replace_gradients
from benchmarks.machine import describe_machine, print_machine
from benchmarks.texts import addresses, take
from benchmarks.training.ranks import CPU, trainer_of
from crosscut.config import RunConfig, TrainingError, load_run
from crosscut.data import open_tokens, prepare
from crosscut.launch import launch, process_group
from crosscut.logbook.contents import read_metrics
from crosscut.logbook.skips import own_record
from crosscut.parallel.state.parameters import local_part
from crosscut.training import step as training_step
from crosscut.training.batches import TokenBatches, batches_of, samples_of
from crosscut.training.loop import Loop
from crosscut.training.spikes.copies import StateCopies, steps_between_copies
from crosscut.training.spikes.order import SampleOrder, SampleSkip
from crosscut.training.spikes.rule import SpikeRule
from crosscut.training.step import Trainer

STEPS, BATCH, LENGTH = 400, 8, 64
SPIKE = 200
"""Step, counted from 0, whose batch gets the fault, for the two kinds that are planted at a step."""
CLEAN_STEPS = 2000
KINDS = ("gradients", "noise", "learning rate")
OPTIONS = {
    "learning rate": ("optimizer.learning_rate=4e-2", "optimizer.schedule=wsd", "optimizer.decay_steps=150"),
}
"""Settings of the runs of a kind that differ from `make_run`."""
_TEXT_BYTES = 800_000


def make_corpora(folder: Path) -> None:
    """Tokenize the text, and make a copy of the tokens in which noise replaces a short shard that is read near step
    `SPIKE`. The rest of both corpora is the same, in the same order.
    """
    lines = (json.dumps({"text": text}) for text in take(addresses(), _TEXT_BYTES))
    (folder / "text.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run = make_run(folder, "clean")
    prepare(run.data, Path(run.tokens_folder), seed=1, progress=False)
    shutil.copytree(folder / "clean", folder / "noise")
    samples = samples_of(run, open_tokens(run.data, Path(run.tokens_folder), verify=False))
    rows = samples.training.batch_from(SPIKE // 2 * BATCH, batch_size=SPIKE * BATCH).tokens
    starts = [row.astype(np.uint16).tobytes() for row in rows[::BATCH]]
    shards = [path.read_bytes() for path in sorted((folder / "noise").glob("train-*.tokens"))]
    read = [number for number, content in enumerate(shards) if any(start in content for start in starts[10:-10])]
    shortest = min(read, key=lambda number: len(shards[number]))
    path = sorted((folder / "noise").glob("train-*.tokens"))[shortest]
    tokens = np.memmap(path, dtype=np.uint16, mode="r+")
    tokens[:] = np.random.default_rng(1).integers(run.data.vocab_size // 2, size=len(tokens))


def make_run(folder: Path, name: str, *overrides: str) -> RunConfig:
    """Build the run with this name. Runs whose names begin with "noise" have the shard of noise in their corpus."""
    corpus = "noise" if name.startswith("noise") else "clean"
    text = [str(folder / "text.jsonl")]
    table: dict[str, Any] = {
        "model": {
            "num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 1024, "max_sequence_length": LENGTH,
        },
        "data": {"tokens": str(folder / corpus), "text": text, "vocab_size": 1024, "num_shards": 32},
        "training": {
            "steps": STEPS, "batch_size": BATCH, "sequence_length": LENGTH, "seed": 1,
            "validate_every": 0, "validation_sequences": 256,
        },
        "checkpoint": {"every": 100},
        "optimizer": {"learning_rate": 6e-3, "warmup_steps": 50},
        "output": {"folder": str(folder / "runs" / name.replace(" ", "-"))},
    }  # fmt: skip
    return load_run(table, overrides)


class Faults:
    """Faults that are planted at the batches of one rank."""

    def __init__(self, kind: str, trainer: Trainer, batches: TokenBatches) -> None:
        self.kind, self.trainer, self.batches = kind, trainer, batches
        self._update, self._rate = trainer.update, training_step.learning_rate
        trainer.update = self.update  # type: ignore[method-assign]

    def update(self, step: int, loss: torch.Tensor) -> Any:
        """Update the weights as the trainer does, with the fault if it belongs to this batch."""
        place = self.batches.order.first_sample(step) // BATCH - SPIKE
        if self.kind == "gradients" and place == 0:
            replace_gradients(self.trainer)
        factor = 10.0 if self.kind == "learning rate" and 0 <= place < 10 else 1.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training_step, "learning_rate", lambda *of, **run: factor * self._rate(*of, **run))
            return self._update(step, loss)


def train(run: RunConfig, kind: str = "", skips: tuple[SampleSkip, ...] = ()) -> dict[str, Any]:
    """Train a run on ranks that have been started. Returns its figures."""
    print(f"{Path(run.output.folder).name}, {run.training.steps} steps", file=sys.stderr)
    tokens, trainer = open_tokens(run.data, Path(run.tokens_folder), verify=False), trainer_of(run)
    batches = batches_of(run, samples_of(run, tokens), trainer.mesh)
    batches.order = SampleOrder(run.training, skips)
    Faults(kind, trainer, batches)
    folder = Path(run.output.folder)
    folder.mkdir(parents=True, exist_ok=True)
    loop, error, last = Loop(trainer, batches), "", float("nan")
    start = time.perf_counter()
    with loop.checkpoints.completed():
        try:
            last = loop.train().after.loss
        except TrainingError as raised:
            error = str(raised)
    record = own_record(folder)
    rows = [row for row in read_metrics(folder) if "loss" in row]
    return {
        "loss": last,
        "error": error,
        "seconds": time.perf_counter() - start,
        "step_seconds": statistics.median(row["seconds"] for row in rows),
        "events": [vars(event) for event in record.events] if record else [],
        "skips": batches.order.skips,
        "series": [(row["loss"], row["gradient_norm"]) for row in rows],
        "weights": [local_part(parameter.detach()).clone() for parameter in trainer.parameters],
        "copy": cost_of_copies(trainer),
    }


def cost_of_copies(trainer: Trainer) -> dict[str, float]:
    """Seconds of one copy of the state and of one judgement of the rule, and bytes of the copies."""
    copies, rule, times = StateCopies(trainer), SpikeRule(), []
    for step in range(5):
        start = time.perf_counter()
        copies.keep(step)
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    for step in range(500):
        rule.observe(step, 3.0 + step % 7 / 100, 1.0)
    return {"copy": min(times), "rule": (time.perf_counter() - start) / 500, "bytes": copies.num_bytes}


def measure(folder: Path, layout: tuple[str, ...], kinds: tuple[str, ...], num_clean: int) -> dict[str, Any]:
    """Run everything on one rank of the layout. Returns the figures, without the weights."""
    torch.set_num_threads(1)
    told: dict[str, Any] = {"kinds": {}, "clean": []}
    with process_group(CPU), contextlib.redirect_stdout(io.StringIO()):
        for kind in kinds:
            options = (*OPTIONS.get(kind, ()), *layout)
            without = train(make_run(folder, f"without {kind}", *options))
            off = train(make_run(folder, f"{kind} off", *options), kind)
            skip = train(make_run(folder, f"{kind} skip", "training.on_spike=skip", *options), kind)
            again = [train(make_run(folder, f"{kind} {n}", *options), kind, skip["skips"]) for n in (1, 2)]
            equal = all(_same(skip, other) for other in again)
            told["kinds"][kind] = {"without": without, "off": off, "skip": skip, "equal": equal}
        for seed in range(1, num_clean + 1):
            options = (f"training.seed={seed}", f"training.steps={CLEAN_STEPS}", "training.on_spike=stop")
            told["clean"].append(train(make_run(folder, f"seed {seed}", *options, *layout)))
    of_kinds = (row[name] for row in told["kinds"].values() for name in ("without", "off", "skip"))
    for result in (*told["clean"], *of_kinds):
        del result["weights"]
        result["skips"] = [vars(skip) for skip in result["skips"]]
    return told


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two runs have the same losses and norms in all steps, and the same weights, to the last bit."""
    weights = zip(ours["weights"], theirs["weights"], strict=True)
    return ours["series"] == theirs["series"] and all(torch.equal(mine, other) for mine, other in weights)


def report(told: dict[str, Any]) -> None:
    """Print the figures."""
    rows = [["kind", "found at", "back to", "left out", "loss without", "off", "skip", "over clean", "two repeats"]]
    for kind, row in told["kinds"].items():
        events, skip, without = row["skip"]["events"], row["skip"]["loss"], row["without"]["loss"]
        found, back = (",".join(str(event[name]) for event in events) for name in ("spike_step", "back_to"))
        left = sum(event["sequences"] for event in events) // BATCH
        bits = "same bits" if row["equal"] else "DIFFERENT"
        losses = (f"{loss:.4f}" for loss in (without, row["off"]["loss"], skip))
        rows.append([kind, found, back, str(left), *losses, f"{skip / without - 1:.2%}", bits])
        rows += [[f"  {row['skip']['error']}"]] if row["skip"]["error"] else []
    print(aligned(rows))
    for result in told["clean"]:
        print(f"clean run of {len(result['series']):,} steps: {result['error'] or 'no alarm'}")
    one = next(iter([*(row["without"] for row in told["kinds"].values()), *told["clean"]]), None)
    if one is None:
        return
    cost, every, step = one["copy"], steps_between_copies(STEPS), one["step_seconds"]
    print(f"step {1000 * step:.1f} ms; rule {1e6 * cost['rule']:.0f} us a step ({cost['rule'] / step:.2%}); ", end="")
    print(f"copy {1000 * cost['copy']:.2f} ms every {every} steps ({cost['copy'] / every / step:.2%}), ", end="")
    print(f"{cost['bytes'] / 1e6:.1f} MB for two copies")


def replay(folder: Path) -> None:
    """Print what the rule says about the recorded metrics of a run."""
    rule, alarms, most = SpikeRule(), 0, [(0.0, 0.0), (0.0, 0.0)]
    rows = [row for row in read_metrics(folder) if row.get("loss") is not None and row.get("gradient_norm") is not None]
    for row in rows:
        alarm = rule.observe(row["step"] - 1, row["loss"], row["gradient_norm"])
        alarms += alarm is not None
        for number, figure in enumerate((rule.loss, rule.norm)):
            if (excess := figure.judged.excess) is not None and (scale := figure.judged.scale):
                most[number] = max(most[number], (excess, excess / scale))
    (loss, deviations), (norm, others) = most
    print(f"{folder}: {len(rows):,} steps, {alarms} alarms; at most loss {math.exp(loss):.3f} times ", end="")
    print(f"({deviations:.1f} s), norm {math.exp(norm):.2f} times ({others:.1f} s)")


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = command_line(__doc__)
    parser.add_argument("--layout", nargs="*", default=[], help="settings of the layout; one rank by default")
    parser.add_argument("--clean", type=int, default=3, help="number of clean runs")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="kinds of spikes; all by default")
    parser.add_argument("--json", type=Path, help="also write the figures and the series of the runs to this file")
    parser.add_argument("--replay", type=Path, nargs="+", help="only apply the rule to the metrics in these folders")
    options = parser.parse_args(arguments)
    if options.replay:
        for folder in options.replay:
            replay(folder)
        return
    print_machine("torch")
    with tempfile.TemporaryDirectory() as folder:
        make_corpora(Path(folder))
        layout = tuple(options.layout)
        ranks = make_run(Path(folder), "clean", *layout).layout.world_size
        given = (Path(folder), layout, tuple(options.kinds), options.clean)
        told: dict[str, Any] = launch(measure, given, num_ranks=ranks)
    report(told)
    write_figures(options.json, {"machine": describe_machine("torch"), **told})


if __name__ == "__main__":
    sys.exit(main())
