"""Count what one layer does on an H100, without an H100: launches, bytes, matrix products and attention calls.

    python benchmarks/gpu/count.py [CASE ...] [--code FOLDER] [--json FILE]

Crosscut's trainer compiles the layer from fake tensors, as it would in a run, and Inductor generates its code. Nothing
is run. Needs Triton. The counts are Inductor's own: each kernel reads and writes each of its tensors once. A pass is
the bytes of the residual stream in bfloat16, tokens x hidden size x 2. Bytes are those of Triton's kernels; matrix
products, attention and collectives read and write theirs besides. "Kept" is what the forward pass stores for the
backward pass, without its inputs.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu.without_gpu import CodeMade, on_code  # isort: split

import torch
from torch._inductor.graph import GraphLowering

from benchmarks.commands import command_line
from crosscut.config import load_run, resolve
from crosscut.parallel import make_mesh
from crosscut.parallel.pretended import pretended_ranks
from crosscut.rehearsal.pretence import WithoutMemory
from crosscut.rehearsal.rehearse import blank_batches
from crosscut.training.step import Trainer

LLAMA = {"positions": "rotary", "norm": "rms", "layers": ["attention swiglu"], "biases": "none"}


class Case(NamedTuple):
    """One layer, its batch and its place in a layout."""

    hidden: int = 2048
    heads: int = 16
    sequence: int = 4096
    batch: int = 4
    tensor: int = 1
    splits_sequence: bool = False
    is_llama: bool = False
    precision: str = "bfloat16"

    @property
    def pass_bytes(self) -> int:
        """Bytes of the whole residual stream of a micro-batch in bfloat16."""
        return 2 * self.batch * self.sequence * self.hidden

    def table(self) -> dict[str, dict[str, object]]:
        """Run file of the case."""
        return {
            "model": {
                "num_layers": 1, "hidden_size": self.hidden, "num_heads": self.heads, "vocab_size": 1024,
                "max_sequence_length": self.sequence, "dropout": 0.0, **(LLAMA if self.is_llama else {}),
            },
            "training": {
                "batch_size": self.batch, "micro_batch_size": self.batch, "sequence_length": self.sequence,
                "precision": self.precision, "compile": "on", "steps": 10,
            },
            "layout": {"tensor": self.tensor, "sequence_parallel": self.splits_sequence},
            "optimizer": {"warmup_steps": 1},
        }  # fmt: skip


_EIGHTH = Case(hidden=3072, heads=32, sequence=1024, batch=8, tensor=8)
_BFLOAT16 = {
    "gpt": Case(),
    "llama": Case(is_llama=True),
    "gpt eighth": _EIGHTH,
    "gpt eighth split": _EIGHTH._replace(splits_sequence=True),
}
CASES = {
    name if precision == "bfloat16" else f"{name} {precision}": case._replace(precision=precision)
    for precision in ("bfloat16", "float8")
    for name, case in _BFLOAT16.items()
}
"""GPT-2 and Llama of 1.7B parameters on one GPU, and one tensor rank of eight of GPT-2 of 8.3B parameters."""


@dataclass(frozen=True)
class Count:
    """Work of one pass through a layer."""

    launches: int
    """Launches of Triton's kernels."""
    bytes: int
    """Bytes that Triton's kernels read and write."""
    products: int
    attention: int
    collectives: int
    other: int
    """Other kernels that Inductor calls, such as copies."""
    kept: int
    """Bytes that a forward pass stores for the backward pass, without its inputs and its result."""


def count(case: Case, code_folder: Path | None = None) -> list[Count]:
    """Count the forward and the backward pass of the case's layer. Their code is written into the folder."""
    counted: list[Count] = []

    def hear(graph: GraphLowering, code: str) -> None:
        counted.append(count_graph(graph, code))
        if code_folder is not None:
            code_folder.mkdir(parents=True, exist_ok=True)
            (code_folder / ("backward.py" if graph.is_backward else "forward.py")).write_text(code)

    on_code(hear)
    torch._dynamo.reset()
    run = load_run(case.table(), ())
    with pretended_ranks(case.tensor, 0):
        mesh = make_mesh(run.layout, torch.device("cuda", 0))
        with WithoutMemory(allow_non_fake_inputs=True):
            trainer = Trainer(resolve(run, device="cuda", precision=case.precision), mesh)
            with mesh.device:
                batches = blank_batches(run, mesh.context)
            with suppress(CodeMade):
                trainer.accumulate(0, batches)
    assert len(counted) == 2, "the layer has one graph for each pass"
    return counted


def count_graph(graph: GraphLowering, code: str) -> Count:
    """Count the work of a graph and of the code that Inductor made of it."""
    calls = Counter(map(_kind, _called(code)))
    inputs = set(graph.graph_inputs)
    kept = [out for out in graph.graph_outputs[1:] if out.get_name() not in inputs] if not graph.is_backward else []
    nodes = graph.scheduler.nodes
    return Count(
        launches=len(re.findall(r"^\s+triton_\w+\.run\(", code, re.MULTILINE)),
        bytes=sum(node.get_read_write_buffers_sizes() for node in nodes if not node.is_extern()),
        products=calls["product"], attention=calls["attention"], collectives=calls["collective"],
        other=calls["other"], kept=sum(_bytes(graph, out) for out in kept),
    )  # fmt: skip


def _called(code: str) -> Iterator[str]:
    """Names of the functions that generated code calls, besides Triton's kernels."""
    body = code[code.index("def call(self, args)") :]
    return (match[1] for match in re.finditer(r"\b(?:extern_kernels|torch\.ops)\.([\w.]+)\(", body))


def _kind(name: str) -> str:
    if re.search(r"mm\b|_mm", name):
        return "product"
    if "attention" in name:
        return "attention"
    return "waits" if "wait_tensor" in name else "collective" if "c10d" in name else "other"


def _bytes(graph: GraphLowering, buffer: object) -> int:
    return graph.sizevars.optimization_hint(buffer.get_numel()) * buffer.get_dtype().itemsize


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = command_line(__doc__, figures="write")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"one of: {', '.join(CASES)}; all by default")
    parser.add_argument("--code", type=Path, help="write the generated code into this folder")
    given = parser.parse_args(arguments)
    figures = {}
    for name in given.cases or CASES:
        folder = given.code and given.code / name.replace(" ", "-")
        forward, backward = count(CASES[name], folder)
        figures[name] = {"forward": asdict(forward), "backward": asdict(backward)}
        for way, each in (("forward", forward), ("backward", backward)):
            passes = each.bytes / CASES[name].pass_bytes
            print(f"{name:24} {way:8} {each.launches:3} launches {passes:6.1f} passes {each.bytes / 1e9:6.2f} GB "
                  f"{each.products:2} products {each.attention} attention {each.collectives} collectives "
                  f"{each.other} other, kept {each.kept / 1e6:.0f} MB", flush=True)  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
