"""Fine-tuning a published BERT for SST-2 and RTE, beside the `Trainer` of transformers: scores of five seeds each.

    python benchmarks/models/finetune.py MODEL --data FOLDER --output FOLDER

MODEL is the Hugging Face folder of a BERT, such as all-MiniLM-L6-v2. FOLDER has GLUE's files: `sst2_train.tsv`,
`sst2_dev.tsv`, `rte_train.tsv` and `rte_dev.tsv`. SST-2 is trained on its first 20,000 sentences for one epoch, and RTE
on all pairs for three epochs. Both programs use batches of 32 texts, padded to the longest text of the batch, at most
128 tokens, AdamW at 2e-5 with a linear decay after a warm-up of 6% of the steps, a weight decay of 0.01, clipping at
1.0 and the model's dropout. A score is the accuracy on the development examples of the last checkpoint for SST-2, and
of the best of the three epochs for RTE.

Both programs use a GPU if there is one, and neither compiles its model. `--at-once` runs several of them beside each
other, which changes their times and not their scores. Finished seeds are kept in the output folder, so an interrupted
command continues where it was. The last column is the score of the mean of the probabilities of all seeds.
"""

import argparse
import json
import multiprocessing as mp
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import aligned, command_line, run_crosscut
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


def files_of(case: Case, options: argparse.Namespace) -> tuple[Path, Path]:
    """Paths of the training and the development examples. The first examples of a long file have been copied."""
    train, dev = (options.data / f"{case.name}_{part}.tsv" for part in ("train", "dev"))
    return (train if case.limit is None else options.output / train.name), dev


def copy_first(case: Case, options: argparse.Namespace) -> None:
    """Copy the first training examples of a long file into the output folder."""
    if case.limit is not None:
        with (options.data / f"{case.name}_train.tsv").open(encoding="utf-8") as lines:
            write_whole(files_of(case, options)[0], "".join(islice(lines, case.limit + 1)))


def ours(case: Case, options: argparse.Namespace) -> None:
    """Fine-tune with all seeds of Crosscut, unless the output folder has their scores."""
    folder = options.output / f"{case.name}-crosscut"
    if (folder / "scores.json").exists():
        return
    train, dev = files_of(case, options)
    command = [
        "finetune", case.task, "--model", str(options.model), "--train", str(train), "--dev", str(dev),
        "--output", str(folder), "--epochs", str(case.epochs), "--warmup", str(WARMUP), "--seeds", str(options.seeds),
        "--ensemble", f"training.batch_size={BATCH}", f"training.sequence_length={LENGTH}",
        f"training.seed={FIRST_SEED}", f"optimizer.learning_rate={RATE}", f"optimizer.weight_decay={DECAY}",
        "training.precision=float32", "training.compile=off",
    ]  # fmt: skip
    if (folder / "task.json").exists():
        command = ["finetune", case.task, "--output", str(folder), "--resume"]
    run_crosscut(*command)


def theirs(case: Case, options: argparse.Namespace, number: int) -> None:
    """Fine-tune with one seed of the `Trainer` of transformers, unless the output folder has its score."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    folder = options.output / f"{case.name}-transformers-{number}"
    kept = folder.with_suffix(".json")
    if kept.exists():
        return
    torch.set_num_threads(CORES)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    train, dev = (encoded(read_glue(case.task, path), tokenizer) for path in files_of(case, options))
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=BATCH, per_device_eval_batch_size=64, learning_rate=RATE,
        num_train_epochs=case.epochs, weight_decay=DECAY, warmup_steps=WARMUP, lr_scheduler_type="linear",
        seed=FIRST_SEED + number,
        eval_strategy="epoch", save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2), arguments,
        train_dataset=train, eval_dataset=dev, data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda told: {"accuracy": accuracy(told.predictions.argmax(-1).tolist(), told.label_ids)},
    )  # fmt: skip
    trainer.train()
    score = max(float(row["eval_accuracy"]) for row in trainer.state.log_history if "eval_accuracy" in row)
    write_whole(kept, json.dumps({"machine": describe_machine("torch", "transformers"), "score": score}) + "\n")


def encoded(examples: Examples, tokenizer: Any) -> list[dict[str, Any]]:
    """Tokens and label of each example, as the `Trainer` takes them."""
    encode = partial(tokenizer, truncation=True, max_length=LENGTH)
    return [{**encode(one.text, one.pair), "labels": one.label} for one in examples.examples]


def gpu_name() -> str:
    """Name of the GPU; empty without one."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def run_all(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Fine-tune with all seeds of both programs."""
    with ProcessPoolExecutor(options.at_once, mp.get_context("spawn"), max_tasks_per_child=1) as pool:
        runs = [pool.submit(ours, case, options) for case in cases]
        runs += [pool.submit(theirs, case, options, number) for number in range(options.seeds) for case in cases]
        for done in track(as_completed(runs), "runs", total=len(runs), console=Console(stderr=True)):
            done.result()


def scores_of(case: Case, options: argparse.Namespace) -> dict[str, tuple[list[float], str]]:
    """Scores of all seeds and the score of the ensemble, by program. Transformers has no ensemble."""
    text = (options.output / f"{case.name}-crosscut" / "scores.json").read_text(encoding="utf-8")
    told: dict[str, Any] = json.loads(text)
    files = [options.output / f"{case.name}-transformers-{number}.json" for number in range(options.seeds)]
    ours = [one["dev"]["accuracy"] for one in told["seeds"].values()]
    theirs = [json.loads(path.read_text(encoding="utf-8"))["score"] for path in files]
    return {"crosscut": (ours, shown(told["ensemble"]["dev"]["accuracy"])), "transformers": (theirs, "")}


def shown(score: float) -> str:
    """Write a score as a percentage."""
    return f"{100 * score:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face folder of a BERT")
    parser.add_argument("--data", type=Path, required=True, help="folder with GLUE's files")
    parser.add_argument("--output", type=Path, required=True, help="folder for the runs and their scores")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=[case.task for case in CASES], help="one of the tasks; by default both")
    parser.add_argument("--at-once", type=int, default=1, help="number of runs beside each other")
    options = parser.parse_args(arguments)
    print_machine("torch", "transformers", device=gpu_name())
    options.output.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if options.only in (None, case.task)]
    for case in cases:
        copy_first(case, options)
    run_all(cases, options)
    table = [["task", "program", "median", "smallest", "largest", "ensemble"]]
    for case in cases:
        for program, (scores, ensemble) in scores_of(case, options).items():
            figures = (statistics.median(scores), min(scores), max(scores))
            table.append([case.task, program, *map(shown, figures), ensemble])
    print(aligned(table, left=2))


if __name__ == "__main__":
    main()
