"""Perplexity of a text by Crosscut and by transformers, the same weights and windows, in turns on this machine.

    python benchmarks/models/evaluate.py FOLDER     # a Hugging Face folder with weights and tokenizer
    python benchmarks/models/evaluate.py --tiny     # a random Llama of seconds, to see that everything runs

Every contender lives in its own process, loads the model once in float32, and scores one batch of the paper's sliding
windows when it is its turn; the first rounds are not counted. Tokens are those that a model reads. Memory is the peak
of the whole process, Python and PyTorch included. The losses must agree to four digits, or nothing is printed.

transformers runs twice: `labels` is its own way, its loss of labels of which those of the context are ignored; `kept`
asks only for the logits that are scored (`logits_to_keep`), which whoever knows of it would do.
"""

import argparse
import json
import multiprocessing as mp
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.machine import describe_machine, print_machine
from benchmarks.turns import CORES, Failure, peak_bytes

GOALS = {"speed": 1.0, "memory": 1.0}
CONTENDERS = ("crosscut", "transformers labels", "transformers kept")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is scored, over and over."""

    folder: str
    window: int
    overlap: int
    batch_size: int
    vocab_size: int


Score = Callable[[Any, Any], float]
"""Tokens [B, S] and targets [B, S], IGNORED where they are context, to the sum of the losses."""


def make_crosscut(work: Work) -> Score:
    """What `crosscut evaluate` does on one rank."""
    import torch

    from crosscut.config import Layout
    from crosscut.parallel import make_mesh
    from crosscut.pretrained import find_model

    model = find_model(work.folder).load(make_mesh(Layout(), torch.device("cpu")))

    def score(tokens: Any, targets: Any) -> float:
        return float(model.scores(tokens, targets).losses.double().sum())

    return score


def make_transformers(work: Work, *, keeping: bool) -> Score:
    """The causal language model of a folder, with its own attention kernel."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32, attn_implementation="sdpa").eval()

    @torch.no_grad()
    def score(tokens: Any, targets: Any) -> float:
        if keeping:
            kept = work.overlap if (targets[:, : -work.overlap] < 0).all() else tokens.shape[1]
            logits = model(input_ids=tokens, use_cache=False, logits_to_keep=kept).logits
            return float(F.cross_entropy(logits.flatten(0, 1), targets[:, -kept:].flatten(), reduction="sum"))
        loss = model(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False).loss
        return float(loss * (targets >= 0).sum())

    return score


def take_part(name: str, work: Work, orders: Connection) -> None:
    """One contender's process: scores when told to, tells the seconds and the loss, at last its peak memory."""
    try:
        import torch

        from crosscut.parallel import process_group

        torch.set_num_threads(CORES)
        with process_group(torch.device("cpu")):
            score = make_crosscut(work) if name == "crosscut" else make_transformers(work, keeping="kept" in name)
            orders.send("ready")
            generator = torch.Generator().manual_seed(1)
            while orders.recv() == "score":
                text = torch.randint(0, work.vocab_size, (work.batch_size, work.window + 1), generator=generator)
                targets = text[:, 1:].clone()
                targets[:, : -work.overlap] = -100
                start = time.perf_counter()
                loss = score(text[:, :-1], targets)
                orders.send((time.perf_counter() - start, loss))
            orders.send(peak_bytes())
    except Exception as error:  # of whatever kind: the others go on
        orders.send(Failure(f"{type(error).__name__}: {error}".splitlines()[0]))


def run(work: Work, *, rounds: int, warmup: int) -> dict[str, Any]:
    """Let the contenders score in turns; each one's figures by name."""
    context = mp.get_context("spawn")
    orders: dict[str, Connection] = {}
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    figures: dict[str, Any] = {}

    def ask(name: str, order: str | None) -> Any:
        if order:
            orders[name].send(order)
        try:
            answer = orders[name].recv()
        except EOFError:
            answer = Failure("its process died")
        if isinstance(answer, Failure):
            figures[name] = {"failure": answer.reason}
        return answer

    for name in CONTENDERS:
        orders[name], there = context.Pipe()
        context.Process(target=take_part, args=(name, work, there), daemon=True).start()
        there.close()
        ask(name, None)
    for _ in range(warmup + rounds):
        for name in CONTENDERS:
            if name not in figures and not isinstance(answer := ask(name, "score"), Failure):
                turns[name].append(answer)
    for name in CONTENDERS:
        if name in figures:
            continue
        seconds = [seconds for seconds, _ in turns[name][warmup:]]
        figures[name] = {
            "tokens_per_second": work.batch_size * work.window / statistics.median(seconds),
            "median_seconds": statistics.median(seconds),
            "min_seconds": min(seconds),
            "max_seconds": max(seconds),
            "peak_bytes": ask(name, "stop"),
            "losses": [loss for _, loss in turns[name]],
        }
    return figures


