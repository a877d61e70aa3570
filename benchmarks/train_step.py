"""One training step of the same GPT-2 by Crosscut, Hugging Face transformers and litgpt, in turns on this machine.

    make benchmarks                                             # sets up .venv-benchmarks and runs this, too
    .venv-benchmarks/bin/python benchmarks/train_step.py

Every contender lives in its own process, is built once, and steps when it is its turn: forward, backward, clipping at a
norm of 1.0, AdamW (PyTorch's fused form for all), float32, no dropout, random tokens. A round is one step of each, so
that a machine that slows down slows down all. Memory is the peak of the whole process, Python and PyTorch included.

Layout parity is measured beside: Crosscut over two processes with one thread each against one process with two threads.
"""

import argparse
import json
import multiprocessing as mp
import os
import platform
import resource
import socket
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The model and the batch."""

    num_layers: int = 6
    hidden_size: int = 384
    num_heads: int = 6
    sequence_length: int = 256
    batch_size: int = 8
    vocab_size: int = 50_304


TINY = Shape(num_layers=2, hidden_size=64, num_heads=2, sequence_length=32, batch_size=2, vocab_size=512)


def make_crosscut(shape: Shape) -> Any:
    """A function that does one step of Crosscut's training, over as many ranks as were started."""
    import torch

    from crosscut.config import load_run
    from crosscut.parallel import make_mesh
    from crosscut.parallel.processes import process_group, started_world_size
    from crosscut.training.step import Trainer

    run = load_run(
        {
            "model": {
                "num_layers": shape.num_layers,
                "hidden_size": shape.hidden_size,
                "num_heads": shape.num_heads,
                "vocab_size": shape.vocab_size,
                "max_sequence_length": shape.sequence_length,
                "dropout": 0.0,
            },
            "layout": {"tensor": started_world_size()},
            "training": {"batch_size": shape.batch_size, "sequence_length": shape.sequence_length, "steps": 1000},
            "optimizer": {"warmup_steps": 100},
        }
    )
    device = torch.device("cpu")
    group = process_group(device)
    group.__enter__()
    trainer = Trainer(run, make_mesh(run.layout, device))

    def step(number: int, tokens: torch.Tensor, targets: torch.Tensor, _alive: Any = group) -> float:
        return trainer.step(number, [(tokens, targets)]).loss

    return step


