"""Peak memory of each rank and time of loading a published model.

    python benchmarks/models/pretrained.py                # four ranks of this machine's CPU
    python benchmarks/models/pretrained.py --tensor 2

A Llama with random weights is written in bfloat16, in several files, and read into float32 parameters. The peak of a
rank is its resident memory above the memory before it built the model; pages of mapped files count. A small model is
read before, so that PyTorch has loaded everything that it loads at first use. The limit of the peak is 1.1 times the
sum of the rank's own parameters and its slice of the largest tensor.
"""

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

from benchmarks.commands import TINY_HELP, aligned, command_line, print_figures
from benchmarks.machine import one_line
from benchmarks.training.ranks import figures_of_loading
from crosscut.checkpoint.storage import LocalFolder
from crosscut.config import Layout, ModelConfig
from crosscut.config.published.folders import published_table
from crosscut.launch import launch
from crosscut.model import GPT
from crosscut.parallel import ParallelMesh, RandomStreams
from crosscut.parallel.state.parameters import local_part
from crosscut.pretrained import load_weights
from crosscut.pretrained.families import published_forms
from crosscut.pretrained.writing import plan_files, write_tensors

LLAMA = {
    "positions": "rotary",
    "norm": "rms",
    "layers": ("attention swiglu",),
    "biases": "none",
    "tied": False,
    "dropout": 0.0,
}
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
    forms = published_forms(config, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)

    def tensors() -> Iterator[Tensor]:
        for form in forms.values():
            yield torch.empty(form.shape, dtype=form.dtype).normal_(std=0.02, generator=generator)

    files = plan_files(forms, max_bytes=MAX_FILE_BYTES)
    write_tensors(LocalFolder(folder), files, tensors())
    table = published_table(config, dtype="bfloat16", begin=0, stops=(0,))
    (folder / "config.json").write_text(json.dumps(table), encoding="utf-8")


def load(stored: tuple[ModelConfig, Path], mesh: ParallelMesh) -> dict[str, float]:
    """Read a model on this rank. Returns the seconds, and the bytes of the rank's parameters and of the largest one."""
    config, folder = stored
    model = GPT(config, mesh=mesh, streams=RandomStreams(mesh, 0))
    start = time.perf_counter()
    load_weights(model, config, folder)
    seconds = time.perf_counter() - start
    parts = [local_part(parameter.detach()).nbytes for parameter in model.parameters()]
    return {"seconds": seconds, "share": sum(parts), "slice": max(parts)}


def measure(config: ModelConfig, layout: Layout, folder: Path) -> list[dict[str, Any]]:
    """Measure the figures of each rank."""
    models = (TINY, folder / "small"), (config, folder / "large")
    for model in models:
        write_folder(*model)
    return launch(figures_of_loading, (layout, load, *models), num_ranks=layout.world_size)


def limit(rank: dict[str, Any]) -> float:
    """Return the limit of the peak of a rank, in bytes."""
    return 1.1 * (rank["share"] + rank["slice"])


def report(ranks: list[dict[str, Any]]) -> None:
    """Print the figures."""
    rows: list[list[object]] = [["rank", "share MB", "largest slice MB", "peak MB", "limit MB", "seconds"]]
    for number, rank in enumerate(ranks):
        sizes = (f"{size / 1e6:.1f}" for size in (rank["share"], rank["slice"], rank["peak"], limit(rank)))
        rows.append([number, *sizes, f"{rank['seconds']:.2f}"])
    print(aligned(rows))
    kept = all(rank["peak"] <= limit(rank) for rank in ranks)
    print(f"Every peak is within its limit: {'yes' if kept else 'NO'}")


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = command_line(__doc__, tiny=TINY_HELP, figures="print")
    parser.add_argument("--tensor", type=int, default=4, help="tensor ranks")
    parser.add_argument("--folder", type=Path, help="folder for temporary files")
    options = parser.parse_args(arguments)
    config = TINY if options.tiny else FULL
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="crosscut-pretrained-") as folder:
        ranks = measure(config, Layout(tensor=options.tensor), Path(folder))
    if not print_figures(options, ("torch",), {"model": asdict(config), "ranks": ranks}):
        print(one_line(asdict(config)))
        report(ranks)


if __name__ == "__main__":
    sys.exit(main())
