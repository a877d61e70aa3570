"""A plain module with a layer of every style, its plan, and ways to cut it wrongly."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.cutting import Plan, Rule, Style, Table, cut
from crosscut.cutting.layers import used_part
from crosscut.parallel import ParallelMesh, reduce_from_tensor_parallel

WIDTH, HEAD, HEADS, KEY_HEADS, VOCAB, INNER = 8, 2, 4, 2, 13, 16


class Positions(nn.Embedding):
    """Learned positions with an offset, as in OPT."""

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device) + 2
        return super().forward(positions.expand(x.shape[:2]))


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


class Conv1D(nn.Module):
    """Linear layer with a weight [in, out], as that of transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.3)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """[B, S, heads x HEAD] each; fewer keys than queries are repeated."""
    q, k, v = (each.unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = q @ k.transpose(-1, -2) / HEAD**0.5
    scores = scores if bias is None else scores + bias
    return (F.dropout(scores.softmax(-1), dropout) @ v).transpose(1, 2).flatten(2)


class Grouped(nn.Module):
    """Attention with fewer keys than queries, a norm of the queries, and biases by head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, HEADS * HEAD), nn.Linear(HEADS * HEAD, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False) for _ in range(2))
        self.q_norm = nn.RMSNorm(HEAD)
        self.bias = nn.Embedding(3, HEADS)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.register_buffer("slopes", torch.arange(1.0, HEADS + 1))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_norm(self.q(x).unflatten(-1, (-1, HEAD))).flatten(-2)
        place = torch.arange(x.shape[1], device=x.device)
        apart = (place[:, None] - place).clamp(-1, 1) + 1
        bias = self.bias(apart).permute(2, 0, 1) + self.sinks[:, None, None] - self.slopes[:, None, None] * apart
        y: Tensor = self.o(attend(q, self.k(x), self.v(x), bias, 0.2 if self.training else 0.0))
        return y


class Fused(nn.Module):
    """Attention of one fused layer, split by an integer, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.split_size, self.num_heads = WIDTH, HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(self.split_size, -1)
        assert q.shape[-1] == self.num_heads * HEAD
        y: Tensor = self.c_proj(attend(q, k, v))
        return y


class Unequal(nn.Module):
    """Attention of one fused layer with parts of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * HEAD), nn.Linear(HEADS * HEAD, WIDTH)
        self.query_heads, self.key_heads = HEADS, KEY_HEADS

    def forward(self, x: Tensor) -> Tensor:
        sizes = [heads * HEAD for heads in (self.query_heads, self.key_heads, self.key_heads)]
        y: Tensor = self.o(attend(*self.qkv(x).split(sizes, -1)))
        return y


class Latent(nn.Module):
    """Attention whose keys have a part that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv_a = nn.Linear(WIDTH, HEADS * HEAD), nn.Linear(WIDTH, 6 + HEAD)
        self.kv_b, self.o = nn.Linear(6, HEADS * 2 * HEAD), nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x)
        compressed, shared = self.kv_a(x).split([6, HEAD], -1)
        k, v = self.kv_b(compressed).unflatten(-1, (-1, 2, HEAD)).unbind(-2)
        y: Tensor = self.o(attend(q, (k + shared.unsqueeze(-2)).flatten(-2), v.flatten(-2)))
        return y


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down, self.dropout = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        y: Tensor = self.down(self.dropout(F.silu(gate) * up))
        return y


class Block(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), attention, Gated()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.mlp(x)


class Net(nn.Module):
    """A model with a block of each kind of attention, of which the first runs twice. The head is tied."""

    def __init__(self, *, is_small: bool = False) -> None:
        super().__init__()
        kinds = (Grouped,) if is_small else (Grouped, Fused, Unequal, Latent)
        self.embed, self.positions = Scaled(VOCAB, WIDTH, padding_idx=1), Positions(10, WIDTH)
        self.blocks = nn.ModuleList(Block(kind()) for kind in kinds)
        self.mix = nn.Linear(WIDTH, WIDTH + 2)
        self.sum = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens) + self.positions(tokens)
        for block in (self.blocks[0], *self.blocks):
            x = block(x)
        return {"logits": self.head(self.sum(torch.tanh(self.mix(x)[..., 2:])))}


def build(*, is_small: bool = False) -> Any:
    tokens = torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(3))
    tokens[0, :2] = torch.tensor([VOCAB - 1, 1])
    return Net(is_small=is_small), {"tokens": tokens}, partial(loss_of, tokens)


def loss_of(tokens: Tensor, output: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), tokens.flatten())


