"""Runs the small matrices of `docs/alive.html` on two ranks, and writes what each rank held and sent to
`docs/alive-recorded.json`.

    python docs/alive_ranks.py

takes ten seconds. `python docs/generate.py` then writes the page.
"""

import json
import re
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from crosscut.config import Layout  # noqa: E402 - the programs here are no package
from crosscut.parallel import (  # noqa: E402
    CollectiveRecorder,
    ColumnParallelLinear,
    ParallelMesh,
    RowParallelLinear,
    copy_to_tensor_parallel,
    make_mesh,
    reduce_from_tensor_parallel,
    vocab_parallel_cross_entropy,
)
from crosscut.parallel.collectives import all_reduce  # noqa: E402

RECORDED = ROOT / "docs" / "alive-recorded.json"
DIGITS = 6
"""Decimals of a recorded number."""

INPUTS = {
    "x": [[1, 2, 0, -1], [0, 1, -1, 2]],
    "a": [[1, 0, -1, 0.5], [0.5, -1, 1, 0], [0, 1, 0.5, -1], [-0.5, 0, 1, 1]],
    "b": [[1, -0.5, 0, 1], [0, 1, 0.5, -1], [0.5, 0, 1, 0], [-1, 1, 0, 0.5]],
    "grad_z": [[1, 0, -1, 0.5], [0, 0.5, 1, -1]],
    "hidden": [[1, 2, 0, -1]],
    "words": [
        *([1, 0, 0, 0], [0, 1, 0, 1], [0.5, 0.5, 0, 0], [0, -0.5, 1, 0]),
        *([1, 1, 0, 0], [0, 1, 0.5, 0], [-1, 0, 0, 1], [0, 0.5, 0, 0.5]),
    ],
}
"""X, A and B of the MLP, the gradient of its output, and a token's hidden state with the rows of eight words."""
TARGET = 5
"""Word that follows the token."""

Held = dict[str, object]
"""Matrices that a rank held, and the messages that it sent, by name."""


def recorded() -> list[Held]:
    """On a rank: the paper's cut forward and backward, the cut by rows first, and the loss of a token."""
    mesh = make_mesh(Layout(tensor=2), torch.device("cpu"))
    made = paper_cut(mesh) | rows_first(mesh) | loss_of_a_token(mesh)
    return {name: rounded(value) if isinstance(value, Tensor) else value for name, value in made.items()}


def paper_cut(mesh: ParallelMesh) -> Held:
    """A cut by columns and B cut by rows. Our layers run twice: as training runs them, for the messages, and in the
    plain order of their docstrings, for the matrices between.
    """
    column, row = layers(mesh)
    x = tensor("x").requires_grad_()
    with CollectiveRecorder(mesh) as forward:
        trained = row(F.gelu(column(x)))
    with CollectiveRecorder(mesh) as backward:
        trained.backward(tensor("grad_z"))
    grad_x, x.grad = x.grad, None
    entered = copy_to_tensor_parallel(x, mesh.tensor)
    xa = column.multiply(entered)
    y = F.gelu(xa)
    yb = row.inside(y)
    z = reduce_from_tensor_parallel(yb, mesh.tensor)
    for between in (entered, xa, y, yb):
        between.retain_grad()
    z.backward(tensor("grad_z"))
    assert torch.equal(z, trained)
    assert torch.equal(x.grad, grad_x)
    return {
        "a": column.weight.to_local().T,
        "b": row.weight.to_local().T,
        "xa": xa,
        "y": y,
        "yb": yb,
        "z": z,
        "grad_y": y.grad,
        "grad_xa": xa.grad,
        "grad_x_part": entered.grad,
        "grad_x": x.grad,
        "sent_forward": [list(sent) for sent in forward.sent],
        "sent_backward": [list(sent) for sent in backward.sent],
    }


def rows_first(mesh: ParallelMesh) -> Held:
    """A cut by rows: each rank multiplies its columns of X, and GeLU needs the sum of the products."""
    own = RowParallelLinear(4, 4, mesh=mesh, bias=False, dtype=torch.float64)
    fill(own.weight, tensor("a").T.chunk(2, 1)[mesh.tensor.rank])
    x = tensor("x").chunk(2, 1)[mesh.tensor.rank]
    with CollectiveRecorder(mesh) as recorder:
        whole = own(x)
    part = own.inside(x)
    return {
        "rows_x": x,
        "rows_a": own.weight.to_local().T,
        "rows_part": part,
        "rows_sum": whole,
        "rows_y": F.gelu(whole),
        "rows_gelu_part": F.gelu(part),
        "rows_wrong": all_reduce(F.gelu(part), mesh.tensor),
        "rows_sent": [list(sent) for sent in recorder.sent],
    }


def loss_of_a_token(mesh: ParallelMesh) -> Held:
    """The loss of one token over eight words, and the three numbers that the ranks send."""
    axis = mesh.tensor
    words = tensor("words").chunk(2)[axis.rank]
    hidden = copy_to_tensor_parallel(tensor("hidden"), axis)
    with CollectiveRecorder(mesh) as recorder:
        loss = vocab_parallel_cross_entropy(hidden, words, torch.tensor([TARGET]), vocab_size=8, axis=axis)
    logits = F.linear(hidden, words)
    largest = logits.max(-1, keepdim=True).values
    most = all_reduce(largest, axis, "max")
    place = TARGET - axis.rank * len(words)
    target = logits[:, place : place + 1] if 0 <= place < len(words) else torch.zeros_like(most)
    sums = (logits - most).exp().sum(-1, keepdim=True)
    return {
        "logits": logits,
        "largest": largest,
        "most": most,
        "sum_part": sums,
        "sum": all_reduce(sums, axis),
        "target_part": target,
        "target": all_reduce(target, axis),
        "loss": loss.reshape(1, 1),
        "loss_sent": [list(sent) for sent in recorder.sent],
    }


def layers(mesh: ParallelMesh) -> tuple[ColumnParallelLinear, RowParallelLinear]:
    """The MLP's two layers. PyTorch stores a weight as the transpose of the paper's matrix."""
    column = ColumnParallelLinear(4, 4, mesh=mesh, bias=False, dtype=torch.float64)
    row = RowParallelLinear(4, 4, mesh=mesh, bias=False, dtype=torch.float64)
    fill(column.weight, tensor("a").T.chunk(2, 0)[mesh.tensor.rank])
    fill(row.weight, tensor("b").T.chunk(2, 1)[mesh.tensor.rank])
    return column, row


def fill(parameter: nn.Parameter, own: Tensor) -> None:
    """Give this rank's part of a parameter its values."""
    with torch.no_grad():
        parameter.to_local().copy_(own)


def tensor(name: str) -> Tensor:
    """One of `INPUTS`, in float64."""
    return torch.tensor(INPUTS[name], dtype=torch.float64)


def rounded(matrix: Tensor) -> list[list[float]]:
    """Rows of a matrix. Adding 0 turns -0 into 0."""
    return [[round(value, DIGITS) + 0 for value in row] for row in matrix.tolist()]


def main() -> None:
    """Run on two ranks and write the file."""
    from docs.alive_ranks import recorded  # the ranks import it by this name
    from tests.ranks import RankPool

    pool = RankPool(2)
    ranks = pool.run(2, recorded)
    pool.close()
    text = json.dumps({"inputs": INPUTS, "target": TARGET, "ranks": ranks}, separators=(",", ":"))
    RECORDED.write_text(re.sub(r',(?="\w+":)', ",\n", text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
