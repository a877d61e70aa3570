"""A small model with and without a teacher: bits per byte for the same tokens, and for the same FLOPs.

    python benchmarks/training/students.py BOOKS.jsonl.zst --keep FOLDER --json docs/students-measured.json

The teacher is trained first, on the same text. The students then train with every seed: without a teacher for the same
tokens; without a teacher for as many tokens as cost the FLOPs of the student and of the teacher's forward passes
together; with the teacher beside them; with its stored logits of the whole vocabulary, whose losses must equal those of
the teacher beside them; and with its stored likeliest logits. Every run is a `crosscut train`. All have the same
settings but the number of steps, and a token is a byte, so that few steps teach more than how frequent the tokens are.

With `--keep FOLDER`, the runs stay in the folder, and the same command keeps finished runs.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import aligned, command_line, run_crosscut, work_folder, write_figures
from benchmarks.machine import describe_machine, print_machine
from crosscut.cli.arguments import run_from
from crosscut.config import DataConfig, RunConfig
from crosscut.data import prepare
from crosscut.logbook.contents import read_metrics
from crosscut.planner.compute import flops_per_step
from crosscut.scaling.quality.runs import train_all

VOCABULARY = 257
"""The bytes and the end of a text."""

SHARED = (
    f"model.vocab_size={VOCABULARY}", "recipe=small", "model.max_sequence_length=128", "model.dropout=0.0",
    "training.sequence_length=128", "training.batch_size=8", "training.precision=float32", "training.device=cpu",
    "training.validation_sequences=256", "checkpoint.keep=1", "layout.tensor=1", "output.sample_tokens=0",
)  # fmt: skip
TEACHER = ("model.num_layers=4", "model.hidden_size=128", "model.num_heads=4", "optimizer.learning_rate=0.002")
STUDENT = ("model.num_layers=2", "model.hidden_size=64", "model.num_heads=2", "optimizer.learning_rate=0.003")
LIKELIEST = 16
"""Number of stored logits of the smaller cache."""


class Arm(NamedTuple):
    """A way to train the student."""

    name: str
    settings: tuple[str, ...] = ()
    cost: float = 1.0
    """FLOPs of a step, as a multiple of those of the student alone."""
    steps: float = 1.0
    """Number of steps, as a multiple of those of the others."""


def settings_of(folder: Path, tokens: Path, name: str, steps: int, settings: Sequence[str]) -> tuple[str, ...]:
    """Settings of a run in the folder of the study."""
    pace = (f"training.steps={steps}", f"checkpoint.every={steps}", f"training.validate_every={max(1, steps // 8)}")
    return (*SHARED, *pace, *settings, f"data.tokens={tokens}", f"output.folder={folder / name}")


def arms_of(teacher: RunConfig, student: RunConfig, cache: Path) -> list[Arm]:
    """The ways to train the student, and what each costs. A third of a model's FLOPs are those of its forward pass."""
    live = 1 + flops_per_step(teacher) / 3 / flops_per_step(student)
    place = f"teacher.folder={teacher.output.folder}"
    whole, some = (f"teacher.cache={cache}-{k}" for k in (VOCABULARY, LIKELIEST))
    return [
        Arm("alone, same tokens"),
        Arm("alone, same FLOPs", steps=live),
        Arm("teacher beside it", (place,), cost=live),
        Arm("stored logits, all", (place, whole, f"teacher.k={VOCABULARY}")),
        Arm(f"stored logits, {LIKELIEST}", (place, some, f"teacher.k={LIKELIEST}")),
    ]


def figures_of(run: RunConfig, cost: float) -> dict[str, Any]:
    """Figures of a finished run: its validations, and the losses of its steps."""
    folder = Path(run.output.folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    rows = read_metrics(folder)
    return {
        "steps": run.training.steps,
        "tflop": run.training.steps * cost * flops_per_step(run) / 1e12,
        "bits_per_byte": summary["validation_bits_per_byte_after"],
        "training_seconds": summary["training_seconds"],
        "losses": [row["loss"] for row in rows if "loss" in row],
    }


def study(steps: int, taught: int, seeds: int, folder: Path, tokens: Path) -> dict[str, Any]:
    """Train the teacher for `taught` steps, and all students."""
    settings = partial(settings_of, folder, tokens)
    teacher = run_from(settings("teacher", taught, TEACHER))
    train_all([teacher], at_once=1)
    arms = arms_of(teacher, run_from(settings("student", steps, STUDENT)), folder / "logits")
    found: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for seed, arm in product(range(1, seeds + 1), arms):
        own = tuple(f"{one}-{seed}" if one.startswith("teacher.cache=") else one for one in arm.settings)
        name = f"{arm.name.replace(', ', '-').replace(' ', '-')}-{seed}"
        chosen = settings(name, round(steps * arm.steps), (*STUDENT, *own, f"training.seed={seed}"))
        run = run_from(chosen)
        if run.teacher.cache:
            run_crosscut("prepare", "teacher", *chosen)
        train_all([run], at_once=1)
        found[arm.name].append(figures_of(run, arm.cost))
    return {"teacher": figures_of(teacher, 1.0), "students": found}


def table_of(students: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Build the table: a row for each way to train the student."""
    rows = [["student", "steps", "TFLOP", "seconds", "bits per byte", "spread"]]
    for name, runs in students.items():
        bits = [run["bits_per_byte"] for run in runs]
        figures = (f"{statistics.mean(bits):.3f}", f"{min(bits):.3f} to {max(bits):.3f}")
        seconds = statistics.mean(run["training_seconds"] for run in runs)
        rows.append([name, f"{runs[0]['steps']:,}", f"{runs[0]['tflop']:.2f}", f"{seconds:.0f}", *figures])
    return aligned(rows)


def largest_difference(students: Mapping[str, Sequence[Mapping[str, Any]]]) -> float:
    """Largest difference of a step's loss with stored logits of the whole vocabulary from that beside the teacher, in
    the first tenth of the steps. Later, the rounding of float32 has grown in the weights.
    """
    pairs = zip(students["teacher beside it"], students["stored logits, all"], strict=True)
    first = (zip(*(one["losses"][: one["steps"] // 10] for one in pair), strict=True) for pair in pairs)
    return max(float(abs(a - b)) for losses in first for a, b in losses)


def main() -> None:
    """Train all runs, and print the table."""
    parser = command_line(__doc__, figures="write")
    parser.add_argument("text", help="text file, such as a .jsonl.zst of books")
    parser.add_argument("--keep", type=Path, help="folder that keeps the runs")
    parser.add_argument("--steps", type=int, default=1000, help="number of steps of a student")
    parser.add_argument("--taught", type=int, default=4000, help="number of steps of the teacher")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    chosen = parser.parse_args()
    print_machine("torch")
    with work_folder(chosen.keep) as folder:
        tokens = prepare(DataConfig(text=(chosen.text,), vocab_size=VOCABULARY), folder / "tokens", seed=1)
        found = study(chosen.steps, chosen.taught, chosen.seeds, folder, tokens.path)
    print(f"teacher: {found['teacher']['bits_per_byte']:.3f} bits per byte")
    print(table_of(found["students"]))
    difference = found["difference"] = largest_difference(found["students"])
    print(f"losses beside the teacher and with all logits stored, first tenth of the steps: differ by {difference:.1e}")
    for one in (found["teacher"], *(run for runs in found["students"].values() for run in runs)):
        del one["losses"]
    write_figures(chosen.json, {"machine": describe_machine("torch"), **found})


if __name__ == "__main__":
    main()
