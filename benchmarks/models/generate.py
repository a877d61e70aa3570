"""Speed and memory of generating text with Crosscut and with transformers: same weights, both with caches, in turns.

    python benchmarks/models/generate.py smollm2/            # any Hugging Face folder
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

The texts of both programs are compared token by token.
"""

import argparse
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.machine import describe_machine, print_machine
from benchmarks.turns import Failure, peak_bytes

GOAL = 1.5
"""Lowest ratio of Crosscut's tokens/s to those of transformers."""


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


Writer = Callable[[int], list[list[int]]]
"""From a number of new tokens to the new tokens of each text."""


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

    def write(num_new: int) -> list[list[int]]:
        decoder = Decoder(model, None, num_rows=batch_size)
        sampling = Sampling(num_tokens=num_new, temperature=0.0)
        texts: dict[int, list[int]] = {decoder.add(prompt, sampling): [] for prompt in prompts}
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

    def write(num_new: int) -> list[list[int]]:
        mask = torch.ones_like(prompts)
        found = model.generate(prompts, attention_mask=mask, max_new_tokens=num_new, **options)
        texts: list[list[int]] = found[:, prompts.shape[1] :].tolist()
        return texts

    return write


PROGRAMS = {"crosscut": make_crosscut, "transformers": make_transformers}


def work(program: str, batch_size: int, task: Task, orders: Connection) -> None:
    """Run the process of a contender: answer each order with seconds and texts, and the last order with peak memory."""
    try:
        take_part(program, batch_size, task, orders)
    except Exception as error:  # of any kind, so that the other contenders go on
        orders.send(Failure(f"{type(error).__name__}: {error}".splitlines()[0]))


def take_part(program: str, batch_size: int, task: Task, orders: Connection) -> None:
    """Do the work of `work`; errors are raised."""
    import torch

    from crosscut.launch import process_group

    with process_group(torch.device("cpu")):
        torch.set_num_threads(task.threads)
        write = PROGRAMS[program](task, batch_size)
        orders.send("ready")
        while (num_new := orders.recv()) is not None:
            start, start_cpu = time.perf_counter(), time.process_time()
            texts = write(num_new)
            orders.send((time.perf_counter() - start, time.process_time() - start_cpu, texts))
        orders.send(peak_bytes())


class Contender:
    """Process of one contender, controlled from outside."""

    def __init__(self, program: str, batch_size: int, task: Task) -> None:
        self.program, self.batch_size, self.task = program, batch_size, task
        self.turns: list[tuple[float, float]] = []
        """Seconds and processor seconds of each turn."""
        self.readings: list[tuple[float, float]] = []
        """Seconds and processor seconds of turns that write only the first token."""
        self.texts: list[list[int]] = []
        self.failure = ""
        context = mp.get_context("spawn")
        self.connection, there = context.Pipe()
        context.Process(target=work, args=(program, batch_size, task, there), daemon=True).start()
        there.close()  # a process that dies then closes the connection
        self._answer()

    def turn(self) -> None:
        """Write all tokens once, and then only the first token."""
        if (answer := self._ask(self.task.num_new)) is not None:
            self.turns.append(answer[:2])
            self.texts = answer[2]
        if (answer := self._ask(1)) is not None:
            self.readings.append(answer[:2])

    def finish(self) -> int:
        """End the process and return its peak memory in bytes."""
        peak: int = self._ask(None)
        return peak

    def _ask(self, order: int | None) -> Any:
        if self.failure:
            return None
        self.connection.send(order)
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self.connection.recv()
        except EOFError:
            answer = Failure("its process died")
        if isinstance(answer, Failure):
            self.failure = answer.reason
            return None
        return answer


def run(task: Task, programs: list[str], batch_sizes: list[int], *, rounds: int) -> list[dict[str, Any]]:
    """Let the contenders write in turns and return a row of figures for each."""
    contenders = [Contender(program, size, task) for size in batch_sizes for program in programs]
    for _ in range(1 + rounds):
        for contender in contenders:
            contender.turn()
    return [figures_of(contender) for contender in contenders]


