"""Training of the plain GPT-2 on characters, as a program of one file that many people start from.

    python benchmarks/contenders/plain_training.py --data FOLDER --output FOLDER

The program reads `train.bin` and `validation.bin`, files of 16-bit token ids, and takes random windows of them. It
trains with AdamW, a warm-up, a cosine and clipped gradients. Every `--every` steps it scores windows of the validation
ids and writes a checkpoint.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.contenders.plain_gpt import PlainGPT


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Learning rate of a step, counted from 0."""
    if step < options.warmup:
        return float(options.rate * (step + 1) / options.warmup)
    share = (step - options.warmup) / max(1, options.steps - options.warmup)
    return float(options.min_rate + 0.5 * (1 + math.cos(math.pi * share)) * (options.rate - options.min_rate))


def windows(ids: npt.NDArray[np.uint16], starts: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of the windows that begin at `starts`, each [windows, block]."""
    rows = np.stack([ids[start : start + block + 1] for start in starts.tolist()]).astype(np.int64)
    whole = torch.from_numpy(rows)
    return whole[:, :-1], whole[:, 1:]


@torch.no_grad()
def validation_loss(model: PlainGPT, ids: npt.NDArray[np.uint16], options: argparse.Namespace) -> float:
    """Mean loss of the first windows of the validation ids, which do not overlap."""
    number = min(options.validation, (len(ids) - 1) // options.block)
    starts = torch.arange(number) * options.block
    parts = [windows(ids, part, options.block) for part in starts.split(options.batch)]
    return sum(model(tokens, targets).item() * len(tokens) for tokens, targets in parts) / number


def train(options: argparse.Namespace) -> float:
    """Train and return the last validation loss."""
    torch.manual_seed(options.seed)
    training, validation = (
        np.fromfile(options.data / f"{name}.bin", dtype=np.uint16) for name in ("train", "validation")
    )
    model = PlainGPT(
        num_layers=options.layers, hidden_size=options.width, num_heads=options.heads,
        vocab_size=options.vocabulary, sequence_length=options.block,
    )  # fmt: skip
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.99))
    loss = validation_loss(model, validation, options)
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        starts = torch.randint(len(training) - options.block, (options.batch,))
        model(*windows(training, starts, options.block)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            loss = validation_loss(model, validation, options)
            print(f"step {step + 1}: validation loss {loss:.4f}", flush=True)
            options.output.mkdir(parents=True, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, options.output / "checkpoint.pt")
    (options.output / "result.json").write_text(json.dumps({"loss": loss}), encoding="utf-8")
    return loss


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    for name in ("layers", "heads", "width", "block", "batch", "steps", "warmup", "every", "validation", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--min-rate", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
