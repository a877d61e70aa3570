"""The first minutes of a small model: nanoGPT's recipe for a CPU, in Crosscut and in a plain program, in turns.

    python benchmarks/first_minutes.py
    python benchmarks/first_minutes.py --nanogpt FOLDER     # nanoGPT itself, too

The recipe has 4 layers of width 128 with 4 heads, windows of 64 characters, 12 windows a step, 2,000 steps, and AdamW
with a learning rate that falls from 1e-3 to 1e-4 after 100 steps of warm-up. `modern` is Crosscut with `recipe=modern`,
the same sizes and a quarter of the steps. The text is the first million characters of the State of the Union addresses
that come with Crosscut. All programs read the same ids and hold out the same text.

A program's time is that of its whole command, from the start of Python to its exit after the last checkpoint. Every 250
steps, each program scores 240 windows and writes a checkpoint. The figure of a program is the median over the turns.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.commands import ROOT, TINY_HELP, aligned, command_line, print_figures, run_command
from benchmarks.texts import addresses, take
from crosscut.config import DataConfig
from crosscut.data import TokenFolder, Tokenizer, prepare

GOAL = 0.95
"""Highest ratio of Crosscut's time to the plain program's time."""
MODERN_GOAL = 0.5
"""Highest ratio of the time of Crosscut's modern recipe to the plain program's time."""
MODERN_SHARE = 0.25
"""Number of steps of the modern recipe, as a share of the number of steps of the other programs."""
LETTERS = "\n" + "".join(map(chr, range(32, 127)))
"""Characters of the text. All other characters are left out."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes and numbers of steps. The defaults are nanoGPT's for a CPU."""

    layers: int = 4
    heads: int = 4
    width: int = 128
    block: int = 64
    batch: int = 12
    steps: int = 2000
    warmup: int = 100
    every: int = 250
    validation: int = 240
    rate: float = 1e-3
    min_rate: float = 1e-4
    characters: int = 1_000_000


TINY = Recipe(
    layers=1, heads=2, width=16, block=16, batch=4, steps=6, warmup=2, every=3, validation=8, characters=50_000
)


@dataclass(frozen=True)
class Data:
    """The prepared text."""

    tokens: Path
    """Token folder for Crosscut."""
    files: Path
    """Folder with the same ids as `train.bin` and `validation.bin`, for the other programs."""
    vocabulary: int


def make_data(folder: Path, recipe: Recipe) -> Data:
    """Write the text, a tokenizer of characters, and the ids of both."""
    letters = ("".join(letter for letter in text if letter in LETTERS) for text in addresses())
    text = take(letters, recipe.characters)
    (folder / "text.txt").write_text("\n\n".join(text)[: recipe.characters], encoding="utf-8")
    (folder / "letters.json").write_text(letter_tokenizer(), encoding="utf-8")
    tokens = folder / "tokens"
    data = DataConfig(text=(str(folder / "text.txt"),), tokenizer=str(folder / "letters.json"), train_to_validation=9)
    prepared = prepare(data, tokens, seed=1, progress=False)
    files = folder / "files"
    files.mkdir()
    np.concatenate([shard.tokens[:] for shard in prepared.train]).astype(np.uint16).tofile(files / "train.bin")
    np.asarray(prepared.validation.tokens[:]).astype(np.uint16).tofile(files / "validation.bin")
    shutil.copyfile(files / "validation.bin", files / "val.bin")  # nanoGPT's name
    assert Tokenizer.load(folder / "letters.json").vocab_size == prepared.vocab_size
    return Data(tokens, files, TokenFolder.open(tokens, verify=False).vocab_size)


