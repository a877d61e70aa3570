"""Cost of checkpoints: seconds that saving stops the training, and time and memory of loading on another layout.

    python benchmarks/recovery/checkpoint.py

Saving is compared with `torch.save` of the same state to the same disk, in turns within one run, while the same model
trains. The rows of the first table:

| row | seconds |
|---|---|
| held | training waits: in `Saver.save`, and at the next optimizer step until the copy to host memory is complete |
| slower meanwhile | extra time of the steps that run while the checkpoint is written |
| until written | from the start of saving until the checkpoint is complete on the disk |
| copy | copy to host memory, which overlaps with the next step |
| torch.save | `torch.save`, which does not flush to the disk |
| torch.save and fsync | `torch.save` and then a flush to the disk, as a checkpoint does |
| step | an undisturbed step |

Reading loads a checkpoint of a 2x2 layout on 4x1 and on 1x1. The peak of a rank is its memory above the memory before
it built the model; its share is the bytes of its own parameters and optimizer state.
"""

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import TINY_HELP, aligned, command_line, print_figures
from benchmarks.machine import one_line
from benchmarks.training.ranks import figures_of_loading, random_batches, rank_of, seconds_of_step
from crosscut.checkpoint import Progress, Saver, latest_good_checkpoint, load_checkpoint, save_checkpoint
from crosscut.checkpoint.saving.staging import HostBuffers
from crosscut.config import CheckpointConfig, Layout, RunConfig, load_run
from crosscut.launch import launch
from crosscut.model import GPT
from crosscut.parallel import ParallelMesh, RandomStreams
from crosscut.parallel.state.parameters import local_part
from crosscut.training.optimization.optimizer import make_optimizer, rules_of

FULL = {"num_layers": 6, "hidden_size": 512, "num_heads": 8, "vocab_size": 50_304, "max_sequence_length": 256}
TINY = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 512, "max_sequence_length": 32}


def make_run(model: dict[str, Any], layout: Layout) -> RunConfig:
    length = model["max_sequence_length"]
    training = {"batch_size": 4, "sequence_length": length, "steps": 1000}
    sizes = {"tensor": layout.tensor, "data": layout.data}
    model = {**model, "dropout": 0.0}
    return load_run({"model": model, "layout": sizes, "training": training, "optimizer": {"warmup_steps": 100}})


def progress_at(step: int, run: RunConfig) -> Progress:
    return Progress(step=step, samples=4 * step, layout=str(run.layout))


# Saving


def measure_saving(model: dict[str, Any], folder: Path, rounds: int) -> dict[str, Any]:
    """Measure the seconds of each row and round."""
    run = make_run(model, Layout())
    batches, steps = random_batches(run), iter(range(10**6))
    with rank_of(run) as trainer:

        def step() -> float:
            return seconds_of_step(trainer, next(steps), batches)

        step()
        config = CheckpointConfig(keep=1)
        state = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
        copies: list[float] = []
        HostBuffers.copy = timed(HostBuffers.copy, copies)  # type: ignore[method-assign]
        figures: dict[str, list[float]] = {}
        parts = {"model": trainer.model, "optimizer": trainer.optimizer, "config": config}
        with Saver(folder / "ours", **parts, is_first_rank=True) as saver:
            for number in range(rounds + 1):  # the first round creates the buffers and has a column of its own
                undisturbed = statistics.median(step() for _ in range(3))
                ours = save_beside(saver, progress_at(number + 1, run), step, undisturbed)
                row = {**ours, "copy": copies[-1], **save_with_torch(state, folder / "theirs.pt"), "step": undisturbed}
                for name, seconds in row.items():
                    figures.setdefault(name, []).append(seconds)
    num_bytes = sum(entry.size for entry in latest_good_checkpoint(folder / "ours").manifest.files.values())
    first = {name: values.pop(0) for name, values in figures.items()}
    return {"state_bytes": num_bytes, "first_round": first, "rounds": figures}


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def wrapper(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments)
        seconds.append(time.perf_counter() - start)
        return result

    return wrapper


def save_beside(saver: Saver, progress: Progress, step: Callable[[], float], undisturbed: float) -> dict[str, float]:
    held = saver.seconds_held + saver.copying.seconds_held
    start = time.perf_counter()
    saver.save(progress)
    writing = saver._writing
    assert writing is not None
    meanwhile = [step()]
    while not writing.done():
        meanwhile.append(step())
    written = time.perf_counter() - start
    held = saver.seconds_held + saver.copying.seconds_held - held
    return {"held": held, "slower meanwhile": sum(meanwhile) - len(meanwhile) * undisturbed, "until written": written}


def save_with_torch(state: dict[str, Any], path: Path) -> dict[str, float]:
    """Time `torch.save`, and then the flush that makes the file survive a power cut."""
    path.unlink(missing_ok=True)
    start = time.perf_counter()
    torch.save(state, path)
    saved = time.perf_counter() - start
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"torch.save": saved, "torch.save and fsync": time.perf_counter() - start}


