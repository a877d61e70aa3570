"""Speed and memory of scoring text with Crosscut and with transformers: same weights and windows, in turns.

    python benchmarks/models/evaluate.py FOLDER     # a Hugging Face folder with weights and tokenizer
    python benchmarks/models/evaluate.py --tiny     # a small random Llama, to check in seconds that everything runs

Every contender has a process of its own, loads the model once in float32, and scores one batch of the paper's sliding
windows per turn. The first rounds are not counted. Rates count the tokens that a model reads. Memory is the peak of the
whole process, Python and PyTorch included. If the losses do not agree to four digits, the command fails without
figures.

transformers takes part twice. `labels` uses its loss with labels, in which the labels of the context are ignored.
`kept` asks only for the logits that are scored (`logits_to_keep`), which is faster and less well known.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import command_line, print_figures
from benchmarks.turns import CORES, Contender, figures_of, table_of, take_turns

GOALS = {"speed": 1.0, "memory": 1.0}
CONTENDERS = ("crosscut", "transformers labels", "transformers kept")


@dataclass(frozen=True, kw_only=True)
class Work:
    """Model and windows that every contender scores."""

    folder: str
    window: int
    overlap: int
    batch_size: int
    vocab_size: int


Score = Callable[[Any, Any], float]
"""Function that takes tokens [B, S] and targets [B, S] (IGNORED for the context) and returns the sum of the losses."""


def make_crosscut(work: Work) -> Score:
    """Build the score function of Crosscut, as `crosscut evaluate` does on one rank."""
    import torch

    from crosscut.config import Layout
    from crosscut.evaluation import score_tokens
    from crosscut.model import Batch
    from crosscut.parallel import make_mesh
    from crosscut.pretrained import find_model

    model = find_model(work.folder).load(make_mesh(Layout(), torch.device("cpu")))

    def score(tokens: Any, targets: Any) -> float:
        return float(score_tokens(model, Batch(tokens=tokens, targets=targets)).losses.double().sum())

    return score


def make_transformers(work: Work, *, keeping: bool) -> Score:
    """Build the score function of transformers' causal language model, with PyTorch's attention kernel."""
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


@contextmanager
def take_part(name: str, work: Work) -> Iterator[Callable[[int], tuple[float, float]]]:
    """Process of a contender. It answers each turn with the seconds and the loss of a batch of random windows."""
    import torch

    from crosscut.launch import process_group

    torch.set_num_threads(CORES)
    with process_group(torch.device("cpu")):
        score = make_crosscut(work) if name == "crosscut" else make_transformers(work, keeping="kept" in name)
        generator = torch.Generator().manual_seed(1)

        def answer(_turn: int) -> tuple[float, float]:
            text = torch.randint(0, work.vocab_size, (work.batch_size, work.window + 1), generator=generator)
            targets = text[:, 1:].clone()
            targets[:, : -work.overlap] = -100
            start = time.perf_counter()
            loss = score(text[:, :-1], targets)
            return time.perf_counter() - start, loss

        yield answer


def run(work: Work, *, rounds: int, warmup: int) -> dict[str, Any]:
    """Let the contenders score in turns and return the figures of each by name."""
    contenders = {name: Contender(take_part, (name, work)) for name in CONTENDERS}
    turns = take_turns(contenders, range(warmup + rounds))
    figures = {}
    for name, contender in contenders.items():
        seconds = [seconds for ((seconds, _),) in turns[name][warmup:]]
        losses = [loss for ((_, loss),) in turns[name]]
        figures[name] = figures_of(contender, seconds, work.batch_size * work.window, losses=losses)
    return figures


def require_same_losses(figures: dict[str, Any]) -> None:
    """End the program if the losses differ, because the contenders then do not do the same work."""
    ran = {name: f["losses"] for name, f in figures.items() if "failure" not in f}
    for name, losses in ran.items():
        for ours, theirs in zip(ran.get("crosscut", losses), losses, strict=True):
            if abs(ours - theirs) > 1e-4 * abs(ours):
                sys.exit(f"The losses must agree to four digits, but crosscut's is {ours} and that of {name} {theirs}.")


def ratios(figures: dict[str, Any]) -> dict[str, float]:
    """Ratio of Crosscut's tokens/s to the fastest peer, and of its memory to the leanest peer."""
    others = [f for name, f in figures.items() if name != "crosscut" and "failure" not in f]
    ours = figures["crosscut"]
    if not others or "failure" in ours:
        return {}
    return {
        "speed": ours["tokens_per_second"] / max(f["tokens_per_second"] for f in others),
        "memory": ours["peak_bytes"] / min(f["peak_bytes"] for f in others),
    }


def report(figures: dict[str, Any]) -> None:
    """Print the table and the ratios that have goals."""
    print(table_of(figures))
    for name, ratio in ratios(figures).items():
        peer = "tokens/s of the fastest peer" if name == "speed" else "memory of the leanest peer"
        print(
            f"crosscut: {ratio:.2f} of the {peer} (goal {'at least' if name == 'speed' else 'at most'} {GOALS[name]})"
        )


def make_tiny(folder: Path, *, num_heads: int = 4, num_kv_heads: int = 2, **more: Any) -> None:
    """Write a random Llama with a tokenizer trained on the built-in corpus. `more` goes into its configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = write_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=16 * num_heads, intermediate_size=32 * num_heads,
        num_hidden_layers=2, num_attention_heads=num_heads, num_key_value_heads=num_kv_heads,
        max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=tokenizer.end_of_text,
        eos_token_id=tokenizer.end_of_text, **more,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def write_tokenizer(folder: Path) -> Any:
    """Write a tokenizer trained on the built-in corpus, and return it."""
    from benchmarks.texts import addresses
    from crosscut.data import Tokenizer

    tokenizer = Tokenizer.train(islice(addresses(), 3), vocab_size=500)
    tokenizer.save(folder / "tokenizer.json")
    return tokenizer


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = command_line(__doc__, tiny="use a random tiny Llama in place of a folder", figures="print")
    parser.add_argument(
        "folder", nargs="?", help="Hugging Face folder of a model that transformers and Crosscut support"
    )
    parser.add_argument("--window", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--overlap", type=int, default=32, help="last tokens of a window that are scored")
    parser.add_argument("--batch-size", type=int, default=4, help="windows of a batch")
    parser.add_argument("--rounds", type=int, default=5, help="turns that are counted")
    parser.add_argument("--warmup", type=int, default=1, help="first turns that are not counted")
    options = parser.parse_args(arguments)
    if bool(options.folder) == options.tiny:
        parser.error("Give either a model folder or --tiny.")
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
    if print_figures(options, ("torch", "transformers"), {"figures": figures, "ratios": ratios(figures)}):
        return
    print(f"{Path(folder).name or folder}, {work.batch_size} windows of {work.window} tokens, {work.overlap} scored")
    report(figures)


if __name__ == "__main__":
    main()
