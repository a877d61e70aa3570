"""Speed of attention with a block mask beside the dense kernel, forward and backward.

    python benchmarks/training/sparse_attention.py                      # 4,096 tokens, a quarter of the blocks
    python benchmarks/training/sparse_attention.py --tokens 16384 --rounds 3
    python benchmarks/training/sparse_attention.py --compile            # also FlexAttention, which needs a C++ compiler

The contenders take turns, so that a slow moment of the machine slows all of them alike. The table shows the median of
each one's seconds, and the median of its quotients with the dense causal kernel of the same round. Contenders:

- dense: `scaled_dot_product_attention` with `is_causal`, which skips the later half of the scores
- dense with the mask: the same function with the mask of all tokens
- blocks: `crosscut.kernels.block_attention`
- rows: a call of the dense kernel for each block of queries, with the keys and values that it sees, by autograd
- flex: compiled FlexAttention, which has no backward pass on the CPU
"""

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import TINY_HELP, aligned, command_line, progress_bar, write_figures
from benchmarks.machine import print_machine
from crosscut.architecture.blocks import BlockMask
from crosscut.kernels.block_attention import block_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
DENSE = "dense"
NUM_HEADS, HEAD_SIZE = 8, 64


class Seconds(NamedTuple):
    """Seconds of a forward and of a backward pass. The latter is NaN for a contender without one."""

    forward: float
    backward: float


def token_mask(blocks: BlockMask, length: int) -> Tensor:
    """Mask of all pairs of tokens, [S, S], which is true where a query sees a key."""
    number, size = blocks.num_blocks(length), blocks.block_size
    seen = torch.zeros(number, number, dtype=torch.bool)
    for block in range(number):
        seen[block, list(blocks.keys_of(block, number))] = True
    return seen.repeat_interleave(size, 0).repeat_interleave(size, 1)[:length, :length].tril()


def rows_of(blocks: BlockMask, length: int) -> Attend:
    """Attention by a call of the dense kernel for each block of queries."""
    mask, size = token_mask(blocks, length), blocks.block_size
    rows = [mask[start : start + size] for start in range(0, length, size)]
    keys = [row.any(0).nonzero().flatten() for row in rows]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [
            F.scaled_dot_product_attention(part, *(x.index_select(2, seen) for x in (k, v)), attn_mask=row[:, seen])
            for part, row, seen in zip(q.split(size, 2), rows, keys, strict=True)
        ]
        return torch.cat(parts, 2)

    return attend


def flex_of(blocks: BlockMask, length: int) -> Attend:
    """Compiled FlexAttention."""
    table, size = token_mask(blocks, length), blocks.block_size
    mask = create_block_mask(
        lambda _b, _h, i, j: table[i, j], None, None, length, length, device="cpu", BLOCK_SIZE=size
    )
    compiled = torch.compile(flex_attention)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            result: Tensor = compiled(*(x.detach() for x in (q, k, v)), block_mask=mask)
        return result

    return attend


def contenders(blocks: BlockMask, length: int, *, compiles: bool) -> dict[str, Attend]:
    """The contenders by their names."""
    added = torch.zeros(length, length).masked_fill_(~token_mask(blocks, length), float("-inf"))
    attend = F.scaled_dot_product_attention
    found: dict[str, Attend] = {
        DENSE: lambda q, k, v: attend(q, k, v, is_causal=True),
        "dense with the mask": lambda q, k, v: attend(q, k, v, attn_mask=added),
        "blocks": lambda q, k, v: block_attention(q, k, v, blocks),
        "rows": rows_of(blocks, length),
    }
    return found | ({"flex": flex_of(blocks, length)} if compiles else {})


def operands(length: int) -> tuple[Tensor, ...]:
    """Queries, keys, values and a gradient, each [1, A, S, D], in the memory order of a model."""
    *qkv, grad = torch.randn(4, 1, length, NUM_HEADS, HEAD_SIZE).transpose(2, 3).unbind()
    return (*(x.requires_grad_() for x in qkv), grad)


def timed(attend: Attend, inputs: tuple[Tensor, ...]) -> tuple[Seconds, tuple[Tensor, ...]]:
    """Return the seconds of a contender, and its result and gradients."""
    *qkv, grad = inputs
    start = perf_counter()
    result = attend(*qkv)
    middle = perf_counter()
    if not result.requires_grad:
        return Seconds(middle - start, float("nan")), (result,)
    grads = torch.autograd.grad(result, qkv, grad)
    return Seconds(middle - start, perf_counter() - middle), (result.detach(), *grads)


def measure(found: dict[str, Attend], length: int, rounds: int) -> dict[str, list[Seconds]]:
    """Let the contenders take turns. Raises `AssertionError` if their results differ from the dense mask."""
    torch.manual_seed(1)
    inputs = operands(length)
    _, wanted = timed(found["dense with the mask"], inputs)
    seconds: dict[str, list[Seconds]] = {name: [] for name in found}
    with progress_bar() as progress:
        task = progress.add_task("rounds", total=rounds + 1, told="")
        for number in range(rounds + 1):
            for name, attend in found.items():
                spent, results = timed(attend, inputs)
                seconds[name] += [spent] if number else []  # the first round warms up
                if name != DENSE:
                    torch.testing.assert_close(results, wanted[: len(results)], rtol=1e-3, atol=1e-4)
            progress.advance(task)
    return seconds


def rows_of_table(seconds: dict[str, list[Seconds]]) -> list[dict[str, object]]:
    """Medians of each contender, and of its quotients with the dense kernel of the same round."""
    rows: list[dict[str, object]] = []
    for name, own in seconds.items():
        forward, backward = (median(column) for column in zip(*own, strict=True))
        pairs = zip(seconds[DENSE], own, strict=True)
        times = median(sum(dense) / sum(each) for dense, each in pairs)
        rows.append({"contender": name, "forward": forward, "backward": backward, "times as fast": times})
    return rows


def main() -> None:
    parser = command_line(__doc__, tiny=TINY_HELP, figures="write")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the sequence")
    parser.add_argument("--window", type=int, default=4, help="blocks of the window")
    parser.add_argument("--stride", type=int, default=8, help="every n-th block is seen by all")
    parser.add_argument("--block-size", type=int, default=64, help="tokens of a block")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of PyTorch")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--compile", action="store_true", help="also measure compiled FlexAttention")
    chosen = parser.parse_args()
    length, rounds = (256, 1) if chosen.tiny else (chosen.tokens, chosen.rounds)
    torch.set_num_threads(chosen.threads)
    blocks = BlockMask(chosen.block_size, chosen.window, global_blocks=1, stride=chosen.stride, is_causal=True)
    number = blocks.num_blocks(length)
    share = blocks.num_pairs(length) / (number * (number + 1) // 2)
    print_machine("torch")
    print(f"{length:,} tokens, {NUM_HEADS} heads of {HEAD_SIZE}, float32, {chosen.threads} threads; {share:.1%} of the")
    print(f"{number * (number + 1) // 2:,} blocks that dense causal attention computes")
    rows = rows_of_table(measure(contenders(blocks, length, compiles=chosen.compile), length, rounds))
    table = [["contender", "forward, s", "backward, s", "times as fast as dense"]]
    table += [
        [str(row["contender"]), *(f"{row[key]:.3f}" for key in ("forward", "backward", "times as fast"))]
        for row in rows
    ]
    print(aligned(table))
    write_figures(chosen.json, rows)


if __name__ == "__main__":
    main()
