"""Speed and memory of generating text with Crosscut and with transformers: same weights, both with caches, in turns.

    python benchmarks/models/generate.py smollm2/            # any Hugging Face folder
    python benchmarks/models/generate.py --hybrid            # a random Nemotron-H of 147 million parameters
    python benchmarks/models/generate.py --tiny              # a random Llama of seconds, to see that everything runs

A contender is a program at a batch size. It has a process of its own, loads the model once, and generates in turn. All
contenders get the same random prompts, number of new tokens and number of threads, and decode greedily. A round is one
turn of each contender, so a slow moment of the machine slows all of them. The first round is not counted. The columns:

| column | meaning |
|---|---|
| tokens/s, best | new tokens per second, median and best turn; the time to read the prompts is included |
| first s | seconds to the first new token |
| step ms | milliseconds for each later token of every text |
| CPU ms | processor time of such a step, which depends least on other work of the machine |
| peak MiB | peak memory of the whole process |
| above idle | what the peak adds to the memory of the loaded model, after a short text |

The texts of both programs are compared token by token.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import aligned, command_line, print_figures
from benchmarks.machine import one_line
from benchmarks.models.evaluate import make_tiny, write_tokenizer
from benchmarks.processes import memory_of, reset_peak
from benchmarks.turns import Contender, take_turns

GOALS = {"rate": 1.5, "step": 0.7, "memory": 1.0, "above": 0.6}
"""Lowest ratio of Crosscut's tokens/s to those of transformers, and highest ratios of the time of a step, of the whole
memory, and of the memory above idle."""
_SHORT = 4
"""Tokens of the prompts, and new tokens, with which a process starts."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Model, prompts and settings that every contender gets."""

    folder: str
    num_prompt: int
    num_new: int
    precision: str
    threads: int

    def prompts(self, batch_size: int, vocab_size: int) -> Any:
        """Draw random ids [B, P], the same for all contenders."""
        import torch

        size = (batch_size, self.num_prompt)
        return torch.randint(0, vocab_size, size, generator=torch.Generator().manual_seed(1))


Writer = Callable[[int, int], list[list[int]]]
"""From the number of tokens of the prompts, and the number of new tokens, to the new tokens of each text."""


def make_crosscut(task: Task, batch_size: int) -> Writer:
    """Build the writer of Crosscut: its decoder with a row for each prompt."""
    import torch

    from crosscut.config import Layout
    from crosscut.generation import Decoder, Sampling
    from crosscut.model.packing import pack_weights
    from crosscut.parallel import make_mesh
    from crosscut.pretrained import find_model

    source = find_model(task.folder)
    mesh = make_mesh(Layout(), torch.device("cpu"))
    model = source.load(mesh, precision=task.precision)
    pack_weights(model, mesh, num_texts=batch_size)
    prompts = task.prompts(batch_size, source.model.vocab_size).tolist()

    def write(num_prompt: int, num_new: int) -> list[list[int]]:
        decoder = Decoder(model, None, num_rows=batch_size)
        sampling = Sampling(num_tokens=num_new, temperature=0.0)
        texts: dict[int, list[int]] = {decoder.add(prompt[:num_prompt], sampling): [] for prompt in prompts}
        for piece in decoder.run():
            texts[piece.number].append(piece.token)
        return list(texts.values())

    return write