def figures_of(contender: Contender) -> dict[str, Any]:
    """Compute the row of a contender."""
    name = {"program": contender.program, "batch_size": contender.batch_size}
    if contender.failure:
        return {**name, "failure": contender.failure}
    num_new, num_steps = contender.batch_size * contender.task.num_new, max(contender.task.num_new - 1, 1)
    turns, readings = contender.turns[1:], contender.readings[1:]
    seconds, cpu_seconds = (statistics.median(turn[i] for turn in turns) for i in (0, 1))
    reading, cpu_reading = (statistics.median(turn[i] for turn in readings) for i in (0, 1))
    return {
        **name,
        "tokens_per_second": num_new / seconds,
        "best_tokens_per_second": num_new / min(turn[0] for turn in turns),
        "seconds": seconds,
        "seconds_to_first_token": reading,
        "seconds_per_step": (seconds - reading) / num_steps,
        "cpu_seconds_per_step": (cpu_seconds - cpu_reading) / num_steps,
        "peak_bytes": contender.finish(),
        "texts": contender.texts,
    }


def report(rows: list[dict[str, Any]]) -> None:
    """Print the table and the ratios that have goals."""
    print(f"{'':14}{'batch':>6}{'tokens/s':>10}{'best':>8}{'first s':>9}{'step ms':>9}{'CPU ms':>8}{'peak MiB':>10}")
    for row in rows:
        start = f"{row['program']:14}{row['batch_size']:>6}"
        if "failure" in row:
            print(f"{start}  {row['failure']}")
            continue
        print(
            f"{start}{row['tokens_per_second']:>10.1f}{row['best_tokens_per_second']:>8.1f}"
            f"{row['seconds_to_first_token']:>9.3f}{1000 * row['seconds_per_step']:>9.1f}"
            f"{1000 * row['cpu_seconds_per_step']:>8.1f}{row['peak_bytes'] / 2**20:>10,.0f}"
        )
    for text in ratios(rows):
        print(text)


def ratios(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each batch size at which both programs ran."""
    found = {(row["program"], row["batch_size"]): row for row in rows if "failure" not in row}
    for (program, size), ours in found.items():
        theirs = found.get(("transformers", size))
        if program != "crosscut" or theirs is None:
            continue
        rate = ours["tokens_per_second"] / theirs["tokens_per_second"]
        cpu = theirs["cpu_seconds_per_step"] / ours["cpu_seconds_per_step"]
        memory = ours["peak_bytes"] / theirs["peak_bytes"]
        same = sum(a == b for a, b in zip(ours["texts"], theirs["texts"], strict=True))
        yield (
            f"batch {size}: {rate:.2f} times the tokens/s of transformers (goal {GOAL}), {cpu:.2f} times its steps per "
            f"processor second, {memory:.2f} of its memory (goal 1.0); {same} of {size} texts are equal"
        )


def make_tiny(folder: Path) -> None:
    """Write a random Llama and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from crosscut.data import Tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
        vocab_size=512, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    Tokenizer.train(["abc"], vocab_size=257).save(folder / "tokenizer.json")


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="Hugging Face folder of a model")
    parser.add_argument("--tiny", action="store_true", help="use a random tiny Llama in place of a folder")
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS), help="programs to run")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="texts that are generated together")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens of a text")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of a contender")
    parser.add_argument("--rounds", type=int, default=5, help="turns that are counted")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    if bool(options.folder) == options.tiny:
        parser.error("Give either a model folder or --tiny.")
    with tempfile.TemporaryDirectory() as temporary:
        if options.tiny:
            make_tiny(Path(temporary))
        task = Task(
            folder=options.folder or temporary, num_prompt=options.prompt, num_new=options.new,
            precision=options.precision, threads=options.threads,
        )  # fmt: skip
        rows = run(task, options.only, options.batch, rounds=options.rounds)
    if options.json:
        result = {"machine": describe_machine("torch", "transformers"), "task": asdict(task), "rows": rows}
        print(json.dumps(result, indent=2))
        return
    print_machine("torch", "transformers")
    print(", ".join(f"{k} {v}" for k, v in asdict(task).items()))
    report(rows)


if __name__ == "__main__":
    sys.exit(main())
