"""The scores of `crosscut evaluate` on whole test sets, beside those that transformers gives for the same model.

    python benchmarks/models/scores.py FOLDER --lambada FILE --wikitext FILE     # a Hugging Face folder, tensor 1 and 3
    python benchmarks/models/scores.py FOLDER --lambada FILE --tensor 1 2
    python benchmarks/models/scores.py --tiny            # a random Llama and a few lines, to see that everything runs

Crosscut scores as the command does, once for every `--tensor`. transformers gets the same ids, windows and targets: its
loss of a target is the cross entropy of its own logits, its guess the likeliest of them, in float32 on the CPU. Both go
into the same figures. They must agree to four significant digits: those of a row are within 5e-5 of each other, of the
greatest; otherwise the command returns 1. With `--json` all that is known is written after every task of every
contender, so that a run which is cut off leaves what it had.
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
"""Half a unit of the fourth digit, of figures that begin with a 9; for the others it is stricter than that."""
READ_TOGETHER = 2048
"""Tokens that transformers reads at once, where a window is not longer: its logits are up to 400 MB for 49,152 ids."""
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
    """What `crosscut evaluate --tensor` finds of the one task."""
    from crosscut.evaluation.ranks import Machinery
    from crosscut.evaluation.run import evaluate_place

    on = Machinery(layout=Layout(tensor=tensor), device="cpu")
    (found,) = evaluate_place(folder, config, on)["tasks"].values()
    return dict(found)


def score_as_transformers(folder: str, config: EvaluationConfig) -> dict[str, Any]:
    """The same by transformers' logits."""
    import torch
    from transformers import AutoModelForCausalLM

    from crosscut.evaluation import Result, WindowScores
    from crosscut.evaluation.progress import progress

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    task = read_task(folder, config)
    table = np.zeros((len(task.windows), 3))
    num_tokens = sum(window.length for window in task.windows)
    began = time.perf_counter()
    with progress(task.name, num_tokens, shown=True) as advance:
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
    """The one task of a config, as Crosscut reads it."""
    from crosscut.evaluation import make_tasks
    from crosscut.pretrained import find_model

    source = find_model(folder)
    sizes = {"longest": source.model.max_sequence_length, "vocab_size": source.model.vocab_size}
    (task,) = make_tasks(config, source.load_tokenizer(), begin_of_text=source.begin_of_text, **sizes)
    return task


def in_groups(windows: Sequence[Any]) -> Iterator[list[int]]:
    """Which windows are read together: of about the same length, the longest first."""
    order = sorted(range(len(windows)), key=lambda i: windows[i].length, reverse=True)
    while order:
        num = max(1, READ_TOGETHER // windows[order[0]].length)
        yield order[:num]
        del order[:num]


def read_together(model: Any, texts: Sequence[Any], windows: Sequence[Any]) -> list[tuple[float, int, int]]:
    """The loss of each window's targets, how many of them are its likeliest, and 1 where the last one is.

    Windows are filled up at their ends, which no earlier token looks at. Only the logits from the first target of all
    on are asked for.
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
    """Let all contenders score each task; what they found by task and contender, and on what."""
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
    """Whether figures are the same to four significant digits; infinite ones, which are None, never are."""
    numbers = [value for value in values if value is not None]
    return len(numbers) == len(values) and max(numbers) - min(numbers) <= CLOSE * max(map(abs, numbers))


def report(result: Mapping[str, Any], contenders: Sequence[str]) -> bool:
    """Print the table; whether all figures agree."""
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
    """A task's counts and windows in a line."""
    counts = [f"{value:,} {what.replace('_', ' ')}" for what, value in found["counts"].items()]
    return ", ".join([*counts, *(f"{what} {found['protocol'].get(what, 'none')}" for what in ("window", "overlap"))])


def write_tiny(folder: Path) -> dict[str, str]:
    """A random Llama of nine heads, surer of its guesses than a fresh one is, and texts; the file of each task."""
    import torch

    torch.manual_seed(0)
    make_tiny(folder, num_heads=9, num_kv_heads=3, initializer_range=0.1)
    files = {"lambada": folder / "passages.txt", "wikitext103": folder / "wiki.test.tokens"}
    files["lambada"].write_text("\n".join(TINY_PASSAGES), encoding="utf-8")
    files["wikitext103"].write_text(TINY_WORDS, encoding="utf-8")
    return {name: str(file) for name, file in files.items()}


def main(arguments: list[str] | None = None) -> int:
    """Score and print; 1 where figures differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="of a model that transformers and Crosscut know")
    parser.add_argument("--lambada", help="its passages in their raw form, .jsonl or a passage a line")
    parser.add_argument("--wikitext", help="wiki.test.tokens or wiki.test.raw of WikiText-103")
    parser.add_argument("--tensor", type=int, nargs="+", default=[1, 3], help="ranks that the model is cut over")
    parser.add_argument("--window", type=int, default=0, help="tokens read at once; by default 1024, or what there are")
    parser.add_argument("--stride", type=int, default=32, help="tokens by which WikiText's window moves on")
    parser.add_argument("--batch-size", type=int, default=8, help="windows that Crosscut reads together")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, help="a file, written anew after each task of each contender")
    options = parser.parse_args(arguments)
    files = {"lambada": options.lambada, "wikitext103": options.wikitext}
    if bool(options.folder) == options.tiny or any(files.values()) == options.tiny:
        parser.error("name a folder and --lambada or --wikitext, or give --tiny alone")
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