def make_transformers(task: Task, batch_size: int) -> Writer:
    """Build the writer of transformers: `generate` with its default attention and cache."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(task.folder, dtype=getattr(torch, task.precision)).eval()
    prompts = task.prompts(batch_size, model.config.vocab_size)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def write(num_prompt: int, num_new: int) -> list[list[int]]:
        read = prompts[:, :num_prompt]
        found = model.generate(read, attention_mask=torch.ones_like(read), max_new_tokens=num_new, **options)
        texts: list[list[int]] = found[:, num_prompt:].tolist()
        return texts

    return write


PROGRAMS = {"crosscut": make_crosscut, "transformers": make_transformers}


@contextmanager
def take_part(program: str, batch_size: int, task: Task) -> Iterator[Callable[[int], dict[str, Any]]]:
    """Process of a contender. In each turn it writes all tokens once, and then only the first token."""
    import torch

    from crosscut.launch import process_group

    with process_group(torch.device("cpu")):
        torch.set_num_threads(task.threads)
        write = PROGRAMS[program](task, batch_size)
        write(_SHORT, _SHORT)  # reads all weights, which a program may have mapped only
        reset_peak("self")
        idle = memory_of("self", "VmRSS")

        def timed(num_new: int) -> tuple[float, float, list[list[int]]]:
            start, start_cpu = time.perf_counter(), time.process_time()
            texts = write(task.num_prompt, num_new)
            return time.perf_counter() - start, time.process_time() - start_cpu, texts

        def answer(_turn: int) -> dict[str, Any]:
            (seconds, cpu, texts), (reading, cpu_reading, _) = timed(task.num_new), timed(1)
            times = {"seconds": seconds, "cpu": cpu, "reading": reading, "cpu_reading": cpu_reading}
            above = memory_of("self", "VmHWM") - idle
            return {**times, "step": (seconds - reading) / max(task.num_new - 1, 1), "above": above, "texts": texts}

        yield answer


def run(task: Task, programs: list[str], batch_sizes: list[int], *, rounds: int) -> list[dict[str, Any]]:
    """Let the contenders write in turns and return a row of figures for each."""
    pairs = [(program, size) for size in batch_sizes for program in programs]
    contenders = {f"{program} {size}": Contender(take_part, (program, size, task)) for program, size in pairs}
    turns = take_turns(contenders, range(1 + rounds))
    return [
        {"program": program, "batch_size": size, **figures_of(contenders[name], turns[name], size, task)}
        for name, (program, size) in zip(contenders, pairs, strict=True)
    ]


def figures_of(contender: Contender, turns: list[list[dict[str, Any]]], batch_size: int, task: Task) -> dict[str, Any]:
    """Compute the figures of a contender."""
    if contender.failure:
        return {"failure": contender.failure}
    num_new, num_steps = batch_size * task.num_new, max(task.num_new - 1, 1)
    counted = [turn for (turn,) in turns[1:]]
    keys = ("seconds", "cpu", "reading", "cpu_reading", "step")
    seconds, cpu, reading, cpu_reading, step = (statistics.median(turn[key] for turn in counted) for key in keys)
    return {
        "tokens_per_second": num_new / seconds,
        "best_tokens_per_second": num_new / min(turn["seconds"] for turn in counted),
        "seconds": seconds,
        "seconds_to_first_token": reading,
        "seconds_per_step": step,
        "cpu_seconds_per_step": (cpu - cpu_reading) / num_steps,
        "peak_bytes": contender.finish(),
        "bytes_above_idle": counted[-1]["above"],
        "turns": [{key: turn[key] for key in keys} for turn in counted],
        "texts": counted[-1]["texts"],
    }


def report(rows: list[dict[str, Any]]) -> None:
    """Print the table and the ratios that have goals."""
    table: list[list[object]] = [
        ["", "batch", "tokens/s", "best", "first s", "step ms", "CPU ms", "peak MiB", "above idle"]
    ]
    for row in rows:
        start = [row["program"], row["batch_size"]]
        if "failure" in row:
            table.append([*start, row["failure"]])
            continue
        rates = (f"{row[f'{kind}tokens_per_second']:.1f}" for kind in ("", "best_"))
        steps = (f"{1000 * row[f'{kind}seconds_per_step']:.1f}" for kind in ("", "cpu_"))
        memory = (f"{row[key] / 2**20:,.0f}" for key in ("peak_bytes", "bytes_above_idle"))
        table.append([*start, *rates, f"{row['seconds_to_first_token']:.3f}", *steps, *memory])
    print(aligned(table))
    for text in ratios(rows):
        print(text)


def ratios(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each batch size at which both programs ran."""
    found = {(row["program"], row["batch_size"]): row for row in rows if "failure" not in row}
    for (program, size), ours in found.items():
        theirs = found.get(("transformers", size))
        if program != "crosscut" or theirs is None:
            continue
        pairs = list(zip(ours["turns"], theirs["turns"], strict=True))
        rate = statistics.median(b["seconds"] / a["seconds"] for a, b in pairs)
        step = statistics.median(a["step"] / b["step"] for a, b in pairs)
        cpu = theirs["cpu_seconds_per_step"] / ours["cpu_seconds_per_step"]
        memory, above = (ours[key] / theirs[key] for key in ("peak_bytes", "bytes_above_idle"))
        same = sum(a == b for a, b in zip(ours["texts"], theirs["texts"], strict=True))
        yield (
            f"batch {size}, median of {len(pairs)} pairs: {rate:.2f} times the tokens/s of transformers (goal "
            f"{GOALS['rate']}), {step:.2f} of the time of its steps (goal {GOALS['step']}), {cpu:.2f} times its steps "
            f"per processor second, {memory:.2f} of its memory (goal {GOALS['memory']}), {above:.2f} of its memory "
            f"above idle (goal {GOALS['above']}); {same} of {size} texts are equal"
        )


