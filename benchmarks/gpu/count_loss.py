"""Count what the loss does with the logits of one chunk on an H100, without an H100: launches, and passes over them.

    python benchmarks/gpu/count_loss.py [--tokens C] [--vocabulary V] [--padding N] [--soft-cap CAP]

A pass reads or writes each logit once, in bfloat16. The product that writes the logits, and the two products that read
their gradients, are not counted. `count.py` counts a layer.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gpu.without_gpu import CodeMade, on_code  # isort: split

import torch
import torch._inductor.config
from torch._inductor.graph import GraphLowering

from benchmarks.commands import command_line
from benchmarks.gpu.count import count_graph
from crosscut.kernels.loss_passes import Logits
from crosscut.rehearsal.pretence import WithoutMemory
from crosscut.training.speed.compilation import compiled_loss


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = command_line(__doc__)
    for name, default in (("tokens", 4096), ("vocabulary", 1 << 17), ("padding", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--soft-cap", type=float, default=0.0)
    given = parser.parse_args(arguments)
    launches, num_bytes = 0, 0

    def hear(graph: GraphLowering, code: str) -> None:
        nonlocal launches, num_bytes
        counted = count_graph(graph, code)
        launches, num_bytes = launches + counted.launches, num_bytes + counted.bytes

    on_code(hear)
    torch._inductor.config.joint_graph_constant_folding = False  # it computes constants on the device
    passes = compiled_loss().compiled
    assert passes is not None
    with WithoutMemory(allow_non_fake_inputs=True), torch.no_grad(), torch.device("cuda", 0):
        values = torch.empty(given.tokens, given.vocabulary, dtype=torch.bfloat16)
        logits = Logits(values, given.vocabulary - given.padding, given.soft_cap)
        index, highest, sums = (torch.empty(given.tokens, dtype=kind) for kind in (torch.long, *[torch.float32] * 2))
        with suppress(CodeMade):
            passes.sums(logits, index, torch.float32)
        with suppress(CodeMade):
            passes.error(logits, highest, sums, index, None)
    print(
        f"{launches} launches {num_bytes / (2 * given.tokens * given.vocabulary):.2f} passes {num_bytes / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
