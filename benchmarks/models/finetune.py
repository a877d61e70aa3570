"""Fine-tuning a published BERT for SST-2 and RTE, beside the `Trainer` of transformers: scores of five seeds each.

    python benchmarks/models/finetune.py MODEL --data FOLDER --output FOLDER

MODEL is the Hugging Face folder of a BERT, such as all-MiniLM-L6-v2. FOLDER has GLUE's files: `sst2_train.tsv`,
`sst2_dev.tsv`, `rte_train.tsv` and `rte_dev.tsv`. SST-2 is trained on its first 20,000 sentences for one epoch, and RTE
on all pairs for three epochs. Both programs use batches of 32 texts, padded to the longest text of the batch, at most
128 tokens, AdamW at 2e-5 with a linear decay after a warm-up of 6% of the steps, a weight decay of 0.01, clipping at
1.0 and the model's dropout. A score is the accuracy on the development examples of the last checkpoint for SST-2, and
of the best of the three epochs for RTE.

The runs of both programs alternate seed by seed. Finished seeds are kept in the output folder, so an interrupted
command continues where it was.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.machine import describe_machine, print_machine
from benchmarks.turns import CORES
from crosscut.config import write_whole
from crosscut.finetuning.tasks import Examples, accuracy, read_glue

FIRST_SEED = 1234
BATCH, LENGTH, RATE, WARMUP, DECAY = 32, 128, 2e-5, 0.06, 0.01


@dataclass(frozen=True)
class Case:
    """A task with its files."""

    task: str
    name: str
    """Beginning of the names of the files."""
    epochs: int
    limit: int | None
    """Number of examples to train on; None for all."""


CASES = (Case("sst-2", "sst2", 1, 20_000), Case("rte", "rte", 3, None))


def part_of(case: Case, part: str, data: Path, output: Path) -> Path:
    """Path of the examples of a part. The first examples of a long file are copied into the output folder."""
    path = data / f"{case.name}_{part}.tsv"
    if part != "train" or case.limit is None:
        return path
    copy = output / path.name
    with path.open(encoding="utf-8") as lines:
        write_whole(copy, "".join(islice(lines, case.limit + 1)))
    return copy


def ours(case: Case, model: Path, files: Sequence[Path], folder: Path, seed: int) -> float:
    """Fine-tune with Crosscut. Return the accuracy."""
    typed = [
        "finetune", case.task, "--model", str(model), "--train", str(files[0]), "--dev", str(files[1]),
        "--output", str(folder), "--epochs", str(case.epochs), "--warmup", str(WARMUP),
        f"training.batch_size={BATCH}", f"training.sequence_length={LENGTH}", f"training.seed={seed}",
        f"optimizer.learning_rate={RATE}", f"optimizer.weight_decay={DECAY}", "training.precision=float32",
    ]  # fmt: skip
    resumed = ["--resume"] if (folder / "task.json").exists() else []
    command = typed if not resumed else ["finetune", case.task, "--output", str(folder), "--resume"]
    done = subprocess.run([sys.executable, "-m", "crosscut", *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"`crosscut {' '.join(command)}` ended with status {done.returncode}:\n{done.stderr}")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return float(summary["scores"]["dev"]["accuracy"])


def theirs(case: Case, model: Path, files: Sequence[Path], folder: Path, seed: int) -> float:
    """Fine-tune with the `Trainer` of transformers. Return the accuracy."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    torch.set_num_threads(CORES)
    tokenizer = AutoTokenizer.from_pretrained(model)
    train, dev = (encoded(read_glue(case.task, path), tokenizer) for path in files)
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, per_device_eval_batch_size=64, learning_rate=RATE,
        num_train_epochs=case.epochs, weight_decay=DECAY, warmup_steps=WARMUP, lr_scheduler_type="linear", seed=seed,
        eval_strategy="epoch", save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        AutoModelForSequenceClassification.from_pretrained(model, num_labels=2),
        arguments,
        train_dataset=train,
        eval_dataset=dev,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda told: {"accuracy": accuracy(told.predictions.argmax(-1).tolist(), told.label_ids)},
    )
    trainer.train()
    return max(float(row["eval_accuracy"]) for row in trainer.state.log_history if "eval_accuracy" in row)


def encoded(examples: Examples, tokenizer: Any) -> list[dict[str, Any]]:
    """Tokens and label of each example, as the `Trainer` takes them."""
    return [
        {**tokenizer(one.text, one.pair, truncation=True, max_length=LENGTH), "labels": one.label}
        for one in examples.examples
    ]


def measure(case: Case, options: argparse.Namespace) -> dict[str, list[float]]:
    """Scores of every seed of both programs."""
    files = [part_of(case, part, options.data, options.output) for part in ("train", "dev")]
    scores: dict[str, list[float]] = {"crosscut": [], "transformers": []}
    for number in track(range(options.seeds), case.task, console=Console(stderr=True)):
        for program, run in (("crosscut", ours), ("transformers", theirs)):
            kept = options.output / f"{case.name}-{program}-{number}.json"
            if not kept.exists():
                folder = options.output / f"{case.name}-{program}-{number}"
                score = run(case, options.model, files, folder, FIRST_SEED + number)
                write_whole(kept, json.dumps({"machine": describe_machine("torch", "transformers"), "score": score}))
            scores[program].append(json.loads(kept.read_text(encoding="utf-8"))["score"])
    return scores


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder of a BERT")
    parser.add_argument("--data", type=Path, required=True, help="folder with GLUE's files")
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs and their scores")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=[case.task for case in CASES], help="one of the tasks; by default both")
    options = parser.parse_args(arguments)
    print_machine("torch", "transformers")
    options.output.mkdir(parents=True, exist_ok=True)
    table = Table("task", "program", "median", "smallest", "largest")
    for case in CASES:
        if options.only in (None, case.task):
            for program, scores in measure(case, options).items():
                figures = (statistics.median(scores), min(scores), max(scores))
                table.add_row(case.task, program, *(f"{100 * figure:.2f}" for figure in figures))
    Console().print(table)


if __name__ == "__main__":
    main()