def make_hybrid(folder: Path, *, tiny: bool) -> None:
    """Write a random Nemotron-H, with a mixer and an MLP in turn; every sixth mixer is attention, the others are
    Mamba-2. The chunks are shorter than the published ones (64 tokens), because transformers then needs less time and
    less memory for a prompt.
    """
    import torch
    from transformers import NemotronHConfig, NemotronHForCausalLM

    heads, pairs = (2, 3) if tiny else (12, 12)
    torch.manual_seed(0)
    tokenizer = write_tokenizer(folder)
    config = NemotronHConfig(
        hybrid_override_pattern="M-M-M-M-M-*-"[-2 * pairs :] * max(pairs // 6, 1), hidden_size=64 * heads,
        num_attention_heads=heads, num_key_value_heads=max(heads // 3, 1), head_dim=64, intermediate_size=256 * heads,
        mamba_num_heads=4 * heads, mamba_head_dim=32, ssm_state_size=128, n_groups=1, conv_kernel=4, chunk_size=64,
        max_position_embeddings=4096, vocab_size=tokenizer.vocab_size if tiny else 32_000, initializer_range=0.05,
        bos_token_id=tokenizer.end_of_text, eos_token_id=tokenizer.end_of_text, pad_token_id=0,
    )  # fmt: skip
    NemotronHForCausalLM(config).save_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = command_line(__doc__, tiny="use a random tiny Llama in place of a folder", figures="print")
    parser.add_argument("folder", nargs="?", help="Hugging Face folder of a model")
    parser.add_argument("--hybrid", action="store_true", help="use a random hybrid of Mamba-2 in place of a folder")
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS), help="programs to run")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="texts that are generated together")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens of a text")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of a contender")
    parser.add_argument("--rounds", type=int, default=5, help="turns that are counted")
    options = parser.parse_args(arguments)
    if bool(options.folder) == (options.tiny or options.hybrid):
        parser.error("Give either a model folder, or --hybrid or --tiny.")
    with tempfile.TemporaryDirectory() as temporary:
        if options.hybrid:
            make_hybrid(Path(temporary), tiny=options.tiny)
        elif options.tiny:
            make_tiny(Path(temporary), initializer_range=0.2)
        task = Task(
            folder=options.folder or temporary, num_prompt=options.prompt, num_new=options.new,
            precision=options.precision, threads=options.threads,
        )  # fmt: skip
        rows = run(task, options.only, options.batch, rounds=options.rounds)
    if not print_figures(options, ("torch", "transformers"), {"task": asdict(task), "rows": rows}):
        print(one_line(asdict(task)))
        report(rows)


if __name__ == "__main__":
    sys.exit(main())