def require_same_losses(figures: dict[str, Any]) -> None:
    """End the program where contenders do not agree: then they do not do the same work."""
    ran = {name: f["losses"] for name, f in figures.items() if "failure" not in f}
    for name, losses in ran.items():
        for ours, theirs in zip(ran.get("crosscut", losses), losses, strict=True):
            if abs(ours - theirs) > 1e-4 * abs(ours):
                sys.exit(f"The losses must agree to four digits, but crosscut's is {ours} and that of {name} {theirs}.")


def ratios(figures: dict[str, Any]) -> dict[str, float]:
    """Crosscut's tokens/s over the fastest other's, and its memory over the leanest other's."""
    others = [f for name, f in figures.items() if name != "crosscut" and "failure" not in f]
    ours = figures["crosscut"]
    if not others or "failure" in ours:
        return {}
    return {
        "speed": ours["tokens_per_second"] / max(f["tokens_per_second"] for f in others),
        "memory": ours["peak_bytes"] / min(f["peak_bytes"] for f in others),
    }


def report(figures: dict[str, Any]) -> None:
    """Print the table and the ratios that the goals are about."""
    print(f"{'':22}{'tokens/s':>10}{'median s':>10}{'min s':>9}{'max s':>9}{'peak MiB':>10}")
    for name, f in figures.items():
        if "failure" in f:
            print(f"{name:22}{f['failure']}")
            continue
        print(
            f"{name:22}{f['tokens_per_second']:>10,.0f}{f['median_seconds']:>10.3f}{f['min_seconds']:>9.3f}"
            f"{f['max_seconds']:>9.3f}{f['peak_bytes'] / 2**20:>10,.0f}"
        )
    for name, ratio in ratios(figures).items():
        what = "tokens/s of the fastest" if name == "speed" else "memory of the leanest"
        print(
            f"crosscut: {what} other: {ratio:.2f} (goal {'at least' if name == 'speed' else 'at most'} {GOALS[name]})"
        )


def make_tiny(folder: Path, *, num_heads: int = 4, num_kv_heads: int = 2, **more: Any) -> None:
    """A random Llama with a tokenizer trained on the built-in corpus; `more` is for its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from crosscut.data import Tokenizer, read_documents

    texts = (document.text for _, document in zip(range(3), read_documents(["builtin:state-of-the-union"])))  # noqa: B905
    tokenizer = Tokenizer.train(texts, vocab_size=500)
    tokenizer.save(folder / "tokenizer.json")
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16 * num_heads, intermediate_size=32 * num_heads,
        num_hidden_layers=2, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads,
        max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=tokenizer.end_of_text,
        eos_token_id=tokenizer.end_of_text, **more,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="of a model that transformers and Crosscut know")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--overlap", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if bool(options.folder) == options.tiny:
        parser.error("name a folder, or give --tiny")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or temporary
        if options.tiny:
            make_tiny(Path(folder))
            options.window = min(options.window, 128)
        vocab_size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
        work = Work(
            folder=folder, window=options.window, overlap=options.overlap, batch_size=options.batch_size,
            vocab_size=vocab_size,
        )  # fmt: skip
        figures = run(work, rounds=options.rounds, warmup=options.warmup)
    require_same_losses(figures)
    for f in figures.values():
        f.pop("losses", None)
    if options.json:
        result = {
            "machine": describe_machine("torch", "transformers"),
            "figures": figures,
            "ratios": ratios(figures),
        }
        print(json.dumps(result, indent=2))
        return
    print_machine("torch", "transformers")
    print(f"{Path(folder).name or folder}, {work.batch_size} windows of {work.window} tokens, {work.overlap} scored")
    report(figures)


if __name__ == "__main__":
    main()