_COLUMNS = Rule(style=Style.COLWISE)
RULES = {
    "embed": Rule(style=Style.EMBEDDING_ROWWISE),
    "positions": Rule(style=Style.EMBEDDING_ROWWISE),
    "head": Rule(style=Style.COLWISE_GATHER_OUTPUT),
    "mix": Rule(style=Style.COLWISE_GATHER_OUTPUT),
    "sum": Rule(style=Style.ROWWISE_SPLIT_INPUT),
    "blocks.0.attention.q": Rule(style=Style.COLWISE, units=HEADS),
    "blocks.0.attention.k": Rule(style=Style.COLWISE, units=KEY_HEADS),
    "blocks.0.attention.v": Rule(style=Style.COLWISE, units=KEY_HEADS),
    "blocks.0.attention.q_norm": Rule(style=Style.REPLICATED_WITH_GRAD_ALLREDUCE),
    "blocks.0.attention.bias": Rule(style=Style.EMBEDDING_COLWISE),
    "blocks.0.attention.o": Rule(
        style=Style.ROWWISE, columns=tuple(f"blocks.*.attention.{name}" for name in ("q", "k", "v"))
    ),
    "blocks.1.attention.c_attn": Rule(style=Style.PACKED_COLWISE, parts=(WIDTH,) * 3, units=HEADS),
    "blocks.1.attention.c_proj": Rule(style=Style.ROWWISE, columns=("blocks.*.attention.c_attn",)),
    "blocks.2.attention.qkv": Rule(style=Style.PACKED_COLWISE, parts=(8, 4, 4), units=KEY_HEADS),
    "blocks.2.attention.o": Rule(style=Style.ROWWISE, columns=("blocks.*.attention.qkv",)),
    "blocks.3.attention.q": _COLUMNS,
    "blocks.3.attention.kv_a": Rule(style=Style.MLA_KV_A_PROJ, parts=(6, HEAD)),
    "blocks.3.attention.kv_b": _COLUMNS,
    "blocks.3.attention.o": Rule(style=Style.ROWWISE, columns=("blocks.*.attention.q", "blocks.*.attention.kv_b")),
    "blocks.*.mlp.gate_up": Rule(style=Style.PACKED_COLWISE, parts=(INNER, INNER)),
    "blocks.*.mlp.down": Rule(style=Style.ROWWISE, columns=("blocks.*.mlp.gate_up",)),
    "blocks.*.norm": Rule(style=Style.REPLICATE),
}
PLAN = Plan(
    tensor=(2, 4),
    rules=RULES,
    integers={
        "blocks.1.attention": {"split_size": (WIDTH // 2, WIDTH // 4), "num_heads": (HEADS // 2, HEADS // 4)},
        "blocks.2.attention": {"query_heads": (2, 1), "key_heads": (1, 1)},
    },
    tables={
        "blocks.0.attention.slopes": Table(dimension=0),
        "blocks.0.attention.sinks": Table(dimension=-1),
    },
)

SMALL = Plan(
    tensor=(2, 4),
    rules={name: rule for name, rule in RULES.items() if not name.startswith(("blocks.1", "blocks.2", "blocks.3"))},
    tables=PLAN.tables,
)


# --- faults ----------------------------------------------------------------------------------------------------------


def cut_with(module: nn.Module, mesh: ParallelMesh, *, rules: Mapping[str, Rule] = {}, **changes: Any) -> None:
    """Cut the net by a changed plan."""
    cut(module, mesh, replace(PLAN, rules={**RULES, **rules}, **changes))


def cut_and_break(module: Any, mesh: ParallelMesh, *, fault: Callable[[Any, ParallelMesh], None]) -> None:
    """Cut the net by its plan, and change a layer."""
    cut(module, mesh, PLAN)
    fault(module, mesh)


def bias_of_every_rank(module: Any, _mesh: ParallelMesh) -> None:
    layer = module.blocks[3].attention.o
    layer.forward = lambda x: reduce_from_tensor_parallel(
        F.linear(x, used_part("weight", layer), layer.bias), layer.cut_site.axis
    )


def no_entrance(module: Any, _mesh: ParallelMesh) -> None:
    layer = module.blocks[1].mlp.gate_up
    layer.forward = lambda x: F.linear(x, used_part("weight", layer), used_part("bias", layer))


def one_entrance_for_two_inputs(module: Any, _mesh: ParallelMesh) -> None:
    entrance = module.blocks[1].mlp.gate_up.cut_site.entrance
    entrance.forget = lambda: None
    enter = type(entrance).enter

    def remembering(x: Tensor) -> Tensor:
        if entrance._before is None:
            enter(entrance, x)
        return entrance._before[2] if entrance._before[0].shape == x.shape else enter(entrance, x)  # type: ignore[no-any-return]

    entrance.enter = remembering


def shared_heads_not_summed(module: Any, _mesh: ParallelMesh) -> None:
    site = module.blocks[0].attention.k.cut_site
    site.shares = {"weight": replace(site.shares["weight"], is_summed=False)}


def table_of_another_rank(module: Any, mesh: ParallelMesh) -> None:
    attention = module.blocks[0].attention
    attention.slopes = torch.arange(1.0, HEADS + 1).double().chunk(mesh.tensor.size)[mesh.tensor.rank - 1]


def no_offset(module: Any, _mesh: ParallelMesh) -> None:
    site = module.positions.cut_site
    (_, stop), *_ = site.shares["weight"].spans[0]
    site.shares = {"weight": replace(site.shares["weight"], spans=(((0, stop),),) * site.axis.size)}


def regions_never_left(module: Any, _mesh: ParallelMesh) -> None:
    module.embed.cut_site.streams._leave = lambda regions: None


def parts_of_other_ranks(module: Any, mesh: ParallelMesh) -> None:
    weight = module.blocks[2].attention.qkv._parameters["weight"]
    shape = weight.shape[0] // mesh.tensor.size
    whole = weight.full_tensor().detach().view(mesh.tensor.size, shape, -1)
    weight._local_tensor.copy_(whole[mesh.tensor.rank - 1])
