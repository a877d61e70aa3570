"""Scores of `crosscut evaluate` on whole test sets, compared with transformers on the same model.

    python benchmarks/models/scores.py FOLDER --lambada FILE --wikitext FILE     # a Hugging Face folder, tensor 1 and 3
    python benchmarks/models/scores.py FOLDER --lambada FILE --tensor 1 2
    python benchmarks/models/scores.py --tiny            # a random Llama and a few lines, to see that everything runs

Crosscut scores like the command, once for every `--tensor`. transformers gets the same ids, windows and targets. Its
loss is the cross entropy of its own logits, and its guess is the likeliest token, in float32 on the CPU. Both results
go through the same formulas. The figures of a row must agree to four significant digits: their difference must be at
most 5e-5 of the largest one. Otherwise the exit status is 1. `--json` writes the file again after every task of every
contender, so an interrupted run keeps its results.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.machine import describe_machine, print_machine
from benchmarks.models.evaluate import make_tiny
from crosscut.config import IGNORED, CrosscutError, EvaluationConfig, Layout, write_whole

CLOSE = 5e-5
"""Largest relative difference: half a unit of the fourth digit for figures that begin with 9, stricter for others."""
READ_TOGETHER = 2048
"""Tokens that transformers reads at once, unless one window is longer. 49,152 ids then need up to 400 MB of logits."""
TRANSFORMERS = "transformers"

TINY_PASSAGES = (
    "The state of the union is strong, and the state of our people is strong",
    "We have asked the congress for a budget, and it has given us no budget",
    "Let us begin, said the speaker, and then the house heard him begin",
    "Peace is what every nation wants, and what no nation has had is peace",
)
TINY_WORDS = """ = State of the Union =

 The well @-@ known message of the president is given once a year , and 1 @,@ 000 people hear it .
 It speaks of the state of the nation , of its laws , and of what the congress is asked to do .
 Once it was a letter , which a clerk read to both houses ; now it is a speech of about an hour .
"""


def score_as_crosscut(folder: str, config: EvaluationConfig, tensor: int) -> dict[str, Any]:
    """Score the one task of the config like `crosscut evaluate --tensor`."""
    from crosscut.evaluation.places import evaluate_place
    from crosscut.evaluation.ranks import Machinery

    on = Machinery(layout=Layout(tensor=tensor), device="cpu")
    (found,) = evaluate_place(folder, config, on)["tasks"].values()
    return dict(found)


def score_as_transformers(folder: str, config: EvaluationConfig) -> dict[str, Any]:
    """Score the one task of the config with the logits of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from crosscut.evaluation import Result, WindowScores
    from crosscut.evaluation.progress import Bar, progress

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    task = read_task(folder, config)
    table = np.zeros((len(task.windows), 3))
    num_tokens = sum(window.length for window in task.windows)
    began = time.perf_counter()
    with progress(Bar(task.name, shown=True), num_tokens) as advance:
        for group in in_groups(task.windows):
            windows = [task.windows[i] for i in group]
            table[group] = read_together(model, task.texts, windows)
            advance(sum(window.length for window in windows))
    losses, hits, last_hits = table.T
    return Result(
        task=task.name,
        found=task.figures(WindowScores(losses, hits.astype(np.int64), last_hits.astype(np.int64))),
        protocol=task.protocol,
        data=task.data,
        seconds=time.perf_counter() - began,
        tokens_read=num_tokens,
    ).to_json()


def read_task(folder: str, config: EvaluationConfig) -> Any:
    """Read the one task of a config like Crosscut."""
    from crosscut.evaluation import make_tasks
    from crosscut.pretrained import find_model

    source = find_model(folder)
    sizes = {"longest": source.model.max_sequence_length, "vocab_size": source.model.vocab_size}
    (task,) = make_tasks(config, source.load_tokenizer(), begin_of_text=source.begin_of_text, **sizes)
    return task


def in_groups(windows: Sequence[Any]) -> Iterator[list[int]]:
    """Group windows of similar length that are read together, the longest first."""
    order = sorted(range(len(windows)), key=lambda i: windows[i].length, reverse=True)
    while order:
        num = max(1, READ_TOGETHER // windows[order[0]].length)
        yield order[:num]
        del order[:num]


def read_together(model: Any, texts: Sequence[Any], windows: Sequence[Any]) -> list[tuple[float, int, int]]:
    """Score windows together: for each, the loss, the number of targets guessed, and 1 if the last target was guessed.

    Windows are padded at their ends, where no earlier token attends. The model computes only the logits from the
    earliest target on.
    """
    import torch
    import torch.nn.functional as F
    from torch.nn.utils.rnn import pad_sequence

    pieces = [torch.from_numpy(texts[window.text][window.start : window.stop]) for window in windows]
    tokens = pad_sequence([piece[:-1] for piece in pieces], batch_first=True)
    targets = pad_sequence([piece[1:] for piece in pieces], batch_first=True, padding_value=IGNORED)
    for row, window in zip(targets, windows, strict=True):
        row[: window.length - window.num_targets] = IGNORED
    kept = tokens.shape[1] - min(window.length - window.num_targets for window in windows)
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=kept).logits
    found = []
    for of_window, wanted in zip(logits, targets[:, -kept:], strict=True):
        of_window, wanted = of_window[wanted != IGNORED], wanted[wanted != IGNORED]
        loss = F.cross_entropy(of_window, wanted, reduction="none").double().sum()
        right = of_window.argmax(dim=1) == wanted
        found.append((float(loss), int(right.sum()), int(right[-1])))
    return found