def report_saving(figures: dict[str, Any]) -> None:
    print(f"Saving {figures['state_bytes'] / 1e6:,.0f} MB, one process; seconds")
    medians = {name: statistics.median(values) for name, values in figures["rounds"].items()}
    rows = [["", "median", "min", "max", "first"]]
    for name, values in figures["rounds"].items():
        columns = (medians[name], min(values), max(values), figures["first_round"][name])
        rows.append([name, *(f"{value:.3f}" for value in columns)])
    print(aligned(rows))
    print(f"held, relative to torch.save: {medians['held'] / medians['torch.save']:.3f} (goal at most 0.2)")
    print(f"copy, relative to torch.save: {medians['copy'] / medians['torch.save']:.3f} (a shorter step waits for it)")


# Reading


def write_checkpoint(run: RunConfig, root: Path) -> None:
    with rank_of(run) as trainer:
        trainer.step(0, random_batches(run))
        save_checkpoint(
            root, progress_at(1, run), model=trainer.model, optimizer=trainer.optimizer,
            is_first_rank=trainer.mesh.is_first_rank, keep=1,
        )  # fmt: skip


def load(stored: tuple[RunConfig, str], mesh: ParallelMesh) -> dict[str, float]:
    """Load the checkpoint of a run on this rank. Returns the seconds, and the bytes of the rank's own state."""
    run, checkpoint = stored
    model = GPT(run.model, mesh=mesh, streams=RandomStreams(mesh, 0), dtype=torch.float32)
    optimizer = make_optimizer(model, run.optimizer, rules=rules_of(run.model, run.optimizer))
    start = time.perf_counter()
    load_checkpoint(checkpoint, model=model, optimizer=optimizer, padded=model.padded_rows)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "share": 3 * sum(local_part(p.detach()).nbytes for p in model.parameters())}


def measure_reading(model: dict[str, Any], folder: Path) -> dict[str, Any]:
    written_by, read_by = Layout(tensor=2, data=2), [Layout(tensor=4), Layout()]
    launch(write_checkpoint, (make_run(model, written_by), folder / "large"), num_ranks=4)
    launch(write_checkpoint, (make_run(TINY, written_by), folder / "small"), num_ranks=4)
    start = time.perf_counter()
    good = latest_good_checkpoint(folder / "large")
    figures: dict[str, Any] = {"bytes": good.manifest.num_bytes, "verify": time.perf_counter() - start}
    for layout in read_by:
        small = (make_run(TINY, layout), str(latest_good_checkpoint(folder / "small").folder))
        arguments = (layout, load, small, (make_run(model, layout), str(good.folder)))
        if layout.world_size == 1:  # a single rank gets a process of its own, too
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                figures[str(layout)] = pool.submit(figures_of_loading, *arguments).result()
        else:
            figures[str(layout)] = launch(figures_of_loading, arguments, num_ranks=layout.world_size)
    return figures


def report_reading(figures: dict[str, Any]) -> None:
    rate = figures["bytes"] / 1e6 / figures["verify"]
    print(f"Reading {figures['bytes'] / 1e6:,.0f} MB that 2x2 wrote, file cache warm; verified at {rate:,.0f} MB/s")
    rows = [["", "seconds", "MB/s", "share MB", "peak MB", "peak / share"]]
    for layout, ranks in figures.items():
        if not isinstance(ranks, list):
            continue
        seconds = max(rank["seconds"] for rank in ranks)
        worst = max(ranks, key=lambda rank: rank["peak"] / rank["share"])
        total = sum(rank["share"] for rank in ranks)
        sizes = (f"{worst[name] / 1e6:.1f}" for name in ("share", "peak"))
        rate = f"{total / 1e6 / seconds:,.0f}"
        rows.append([layout, f"{seconds:.2f}", rate, *sizes, f"{worst['peak'] / worst['share']:.2f}"])
    print(aligned(rows))
    print("Peak of the rank with the highest ratio (goal at most 1.20).")


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = command_line(__doc__, tiny=TINY_HELP, figures="print")
    parser.add_argument("--rounds", type=int, default=5, help="checkpoints to save and time")
    parser.add_argument("--folder", type=Path, help="folder for temporary files")
    options = parser.parse_args(arguments)
    model = TINY if options.tiny else FULL
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="crosscut-checkpoint-") as folder:
        saving = measure_saving(model, Path(folder), options.rounds)
        reading = measure_reading(model, Path(folder))
    if print_figures(options, ("torch",), {"model": model, "saving": saving, "reading": reading}):
        return
    print(one_line(model))
    report_saving(saving)
    report_reading(reading)


if __name__ == "__main__":
    sys.exit(main())
