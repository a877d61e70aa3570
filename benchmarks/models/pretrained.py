"""Peak memory of each rank and time of loading a published model.

    python benchmarks/models/pretrained.py                # four ranks of this machine's CPU
    python benchmarks/models/pretrained.py --tensor 2

A Llama with random weights is written in bfloat16, in several files, and read into float32 parameters. The peak of a
rank is its resident memory above the memory before it built the model; pages of mapped files count. A small model is
read before, so that PyTorch has loaded everything that it loads at first use. The limit of the peak is 1.1 times the
sum of the rank's own parameters and its slice of the largest tensor.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.machine import describe_machine, print_machine
from crosscut.checkpoint.storage import LocalFolder
from crosscut.config import Layout, ModelConfig
from crosscut.config.published.folders import published_table
from crosscut.launch import launch, process_group
from crosscut.model import GPT
from crosscut.parallel import RandomStreams, make_mesh
from crosscut.parallel.state.parameters import local_part
from crosscut.pretrained import load_weights
from crosscut.pretrained.families import published_shapes
from crosscut.pretrained.writing import plan_files, write_tensors

CPU = torch.device("cpu")
LLAMA = {"positions": "rotary", "norm": "rms", "mlp": "swiglu", "biases": "none", "tied": False, "dropout": 0.0}
FULL = ModelConfig(
    num_layers=8, hidden_size=1024, num_heads=16, num_kv_heads=8, mlp_size=2816, vocab_size=32_000,
    max_sequence_length=2048, **LLAMA,
)  # fmt: skip
TINY = ModelConfig(
    num_layers=2, hidden_size=64, num_heads=8, num_kv_heads=4, mlp_size=128, vocab_size=512, max_sequence_length=64,
    **LLAMA,
)  # fmt: skip
MAX_FILE_BYTES = 100_000_000


def write_folder(config: ModelConfig, folder: Path) -> None:
    """Write a published model with random weights."""
    folder.mkdir()
    shapes = published_shapes(config)
    generator = torch.Generator().manual_seed(0)

    def tensors() -> Iterator[Tensor]:
        for shape in shapes.values():
            yield torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)

    files = plan_files(shapes, torch.bfloat16, max_bytes=MAX_FILE_BYTES)
    write_tensors(LocalFolder(folder), files, torch.bfloat16, tensors())
    table = published_table(config, dtype="bfloat16", begin=0, stops=(0,))
    (folder / "config.json").write_text(json.dumps(table), encoding="utf-8")


def read(layout: Layout, config: ModelConfig, folder: Path, results: Path) -> None:
    """Read the small and then the large model on this rank, and write the figures of the large one."""
    with process_group(CPU):
        mesh = make_mesh(layout, CPU)
        _load(TINY, folder / "small", mesh)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        seconds, model = _load(config, folder / "large", mesh)
        parts = [local_part(parameter.detach()).nbytes for parameter in model.parameters()]
        figures = {"seconds": seconds, "share": sum(parts), "slice": max(parts), "peak": status("VmHWM") - before}
        (results / f"{mesh.tensor.rank}.json").write_text(json.dumps(figures))


def _load(config: ModelConfig, folder: Path, mesh: Any) -> tuple[float, GPT]:
    model = GPT(config, mesh=mesh, streams=RandomStreams(mesh, 0))
    start = time.perf_counter()
    load_weights(model, config, folder)
    return time.perf_counter() - start, model


def status(name: str) -> int:
    """Read the resident memory (`VmRSS`) or its peak (`VmHWM`), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(config: ModelConfig, layout: Layout, folder: Path) -> list[dict[str, Any]]:
    """Measure the figures of each rank."""
    write_folder(config, folder / "large")
    write_folder(TINY, folder / "small")
    results = folder / "results"
    results.mkdir()
    launch(read, (layout, config, folder, results), num_ranks=layout.world_size)
    return [json.loads(path.read_text()) for path in sorted(results.iterdir())]


def limit(rank: dict[str, Any]) -> float:
    """Return the limit of the peak of a rank, in bytes."""
    return 1.1 * (rank["share"] + rank["slice"])


def report(ranks: list[dict[str, Any]]) -> None:
    """Print the figures."""
    print(f"{'rank':>4}{'share MB':>10}{'largest slice MB':>18}{'peak MB':>9}{'limit MB':>10}{'seconds':>9}")
    for number, rank in enumerate(ranks):
        columns = [rank["share"] / 1e6, rank["slice"] / 1e6, rank["peak"] / 1e6, limit(rank) / 1e6]
        print(f"{number:>4}{columns[0]:>10.1f}{columns[1]:>18.1f}{columns[2]:>9.1f}{columns[3]:>10.1f}", end="")
        print(f"{rank['seconds']:>9.2f}")
    kept = all(rank["peak"] <= limit(rank) for rank in ranks)
    print(f"Every peak is within its limit: {'yes' if kept else 'NO'}")


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensor", type=int, default=4, help="tensor ranks")
    parser.add_argument("--folder", type=Path, help="folder for temporary files")
    parser.add_argument(
        "--tiny", action="store_true", help="use a tiny model, to check in seconds that everything runs"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    config = TINY if options.tiny else FULL
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="crosscut-pretrained-") as folder:
        ranks = measure(config, Layout(tensor=options.tensor), Path(folder))
    if options.json:
        print(json.dumps({"machine": describe_machine("torch"), "model": asdict(config), "ranks": ranks}, indent=2))
        return
    print_machine("torch")
    print(", ".join(f"{name} {value}" for name, value in asdict(config).items()))
    report(ranks)


if __name__ == "__main__":
    sys.exit(main())
