"""Bytes between two data ranks, and bits per byte, with gradients summed whole and in low rank.

    python benchmarks/training/low_rank.py [--steps 400] [--ranks 0 1 2 4]

A GPT-2 of 4 layers of width 128 trains on the State of the Union addresses that come with Crosscut, with
`recipe=small`. Rank 0 sums whole gradients. It trains on one process, because every layout trains the same model. The
bytes are those of the tensors that a data rank of two has summed in a step, as its record says (`measurements.jsonl`).
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import aligned, command_line, run_crosscut, work_folder
from benchmarks.machine import print_machine
from crosscut.logbook.contents import read_summary
from crosscut.logbook.schema import MEASUREMENTS_FILE

MODEL = (
    "recipe=small", "model.num_layers=4", "model.hidden_size=128", "model.num_heads=4", "model.max_sequence_length=128",
    "model.dropout=0.0", "training.sequence_length=128", "training.batch_size=8", "training.device=cpu",
    "data.text=builtin:state-of-the-union", "data.vocab_size=4096", "output.sample_tokens=0",
    "optimizer.learning_rate=0.002", "optimizer.warmup_steps=2", "checkpoint.every=0", "training.validate_every=0",
)  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ranks", type=int, nargs="+", default=[0, 1, 2, 4])
    arguments = parser.parse_args()
    print_machine("torch")
    rows = [("rank", "bytes of a step", "bits per byte", "validation loss")]
    with work_folder(None) as folder:
        for rank in arguments.ranks:
            settings = (*MODEL, f"optimizer.gradient_rank={rank}")
            alone, beside = folder / f"rank-{rank}", folder / f"rank-{rank}-of-two"
            run_crosscut("train", *settings, f"training.steps={arguments.steps}", f"output.folder={alone}")
            run_crosscut("train", *settings, "training.steps=4", "layout.data=2", f"output.folder={beside}")
            rows.append((str(rank), f"{bytes_of_step(beside):,}", *scores(alone)))
    print(aligned(rows))


def bytes_of_step(run: Path) -> int:
    """Bytes of the tensors that the first rank has summed with the other data rank in a step."""
    *_, measured = map(json.loads, (run / MEASUREMENTS_FILE).read_text(encoding="utf-8").splitlines())
    found: int = measured["ranks"][0]["message_bytes"]["data"]
    return found


def scores(run: Path) -> tuple[str, str]:
    """Bits per byte and loss of the validation at the end of a run."""
    summary = read_summary(run)
    assert summary is not None
    return f"{summary['validation_bits_per_byte_after']:.3f}", f"{summary['validation_loss_after']:.3f}"


if __name__ == "__main__":
    main()