def letter_tokenizer() -> str:
    """A tokenizer with one id for each character, as JSON."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    names = {letter: number for number, letter in enumerate([*LETTERS, "<|endoftext|>"])}
    made = Tokenizer(models.WordLevel(names, unk_token=" "))
    made.add_special_tokens(["<|endoftext|>"])
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return str(made.to_str())


def settings_of(recipe: Recipe, data: Data, output: Path) -> dict[str, object]:
    """Settings of Crosscut with every recipe."""
    return {
        "model.num_layers": recipe.layers, "model.num_heads": recipe.heads, "model.hidden_size": recipe.width,
        "model.max_sequence_length": recipe.block, "data.tokens": data.tokens, "data.text": [],
        "training.batch_size": recipe.batch, "training.sequence_length": recipe.block,
        "training.validate_every": recipe.every, "training.validation_sequences": recipe.validation,
        "training.device": "cpu", "checkpoint.every": recipe.every, "output.folder": output, "output.sample_tokens": 0,
    }  # fmt: skip


def command_of(name: str, settings: Mapping[str, object]) -> tuple[list[str], Path]:
    """Command of Crosscut with the recipe of this name, and its working folder."""
    words = [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "crosscut", "train", f"recipe={name}", *words], ROOT


def crosscut(recipe: Recipe, data: Data, output: Path) -> tuple[list[str], Path]:
    """Command of Crosscut on one rank, and its working folder."""
    settings = {
        "model.dropout": 0.0, "training.steps": recipe.steps, "optimizer.learning_rate": recipe.rate,
        "optimizer.min_learning_rate": recipe.min_rate, "optimizer.warmup_steps": recipe.warmup,
        "optimizer.weight_decay": 0.1, "optimizer.beta2": 0.99,
    }  # fmt: skip
    return command_of("small", {**settings_of(recipe, data, output), **settings})


def modern(recipe: Recipe, data: Data, output: Path) -> tuple[list[str], Path]:
    """Command of Crosscut with the modern recipe and a share of the steps, and its working folder."""
    steps = max(1, round(MODERN_SHARE * recipe.steps))
    return command_of("modern", {**settings_of(recipe, data, output), "training.steps": steps})


def plain(recipe: Recipe, data: Data, output: Path) -> tuple[list[str], Path]:
    """Command of the plain program, and its working folder."""
    options = {"data": data.files, "output": output, "vocabulary": data.vocabulary, **asdict(recipe)}
    del options["characters"]
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return [sys.executable, str(ROOT / "benchmarks" / "contenders" / "plain_training.py"), *words], ROOT


def nanogpt(folder: Path, recipe: Recipe, data: Data, output: Path) -> tuple[list[str], Path]:
    """Command of nanoGPT in a copy of its folder, and that copy."""
    copy = output.with_name(f"{output.name}-nanogpt")
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".git", "*.bin"))
    shutil.copytree(data.files, copy / "data" / "letters")
    settings = {
        "dataset": "letters", "out_dir": output, "device": "cpu", "compile": False, "bias": True, "dropout": 0.0,
        "eval_interval": recipe.every, "eval_iters": recipe.validation // recipe.batch, "log_interval": 50,
        "always_save_checkpoint": True, "block_size": recipe.block, "batch_size": recipe.batch,
        "n_layer": recipe.layers, "n_head": recipe.heads, "n_embd": recipe.width, "max_iters": recipe.steps,
        "lr_decay_iters": recipe.steps, "learning_rate": recipe.rate, "min_lr": recipe.min_rate,
        "warmup_iters": recipe.warmup, "beta2": 0.99, "gradient_accumulation_steps": 1, "weight_decay": 0.1,
    }  # fmt: skip
    return [sys.executable, "train.py", *(f"--{name}={value}" for name, value in settings.items())], copy


def loss_of(program: str, output: Path, printed: str) -> float:
    """Last validation loss of a program."""
    if program in {"crosscut", "modern"}:
        return float(json.loads((output / "summary.json").read_text(encoding="utf-8"))["validation_loss_after"])
    if program == "plain":
        return float(json.loads((output / "result.json").read_text(encoding="utf-8"))["loss"])
    return float(printed.rpartition("val loss ")[2].split()[0])


Program = Callable[[Recipe, Data, Path], tuple[list[str], Path]]
"""From a recipe, the text and the folder of the output to a command and its working folder."""


def measure(programs: Mapping[str, Program], recipe: Recipe, turns: int) -> dict[str, dict[str, Any]]:
    """Seconds and losses of every program, which run in turns."""
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "losses": []} for name in programs}
    with tempfile.TemporaryDirectory() as temporary:
        data = make_data(Path(temporary), recipe)
        for turn in range(turns):
            for name, make in programs.items():
                output = Path(temporary) / f"{name}-{turn}"
                words, folder = make(recipe, data, output)
                began = time.perf_counter()
                printed = run_command(words, folder=folder, environment={**os.environ, "COLUMNS": "200"})
                found[name]["seconds"].append(time.perf_counter() - began)
                found[name]["losses"].append(loss_of(name, output, printed))
    return found


def report(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the table, and the ratio with its goal."""
    rows: list[list[str]] = [["", "median s", "min s", "max s", "loss", "of plain"]]
    base = statistics.median(found["plain"]["seconds"])
    for name, figures in found.items():
        seconds, loss = figures["seconds"], statistics.mean(figures["losses"])
        middle = statistics.median(seconds)
        times = (f"{one:.1f}" for one in (middle, min(seconds), max(seconds)))
        rows.append([name, *times, f"{loss:.4f}", f"{middle / base:.2f}"])
    print(aligned(rows))
    print(
        f"goals: crosscut at most {GOAL} of the plain program's time and modern at most {MODERN_GOAL}, "
        "both at a loss no higher"
    )


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = command_line(__doc__, tiny=TINY_HELP, figures="print")
    parser.add_argument("--turns", type=int, default=3, help="runs of each program")
    parser.add_argument("--nanogpt", type=Path, help="folder of nanoGPT, which then runs, too")
    options = parser.parse_args(arguments)
    programs: dict[str, Program] = {"crosscut": crosscut, "plain": plain, "modern": modern}
    if options.nanogpt is not None:
        programs["nanogpt"] = partial(nanogpt, options.nanogpt)
    found = measure(programs, TINY if options.tiny else Recipe(), options.turns)
    if not print_figures(options, ("torch",), {"programs": found}):
        report(found)


if __name__ == "__main__":
    main()