def _with_torch_optimizer(parameters: list[Any], compute_loss: Any) -> Any:
    """The step that users of a plain PyTorch model write."""
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True)

    def step(_number: int, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = compute_loss(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def make_transformers(shape: Shape) -> Any:
    """Hugging Face's GPT-2 with its own attention and loss."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=shape.num_layers, n_embd=shape.hidden_size, n_head=shape.num_heads, vocab_size=shape.vocab_size,
        n_positions=shape.sequence_length, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()

    def loss(tokens: torch.Tensor, _targets: torch.Tensor) -> torch.Tensor:
        return model(tokens, labels=tokens).loss  # it shifts the labels itself

    return _with_torch_optimizer(list(model.parameters()), loss)


def make_litgpt(shape: Shape) -> Any:
    """Litgpt's GPT in the same sizes, its embeddings tied like GPT-2's, with its chunked loss.

    It has rotary positions instead of learned ones, a difference of 0.1% of the parameters.
    """
    import torch
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    config = Config(
        n_layer=shape.num_layers, n_embd=shape.hidden_size, n_head=shape.num_heads, block_size=shape.sequence_length,
        vocab_size=shape.vocab_size, padded_vocab_size=shape.vocab_size, bias=True, parallel_residual=False,
        norm_class_name="LayerNorm", mlp_class_name="GptNeoxMLP", gelu_approximate="tanh", rotary_percentage=0.25,
    )  # fmt: skip
    model = GPT(config).train()
    model.lm_head.weight = model.transformer.wte.weight

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(model(tokens), targets)

    return _with_torch_optimizer(list(model.parameters()), loss)


CONTENDERS: dict[str, tuple[Any, int]] = {
    "crosscut": (make_crosscut, 1),
    "crosscut tensor=2": (make_crosscut, 2),
    "transformers": (make_transformers, 1),
    "litgpt": (make_litgpt, 1),
}
"""Name to (maker of its step, processes)."""

CORES = 2


def work(name: str, rank: int, port: int, shape: Shape, orders: Connection) -> None:
    """One process of a contender: steps when told to, tells the seconds, at last its peak memory."""
    make, num_ranks = CONTENDERS[name]
    if num_ranks > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    torch.manual_seed(0)
    step = make(shape)
    torch.set_num_threads(CORES // num_ranks)
    generator = torch.Generator().manual_seed(1)
    size = (shape.batch_size, shape.sequence_length + 1)
    orders.send("ready")
    number = 0
    while orders.recv() == "step":
        batch = torch.randint(0, shape.vocab_size, size, generator=generator)
        start = time.perf_counter()
        loss = step(number, batch[:, :-1], batch[:, 1:])
        orders.send((time.perf_counter() - start, loss))
        number += 1
    orders.send(peak_bytes())


def peak_bytes() -> int:
    """The most memory that this process has had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


class Contender:
    """The processes of one contender, as the controller sees them."""

    def __init__(self, name: str, shape: Shape, port: int) -> None:
        self.name = name
        self.seconds: list[float] = []
        self.losses: list[float] = []
        context = mp.get_context("spawn")
        self.connections = []
        for rank in range(CONTENDERS[name][1]):
            here, there = context.Pipe()
            context.Process(target=work, args=(name, rank, port, shape, there), daemon=True).start()
            there.close()  # so that a process that dies is noticed
            self.connections.append(here)
        for connection in self.connections:
            connection.recv()

    def step(self) -> None:
        """Do one step and note how long its slowest process took."""
        for connection in self.connections:
            connection.send("step")
        results = [connection.recv() for connection in self.connections]
        self.seconds.append(max(seconds for seconds, _ in results))
        self.losses.append(results[0][1])

    def finish(self) -> int:
        """End the processes; their peak memory together, in bytes."""
        for connection in self.connections:
            connection.send("stop")
        return sum(connection.recv() for connection in self.connections)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def run(shape: Shape, names: list[str], *, rounds: int, warmup: int) -> dict[str, Any]:
    """Let the contenders step in turns; each one's figures by name."""
    contenders = [Contender(name, shape, _free_port()) for name in names]
    for _ in range(warmup + rounds):
        for contender in contenders:
            contender.step()
    figures = {}
    for contender in contenders:
        timed = contender.seconds[warmup:]
        figures[contender.name] = {
            "median_seconds": statistics.median(timed),
            "min_seconds": min(timed),
            "max_seconds": max(timed),
            "tokens_per_second": shape.batch_size * shape.sequence_length / statistics.median(timed),
            "peak_bytes": contender.finish(),
            "first_loss": contender.losses[0],
        }
    return figures


def machine() -> dict[str, str]:
    """What this ran on."""
    info = Path("/proc/cpuinfo")  # Linux only
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
    versions = {}
    for package in ("torch", "transformers", "litgpt"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {"cpu": model, "cores": str(os.cpu_count()), "python": platform.python_version(), **versions}


def report(figures: dict[str, Any]) -> None:
    """Print the table and the ratios that the targets are about."""
    print(f"{'':20}{'median s':>10}{'min s':>9}{'max s':>9}{'tokens/s':>11}{'peak MiB':>10}")
    for name, f in figures.items():
        print(
            f"{name:20}{f['median_seconds']:>10.3f}{f['min_seconds']:>9.3f}{f['max_seconds']:>9.3f}"
            f"{f['tokens_per_second']:>11,.0f}{f['peak_bytes'] / 2**20:>10,.0f}"
        )
    peers = [f for name, f in figures.items() if not name.startswith("crosscut")]
    ours = figures.get("crosscut")
    if ours and peers:
        time_ratio = ours["median_seconds"] / min(f["median_seconds"] for f in peers)
        memory_ratio = ours["peak_bytes"] / min(f["peak_bytes"] for f in peers)
        print(f"time of the fastest peer: {time_ratio:.2f} (target 0.90)")
        print(f"memory of the leanest peer: {memory_ratio:.2f} (target 0.65)")
    if ours and (cut := figures.get("crosscut tensor=2")):
        ratio = ours["median_seconds"] / cut["median_seconds"]
        print(f"throughput of tensor=2 on two cores, of one process with two threads: {ratio:.2f} (target 0.95)")


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a model of seconds, to see that everything runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    shape = TINY if options.tiny else Shape()
    figures = run(shape, options.only, rounds=options.rounds, warmup=options.warmup)
    if options.json:
        print(json.dumps({"machine": machine(), "shape": asdict(shape), "figures": figures}, indent=2))
        return
    print(", ".join(f"{k} {v}" for k, v in machine().items()))
    print(", ".join(f"{k} {v}" for k, v in asdict(shape).items()))
    report(figures)


if __name__ == "__main__":
    sys.exit(main())