def run(folder: str, configs: Mapping[str, EvaluationConfig], tensor: Sequence[int], output: Path | None) -> Any:
    """Let all contenders score each task. Returns the results by task and contender, and the machine."""
    found: dict[str, dict[str, Any]] = {name: {} for name in configs}
    machine = describe_machine("torch", TRANSFORMERS)
    result = {"machine": machine, "model": Path(folder).name, "precision": "float32", "tasks": found}
    for name, config in configs.items():
        contenders: dict[str, Callable[[], dict[str, Any]]] = {
            **{f"tensor {ranks}": partial(score_as_crosscut, folder, config, ranks) for ranks in tensor},
            TRANSFORMERS: partial(score_as_transformers, folder, config),
        }
        for contender, score in contenders.items():
            print(f"{name}: {contender}", file=sys.stderr)
            found[name][contender] = score()
            if output:
                write_whole(output, json.dumps(result, indent=2) + "\n")
    return result


def agree(values: Sequence[float | None]) -> bool:
    """Whether figures agree to four significant digits. Infinite figures are None and never agree."""
    numbers = [value for value in values if value is not None]
    return len(numbers) == len(values) and max(numbers) - min(numbers) <= CLOSE * max(map(abs, numbers))


def report(result: Mapping[str, Any], contenders: Sequence[str]) -> bool:
    """Print the table and return whether all figures agree."""
    print(f"{result['model']}, {result['precision']}")
    for task, found in result["tasks"].items():
        print(f"{task}: {described(found[TRANSFORMERS])}")
    print(f"{'':34}{''.join(f'{name:>14}' for name in contenders)}   four digits")
    everywhere = True
    for task, found in result["tasks"].items():
        for name in found[TRANSFORMERS]["figures"]:
            values = [found[contender]["figures"][name] for contender in contenders]
            same = agree(values)
            everywhere &= same
            shown = "".join(f"{'infinite' if value is None else f'{value:.7g}':>14}" for value in values)
            print(f"{f'{task} {name}':34}{shown}   {'same' if same else 'DIFFERENT'}")
    return everywhere


def described(found: Mapping[str, Any]) -> str:
    """Describe the counts and windows of a task in a line."""
    counts = [f"{value:,} {what.replace('_', ' ')}" for what, value in found["counts"].items()]
    return ", ".join([*counts, *(f"{what} {found['protocol'].get(what, 'none')}" for what in ("window", "stride"))])


def write_tiny(folder: Path) -> dict[str, str]:
    """Write a random Llama and tiny test sets, and return the file of each task.

    The Llama has nine heads, and large initial weights make its guesses certain enough to compare.
    """
    import torch

    torch.manual_seed(0)
    make_tiny(folder, num_heads=9, num_kv_heads=3, initializer_range=0.1)
    files = {"lambada": folder / "passages.txt", "wikitext103": folder / "wiki.test.tokens"}
    files["lambada"].write_text("\n".join(TINY_PASSAGES), encoding="utf-8")
    files["wikitext103"].write_text(TINY_WORDS, encoding="utf-8")
    return {name: str(file) for name, file in files.items()}


def main(arguments: list[str] | None = None) -> int:
    """Score and print. The exit status is 1 if figures differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", nargs="?", help="Hugging Face folder of a model that transformers and Crosscut support"
    )
    parser.add_argument("--lambada", help="raw passages of LAMBADA: .jsonl, or a passage per line")
    parser.add_argument("--wikitext", help="wiki.test.tokens or wiki.test.raw of WikiText-103")
    parser.add_argument("--tensor", type=int, nargs="+", default=[1, 3], help="numbers of tensor ranks to run")
    parser.add_argument(
        "--window", type=int, default=0, help="tokens of a window; by default 1024, or as many as the model supports"
    )
    parser.add_argument("--stride", type=int, default=32, help="tokens by which the window of WikiText moves")
    parser.add_argument("--batch-size", type=int, default=8, help="windows that Crosscut reads together")
    parser.add_argument("--tiny", action="store_true", help="use a random tiny Llama and a few lines of text")
    parser.add_argument("--json", type=Path, help="file for the results, written after each task of each contender")
    options = parser.parse_args(arguments)
    files = {"lambada": options.lambada, "wikitext103": options.wikitext}
    if bool(options.folder) == options.tiny or any(files.values()) == options.tiny:
        parser.error("Give a model folder with --lambada or --wikitext, or give --tiny alone.")
    with tempfile.TemporaryDirectory() as temporary:
        if options.tiny:
            files = write_tiny(Path(temporary))
            options.window, options.stride = 32, 16
        protocol = {"window": options.window, "overlap": options.stride, "batch_size": options.batch_size}
        try:
            configs = {name: EvaluationConfig(**{name: file}, **protocol) for name, file in files.items() if file}
            result = run(options.folder or temporary, configs, options.tensor, options.json)
        except CrosscutError as error:
            parser.error(str(error))
    print_machine("torch", TRANSFORMERS)
    return 0 if report(result, [TRANSFORMERS, *(f"tensor {ranks}" for ranks in options.tensor)]) else 1


if __name__ == "__main__":
    sys.exit(main())
