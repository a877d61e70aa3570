"""Decoders in plain PyTorch, written independently of Crosscut, and a function that trains Crosscut's model on any
layout.
"""

import dataclasses
import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from crosscut.config import Layout, ModelConfig
from crosscut.config.parts.gated_delta import GatedDeltaConfig
from crosscut.config.parts.kinds import ATTENTIONS, Mixer
from crosscut.config.parts.mamba import MambaConfig
from crosscut.config.parts.mamba2 import Mamba2Config
from crosscut.config.parts.sliding_attention import SlidingAttentionConfig
from crosscut.config.parts.sparse_attention import SparseAttentionConfig
from crosscut.model import GPT, Batch, initialize
from crosscut.parallel import (
    IGNORED,
    GradientReducer,
    RandomStreams,
    Reducer,
    clip_gradients_,
    global_gradient_norm,
    make_mesh,
    make_reducer,
    shard_model,
)
from crosscut.parallel.collectives import all_reduce
from crosscut.parallel.state.parameters import local_offsets

CPU = torch.device("cpu")
CONFIG = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=300, max_sequence_length=16, dropout=0.0)
"""The 300 vocabulary entries are padded to 384, 512 and 512 on one, two and four ranks. The last of four ranks has only
padding.
"""
LLAMA: dict[str, Any] = {
    "positions": "rotary",
    "norm": "rms",
    "norm_epsilon": 1e-6,
    "layers": ("attention swiglu",),
    "biases": "none",
}
OLMO2: dict[str, Any] = {"norm_place": "output", "qk_norm": True, "qk_norm_over": "all_heads"}
WINDOWS: dict[str, Any] = {
    "layers": ("sliding_attention swiglu", "nope_attention gelu attention gelu"),
    "sliding_attention": SlidingAttentionConfig(window=5, rotary_base=100.0),
}
BLOCKS: dict[str, Any] = {
    "layers": ("sparse_attention swiglu", "attention gelu sparse_attention gelu"),
    "sparse_attention": SparseAttentionConfig(block_size=3, window=1, global_blocks=1, stride=3),
}
QWEN3_NEXT: dict[str, Any] = {
    "layers": ("gated_delta swiglu", "attention swiglu"),
    "norm_offset": True,
    "gated_delta": GatedDeltaConfig(
        num_value_heads=8, num_key_heads=2, value_head_size=6, key_head_size=5, conv_size=3, chunk_size=6
    ),
}
OLMO_HYBRID: dict[str, Any] = {
    "layers": ("gated_delta swiglu", "attention swiglu"),
    "norm_places": ("before", "output"),
    "gated_delta": replace(QWEN3_NEXT["gated_delta"], negative_eigenvalues=True, norm_epsilon=0.01),
}
BERT: dict[str, Any] = {"attention": "bidirectional", "token_types": 3, "layers": ("attention gelu_exact",)}
MASKED: dict[str, Any] = {"head": "masked_tokens", "sentence_order": True}
FAMILIES = {
    "GPT-2": CONFIG,
    "GPT-2 multi-query": dataclasses.replace(CONFIG, num_kv_heads=1),
    "Llama": dataclasses.replace(CONFIG, mlp_size=88, tied=False, **LLAMA),
    "Llama grouped-query": dataclasses.replace(CONFIG, num_kv_heads=2, mlp_size=88, tied=False, **LLAMA),
    "Llama multi-query": dataclasses.replace(CONFIG, num_kv_heads=1, mlp_size=88, **LLAMA),
    "Qwen2": dataclasses.replace(CONFIG, num_kv_heads=2, mlp_size=88, **{**LLAMA, "biases": "qkv"}),
    "Qwen3": dataclasses.replace(CONFIG, num_kv_heads=2, head_size=12, mlp_size=88, qk_norm=True, **LLAMA),
    "QK layer norm": dataclasses.replace(CONFIG, num_kv_heads=2, qk_norm=True, qk_norm_kind="layer"),
    "squared ReLU": dataclasses.replace(CONFIG, layers=("attention relu2",), biases="none"),
    "GeGLU": dataclasses.replace(CONFIG, layers=("attention geglu",), mlp_size=88),
    "norms without parameters": dataclasses.replace(
        CONFIG,
        num_kv_heads=2,
        embedding_norm=True,
        norm_affine=False,
        qk_norm=True,
        tied=False,
        **{**LLAMA, "layers": ("attention relu2",)},
    ),
    "layer norm of the embedding": dataclasses.replace(CONFIG, embedding_norm=True),
    "layer norms without parameters": dataclasses.replace(
        CONFIG, embedding_norm=True, norm_affine=False, qk_norm=True, qk_norm_kind="layer"
    ),
    "soft cap": dataclasses.replace(CONFIG, logit_softcap=0.5),
    "unequal layers": dataclasses.replace(CONFIG, layers=("attention swiglu", "gelu attention gelu attention")),
    "GPT": dataclasses.replace(CONFIG, norm_place="after"),
    "BERT": dataclasses.replace(CONFIG, norm_place="after", **BERT),
    "BERT with norms before": dataclasses.replace(CONFIG, **BERT),
    "masked BERT": dataclasses.replace(CONFIG, norm_place="after", **BERT, **MASKED),
    "masked BERT with norms before": dataclasses.replace(CONFIG, **BERT, **MASKED, tied=False),
    "OLMo 2": dataclasses.replace(CONFIG, num_kv_heads=2, mlp_size=88, tied=False, **LLAMA, **OLMO2),
    "Qwen3-Next's attention": dataclasses.replace(
        CONFIG, num_kv_heads=2, qk_norm=True, attention_gate=True, rotary_fraction=0.5, **LLAMA
    ),
    "Qwen3-Next": dataclasses.replace(
        CONFIG, num_kv_heads=2, qk_norm=True, attention_gate=True, rotary_fraction=0.25, **{**LLAMA, **QWEN3_NEXT}
    ),
    "OLMo hybrid": dataclasses.replace(
        CONFIG, num_kv_heads=2, mlp_size=88, **{**LLAMA, **OLMO2, **OLMO_HYBRID, "norm_place": "before"}
    ),
    "windows": dataclasses.replace(CONFIG, num_kv_heads=2, mlp_size=88, **LLAMA | WINDOWS),
    "blocks": dataclasses.replace(CONFIG, num_kv_heads=2, mlp_size=88, **LLAMA | BLOCKS),
    "masked BERT with blocks": dataclasses.replace(
        CONFIG, norm_place="after", attention_multiplier=0.3, **{**BERT, **MASKED, **BLOCKS}
    ),
    "norms on outputs": dataclasses.replace(CONFIG, norm_place="output"),
    "Mamba": dataclasses.replace(
        CONFIG, layers=("mamba", "attention mamba"), mamba=MambaConfig(state_size=5, chunk_size=6, vector_norms=True)
    ),
    "rotary BERT": dataclasses.replace(CONFIG, **{**LLAMA, **BERT}, num_kv_heads=2, norm_place="after"),
    "Mamba-2": dataclasses.replace(
        CONFIG, layers=("mamba2",), num_heads=0, mamba2=Mamba2Config(head_size=8, state_size=6, chunk_size=5)
    ),
    "hybrid": dataclasses.replace(
        CONFIG,
        mamba2=Mamba2Config(
            head_size=8,
            state_size=6,
            num_groups=2,
            norm_groups=4,
            conv_size=3,
            chunk_size=8,
            least_time_step=0.6,
            most_time_step=0.8,
        ),
        **{**LLAMA, "layers": ("mamba2 swiglu", "attention mamba2")},
    ),
}
B, S = 4, 16
LAYOUTS = [
    *(Layout(tensor=tensor, sequence_parallel=is_split) for tensor in (2, 4) for is_split in (False, True)),
    Layout(data=2),
    Layout(tensor=2, data=2),
    Layout(tensor=2, data=2, sequence_parallel=True),
]
SHARDED = [
    Layout(sharding=sharding, **layout)
    for layout in (
        {"data": 2},
        {"tensor": 2, "data": 2},
        {"tensor": 2, "data": 2, "sequence_parallel": True},
        {"data": 4, "shard_group": 2},
    )
    for sharding in ("zero2", "zero3")
]


class PlainAttention(nn.Module):
    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        self.config, self.kind = config, kind
        bias = config.biases != "none"
        self.qkv = nn.ModuleDict(
            {
                "query": nn.Linear(config.hidden_size, config.query_size * (1 + config.attention_gate), bias=bias),
                "key_value": nn.Linear(config.hidden_size, config.key_value_size, bias=bias),  # all keys, all values
            }
        )
        if config.qk_norm:
            self.query_norm, self.key_norm = (
                PlainNorm(config, size=self.normed(heads), kind=config.qk_norm_kind)
                for heads in (config.num_heads, config.num_kv_heads)
            )
        self.output = nn.Linear(config.query_size, config.hidden_size, bias=config.biases == "all")

    def normed(self, heads: int) -> int:
        return self.config.head_size * (heads if self.config.qk_norm_over == "all_heads" else 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        c = self.config
        query = self.qkv["query"](x)
        if c.attention_gate:
            query, gate = (y.reshape(x.shape) for y in query.view(batch, length, c.num_heads, 2, -1).unbind(3))
        key, value = self.qkv["key_value"](x).chunk(2, dim=2)
        if c.qk_norm:
            query, key = (
                norm(y.view(batch, length, -1, self.normed(heads)))
                for norm, y, heads in ((self.query_norm, query, c.num_heads), (self.key_norm, key, c.num_kv_heads))
            )
        q, k, v = (y.reshape(batch, length, -1, c.head_size).permute(0, 2, 1, 3) for y in (query, key, value))
        if c.positions == "rotary" and self.kind != "nope_attention":
            base = (c.sliding_attention.rotary_base if self.kind == "sliding_attention" else 0) or c.rotary_base
            size = int(c.head_size * c.rotary_fraction)
            q, k = (torch.cat((turned(y[..., :size], base), y[..., size:]), 3) for y in (q, k))
        k, v = (y.repeat_interleave(c.num_heads // c.num_kv_heads, dim=1) for y in (k, v))
        scores = q @ k.transpose(2, 3) * (c.attention_multiplier or c.head_size**-0.5)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden = ~mask[:, None, None, :] | (later & (c.attention == "causal"))
        if self.kind == "sliding_attention":
            distance = torch.arange(length)[:, None] - torch.arange(length)
            hidden = hidden | (distance >= c.sliding_attention.window)
        if self.kind == "sparse_attention":
            hidden = hidden | ~blocks_shown(c, length)
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=3)
        attended = (weights @ v).permute(0, 2, 1, 3).reshape(batch, length, c.query_size)
        return self.output(attended / (1 + torch.exp(-gate)) if c.attention_gate else attended)


def blocks_shown(config: ModelConfig, length: int) -> Tensor:
    """The pairs of a query and a key whose blocks see each other: [length, length]."""
    c = config.sparse_attention
    block = torch.arange(length) // c.block_size
    query, key = block[:, None], block[None, :]
    shown = ((query - key).abs() < c.window) | (key < c.global_blocks) | (key % c.stride == c.stride - 1)
    return shown | ((query < c.global_blocks) & (config.attention == "bidirectional"))


def turned(x: Tensor, base: float) -> Tensor:
    """Apply rotary positions by complex numbers: elements i and i + D/2 form a complex number, which is multiplied by
    e^(i angle).
    """
    length, size = x.shape[-2:]
    frequencies = 1.0 / base ** (torch.arange(0, size, 2).float() / size)  # in float32, as published weights want it
    angles = torch.arange(length).float()[:, None] * frequencies
    pairs = torch.complex(x[..., : size // 2], x[..., size // 2 :])
    y = pairs * torch.complex(angles.cos().double(), angles.sin().double())
    return torch.cat((y.real, y.imag), -1)


class PlainTaps(nn.Module):
    def __init__(self, channels: int, taps: int, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, taps))
        self.bias: Any = nn.Parameter(torch.zeros(channels)) if bias else 0.0

    def forward(self, x: Tensor) -> Tensor:
        taps = self.weight.shape[1]
        windows = F.pad(x, (0, 0, taps - 1, 0)).unfold(1, taps, 1)  # [B, S, channels, taps]
        return F.silu((windows * self.weight).sum(-1) + self.bias)


class PlainMamba2(nn.Module):
    """State-space mixer, token by token. The rows of `bc` have Crosscut's order: (group, B or C, element)."""

    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        self.sizes, self.epsilon, bias = config.mamba2, config.norm_epsilon, config.biases == "all"
        inner, heads, groups = self.sizes.inner_size, self.sizes.num_heads, self.sizes.num_groups
        widths = {"gate": inner, "inner": inner, "bc": 2 * groups * self.sizes.state_size, "step": heads}
        self.inputs = nn.ModuleDict({n: nn.Linear(config.hidden_size, width, bias) for n, width in widths.items()})
        self.convolution, self.bc_convolution = (PlainTaps(widths[n], self.sizes.conv_size) for n in ("inner", "bc"))
        self.log_rate, self.skip, self.step_bias = (nn.Parameter(torch.zeros(heads)) for _ in range(3))
        self.norm = nn.ParameterDict({"weight": torch.zeros(inner)})
        self.output = nn.Linear(inner, config.hidden_size, bias)

    def forward(self, x: Tensor, _mask: Tensor) -> Tensor:
        c = self.sizes
        gate, inner, bc, step = (matrix(x) for matrix in self.inputs.values())
        heads = self.convolution(inner).unflatten(-1, (c.num_heads, -1))
        bc = self.bc_convolution(bc).unflatten(-1, (c.num_groups, 2, c.state_size))
        b, read = bc.repeat_interleave(c.num_heads // c.num_groups, 2).unbind(3)  # [B, S, A, N]
        size = torch.log1p(torch.exp(step + self.step_bias)).clamp(c.least_time_step, c.most_time_step or math.inf)
        decay = torch.exp(-size * torch.exp(self.log_rate))
        state, outputs = torch.zeros(()), []
        for t in range(x.shape[1]):
            added = torch.einsum("ban,bap,ba->banp", b[:, t], heads[:, t], size[:, t])
            state = decay[:, t, :, None, None] * state + added
            outputs.append(torch.einsum("banp,ban->bap", state, read[:, t]))
        y = (torch.stack(outputs, 1) + self.skip[:, None] * heads).flatten(2) * F.silu(gate)
        y = y.unflatten(-1, (c.norm_groups, -1))
        y = (y / (y.square().mean(-1, keepdim=True) + self.epsilon).sqrt()).flatten(2)
        return self.output(y * self.norm["weight"])


class PlainGatedDelta(nn.Module):
    """Gated delta net, token by token. The rows of `query_key` have Crosscut's order: (key head, which, element)."""

    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        self.sizes, bias = (c := config.gated_delta), config.biases == "all"
        self.epsilon = c.norm_epsilon or config.norm_epsilon
        values, vectors = c.num_value_heads * c.value_head_size, 2 * c.num_key_heads * c.key_head_size
        widths = {"gate": values, "value": values, "query_key": vectors}
        widths |= dict.fromkeys(("step", "strength"), c.num_value_heads)
        self.inputs = nn.ModuleDict({n: nn.Linear(config.hidden_size, width, bias) for n, width in widths.items()})
        self.convolution = PlainTaps(values, c.conv_size, bias=False)
        self.query_key_convolution = PlainTaps(vectors, c.conv_size, bias=False)
        self.log_rate, self.step_bias = (nn.Parameter(torch.zeros(c.num_value_heads)) for _ in range(2))
        self.norm = nn.ParameterDict({"weight": torch.zeros(c.value_head_size)})
        self.output = nn.Linear(values, config.hidden_size, bias)

    def forward(self, x: Tensor, _mask: Tensor) -> Tensor:
        c = self.sizes
        gate, value, vectors, step, strength = (matrix(x) for matrix in self.inputs.values())
        v = self.convolution(value).unflatten(-1, (c.num_value_heads, -1))  # [B, S, A, P]
        vectors = self.query_key_convolution(vectors).unflatten(-1, (c.num_key_heads, 2, c.key_head_size))
        vectors = vectors / (vectors.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        q, k = vectors.repeat_interleave(c.num_value_heads // c.num_key_heads, 2).unbind(3)  # [B, S, A, N]
        decay = torch.exp(-torch.log1p(torch.exp(step + self.step_bias)) * torch.exp(self.log_rate))
        beta = (2 if c.negative_eigenvalues else 1) / (1 + torch.exp(-strength))
        state, outputs = x.new_zeros(x.shape[0], c.num_value_heads, c.key_head_size, c.value_head_size), []
        for t in range(x.shape[1]):
            state = decay[:, t, :, None, None] * state
            error = v[:, t] - torch.einsum("ban,banp->bap", k[:, t], state)
            state = state + torch.einsum("ban,bap,ba->banp", k[:, t], error, beta[:, t])
            outputs.append(torch.einsum("ban,banp->bap", q[:, t], state) / math.sqrt(c.key_head_size))
        y = torch.stack(outputs, 1)
        y = self.norm["weight"] * y / (y.square().mean(-1, keepdim=True) + self.epsilon).sqrt()
        return self.output(y.flatten(2) * F.silu(gate))


class PlainNorm(nn.Module):
    def __init__(self, config: ModelConfig, *, size: int = 0, kind: str = "") -> None:
        super().__init__()
        self.epsilon = config.norm_epsilon
        size = size or config.hidden_size
        self.is_layer, self.offset = (kind or config.norm) == "layer", int(config.norm_offset)
        self.weight: Any = nn.Parameter(torch.ones(size)) if config.norm_affine else 1.0
        self.bias: Any = nn.Parameter(torch.zeros(size)) if config.norm_affine and self.is_layer else 0.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_layer:
            return (self.offset + self.weight) * x / (x.square().mean(-1, keepdim=True) + self.epsilon).sqrt()
        centred = x - x.mean(-1, keepdim=True)
        return self.weight * centred / (centred.square().mean(-1, keepdim=True) + self.epsilon).sqrt() + self.bias


class PlainMLP(nn.Module):
    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        sizes, bias = (config.hidden_size, config.mlp_size), config.biases == "all"
        self.expand: nn.Module = nn.Linear(*sizes, bias=bias)
        self.kind = kind
        if self.kind in ("swiglu", "geglu"):
            self.expand = nn.ModuleDict({name: nn.Linear(*sizes, bias=bias) for name in ("gate", "up")})
        self.contract = nn.Linear(*reversed(sizes), bias=bias)

    def forward(self, x: Tensor, _mask: Tensor) -> Tensor:
        if isinstance(self.expand, nn.ModuleDict):
            gate = self.expand["gate"](x)
            opened = gelu(gate) if self.kind == "geglu" else gate / (1 + torch.exp(-gate))
            return self.contract(opened * self.expand["up"](x))
        y = self.expand(x)
        if self.kind == "relu2":
            return self.contract(torch.where(y > 0, y * y, 0))
        if self.kind == "gelu_exact":
            return self.contract(y * (1 + torch.erf(y / math.sqrt(2))) / 2)
        return self.contract(gelu(y))


def gelu(y: Tensor) -> Tensor:
    return 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))


class PlainMamba(nn.Module):
    """State-space mixer of the first kind, token by token."""

    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        self.sizes, hidden, bias = config.mamba, config.hidden_size, config.biases == "all"
        inner, rank, state = self.sizes.inner_size, self.sizes.step_rank, self.sizes.state_size
        self.inputs = nn.ModuleDict({name: nn.Linear(hidden, inner, bias) for name in ("gate", "inner")})
        self.convolution = nn.ParameterDict(
            {"weight": torch.zeros(inner, self.sizes.conv_size), "bias": torch.zeros(inner)}
        )
        self.selection, self.step = nn.Linear(inner, rank + 2 * state, False), nn.Linear(rank, inner, False)
        self.step_norm, self.b_norm, self.c_norm = (
            PlainNorm(config, size=size, kind="rms") for size in (rank, state, state)
        )
        self.log_rate = nn.Parameter(torch.zeros(inner, state))
        self.skip, self.step_bias = (nn.Parameter(torch.zeros(inner)) for _ in range(2))
        self.output = nn.Linear(inner, hidden, bias)

    def forward(self, x: Tensor, _mask: Tensor) -> Tensor:
        taps = self.convolution["weight"].unsqueeze(1)
        padded = F.pad(self.inputs["inner"](x).mT, (taps.shape[-1] - 1, 0))
        channels = F.silu(F.conv1d(padded, taps, self.convolution["bias"], groups=len(taps))).mT
        rank, state_size = self.sizes.step_rank, self.sizes.state_size
        vector, b, c = self.selection(channels).split((rank, state_size, state_size), -1)
        b, c = self.b_norm(b), self.c_norm(c)
        size = torch.log1p(torch.exp(self.step(self.step_norm(vector)) + self.step_bias))
        state, outputs = torch.zeros(()), []
        for t in range(x.shape[1]):
            decay = torch.exp(-size[:, t, :, None] * torch.exp(self.log_rate))
            state = decay * state + torch.einsum("bd,bd,bn->bdn", size[:, t], channels[:, t], b[:, t])
            outputs.append(torch.einsum("bdn,bn->bd", state, c[:, t]))
        y = torch.stack(outputs, 1) + self.skip * channels
        return self.output(y * F.silu(self.inputs["gate"](x)))


PLAIN = {
    Mixer.MAMBA: PlainMamba,
    Mixer.MAMBA2: PlainMamba2,
    Mixer.GATED_DELTA: PlainGatedDelta,
    **dict.fromkeys(ATTENTIONS, PlainAttention),
}


class PlainBlock(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.place = config.norm_place_of(layer)
        self.names = [name for name, _ in config.parts_of(layer)]
        for name, kind in config.parts_of(layer):
            self.add_module(f"{name}_norm", PlainNorm(config))
            self.add_module(name, PLAIN.get(kind, PlainMLP)(config, kind))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for name in self.names:
            norm, part = getattr(self, f"{name}_norm"), getattr(self, name)
            x = {
                "before": lambda x, norm=norm, part=part: x + part(norm(x), mask),
                "after": lambda x, norm=norm, part=part: norm(x + part(x, mask)),
                "output": lambda x, norm=norm, part=part: x + norm(part(x, mask)),
            }[self.place](x)
        return x


class PlainPrediction(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(config.hidden_size, config.hidden_size), PlainNorm(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dense(x)
        return self.norm(y * (1 + torch.erf(y / math.sqrt(2))) / 2)


class PlainOrder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pooler, self.classifier = (
            nn.Linear(config.hidden_size, config.hidden_size),
            nn.Linear(config.hidden_size, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


class PlainTask(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        is_pooled = config.attention == "bidirectional" and config.head != "spans"
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size) if is_pooled else None
        num_outputs = {"classes": config.num_classes, "number": 1, "spans": 2, "choice": 1}[config.head]
        has_bias = is_pooled or config.head == "spans"
        self.classifier = nn.Linear(config.hidden_size, num_outputs, bias=has_bias)

    def forward(self, hidden: Tensor, mask: Tensor, num_choices: int) -> Tensor:
        if self.config.head == "spans":
            return self.classifier(hidden)
        if self.pooler is not None:
            logits = self.classifier(torch.tanh(self.pooler(hidden[:, 0])))
        else:
            last = [max(i for i, shown in enumerate(row) if shown) for row in mask.tolist()]
            logits = self.classifier(torch.stack([hidden[i, place] for i, place in enumerate(last)]))
        return logits.reshape(-1, num_choices) if self.config.head == "choice" else logits


class PlainGPT(nn.Module):
    """Plain decoder. The parameters have the same names as in Crosscut. The rows of `key_value` have another order (see
    `reordered`).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.positions == "learned":
            self.positions = nn.Embedding(config.max_sequence_length, config.hidden_size)
        if config.token_types:
            self.token_types = nn.Embedding(config.token_types, config.hidden_size)
        is_after = config.norm_place == "after"
        self.embedding_norm = PlainNorm(config) if config.embedding_norm or is_after else nn.Identity()
        self.blocks = nn.ModuleList(PlainBlock(config, layer) for layer in range(config.num_layers))
        self.final_norm = nn.Identity() if is_after else PlainNorm(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.tokens.weight
        if config.head == "masked_tokens":
            self.prediction = PlainPrediction(config)
        if config.sentence_order:
            self.order = PlainOrder(config)
        if config.solves_task:
            self.task = PlainTask(config)

    def forward(self, batch: Batch) -> Tensor:
        tokens = batch.tokens
        x = self.tokens(tokens)
        if hasattr(self, "positions"):
            x = x + self.positions(torch.arange(tokens.shape[1]))
        if hasattr(self, "token_types"):
            x = x + self.token_types(torch.zeros_like(tokens) if batch.segments is None else batch.segments)
        x = self.embedding_norm(x)
        mask = torch.ones_like(tokens, dtype=torch.bool) if batch.mask is None else batch.mask
        for block in self.blocks:
            x = block(x, mask)
        return self.final_norm(x)

    def logits(self, batch: Batch) -> Tensor:
        cap, hidden = self.config.logit_softcap, self(batch)
        if hasattr(self, "prediction"):
            return self.output(self.prediction(hidden)) + self.prediction.bias
        logits = self.output(hidden)
        return cap * torch.tanh(logits / cap) if cap else logits

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)

    def task_logits(self, batch: Batch, num_choices: int) -> Tensor:
        mask = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.mask is None else batch.mask
        return self.task(self(batch), mask, num_choices)

    def order_loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.order(self(batch)), batch.order, reduction="sum", ignore_index=IGNORED)


def reordered(name: str, parameter: Tensor, config: ModelConfig) -> Tensor:
    """Change the order of the rows of Crosscut's `key_value` from (head, key or value, element) to (key or value, head,
    element). Other parameters are returned unchanged.
    """
    if ".key_value." not in name:
        return parameter
    return parameter.unflatten(0, (config.num_kv_heads, 2, -1)).transpose(0, 1).flatten(0, 2)


def plain_twin(config: ModelConfig, parameters: dict[str, Tensor]) -> PlainGPT:
    """The plain model with the parameters of Crosscut's."""
    plain = PlainGPT(config).double()
    left = plain.load_state_dict({name: reordered(name, p, config) for name, p in parameters.items()}, strict=False)
    assert not left.unexpected_keys
    assert left.missing_keys == (["output.weight"] if config.tied else [])
    return plain


def assert_gradients_of(plain: PlainGPT, gradients: dict[str, Tensor], *, tolerance: float) -> None:
    """Compare Crosscut's gradients with those of the plain model."""
    for name, parameter in plain.named_parameters():
        if name not in gradients:
            assert name == "task.classifier.bias"
            assert parameter.grad.abs().max() < 1e-12, "a bias that does not train has no gradient"
            continue
        gradient = reordered(name, gradients[name], plain.config)
        torch.testing.assert_close(gradient, parameter.grad, rtol=tolerance, atol=tolerance)


def batch(step: int) -> Batch:
    """Tokens and targets [B, S] of one step. Some targets are ignored, more of them in the first sequences than in the
    last.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, CONFIG.vocab_size, (B, S + 1), generator=generator)
    tokens[:, ::3] = 17  # something to learn
    targets = tokens[:, 1:].clone()
    targets[0, :5] = targets[1, 2] = IGNORED
    return Batch(tokens=tokens[:, :-1], targets=targets)


def batch_for(config: ModelConfig) -> Batch:
    """The batch of step 0, with segments if the model has token types, and padding if the model attends to both sides.
    The padding is at the ends of two sequences, and in the middle of a third.
    """
    plain = batch(0)
    if config.attention == "causal":
        return plain
    mask = torch.ones(B, S, dtype=torch.bool)
    mask[0, 11:] = mask[1, -1:] = mask[2, 3:8] = False
    segments = torch.arange(B * S).view(B, S) // 5 % config.token_types if config.token_types else None
    if not config.predicts_masked:
        return replace(plain, segments=segments, mask=mask)
    targets = plain.targets
    predicted = (targets == IGNORED).flatten().int().argsort(stable=True)[: int((targets != IGNORED).sum()) + 3]
    order = torch.tensor([1, 0, IGNORED, 1]) if config.sentence_order else None
    return replace(plain, segments=segments, mask=mask, predicted=predicted, order=order)


def real(name: str, parameter: Tensor) -> Tensor:
    """A parameter without the vocabulary's padding."""
    is_padded = name in ("tokens.weight", "output.weight", "prediction.bias")
    return parameter[: CONFIG.vocab_size] if is_padded else parameter


def wholes_of(model: GPT) -> dict[str, dict[str, Tensor]]:
    """Parameters and gradients, whole, without the vocabulary's padding."""
    parameters = dict(model.named_parameters())
    return {
        "parameters": {name: real(name, p.full_tensor().detach()) for name, p in parameters.items()},
        "gradients": {name: real(name, p.grad.full_tensor()) for name, p in parameters.items() if p.requires_grad},
    }


def build(
    layout: Layout,
    *,
    config: ModelConfig = CONFIG,
    dtype: torch.dtype = torch.float64,
    compute_dtype: torch.dtype | None = None,
) -> GPT:
    """Build an initialised model with started random streams, on a rank."""
    mesh = make_mesh(layout, CPU)
    streams = RandomStreams(mesh, seed=1)
    streams.restart(step=0)
    model = GPT(config, mesh=mesh, streams=streams, dtype=dtype, compute_dtype=compute_dtype)
    shard_model(model, mesh, units=model.blocks, compute_dtype=compute_dtype, always_used=True)
    initialize(model, seed=3)
    return model


def randomised(layout: Layout, **options: Any) -> GPT:
    """Build a model as `build` does, but with random biases and norms, so that a bias or a norm that is left out
    changes the results.
    """
    model = build(layout, **options)
    for i, parameter in enumerate(model.parameters()):
        if parameter.dim() == 1:
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
            local = parameter.detach().to_local()
            local += 0.1 * values.narrow(0, local_offsets(parameter)[0], local.numel())
    return model


def train(layout: Layout, dtype: torch.dtype, num_steps: int, num_micro_batches: int = 1) -> dict[str, Any]:
    """Train on a rank with AdamW and clipping. Returns the loss and the gradient norm of each step, the gradients of
    the first step, and the final parameters.
    """
    model = randomised(layout, dtype=dtype)
    mesh, parameters = model.mesh, dict(model.named_parameters())
    if mesh.sharding is None:
        reducer: Reducer = GradientReducer(parameters.values(), mesh, bucket_bytes=10_000)
    else:
        reducer = make_reducer(model, mesh)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.01)
    losses, norms, gradients = [], [], {}
    for step in range(num_steps):
        whole = batch(step)
        scales = {"tokens": 1.0 / float(whole.num_targets)}  # targets of all data ranks
        total = torch.zeros((), dtype=dtype)
        for i, own in enumerate(whole.chunk(mesh.data.size)[mesh.data.rank].chunk(num_micro_batches)):
            if i == num_micro_batches - 1:
                reducer.arm()
            loss = model.loss(own, scales)
            loss.backward()
            total += loss.detach()
        reducer.finish()
        norm = global_gradient_norm(list(parameters.values()))
        if step == 0:
            gradients = {name: real(name, p.grad.full_tensor().clone()) for name, p in parameters.items()}
        clip_gradients_(list(parameters.values()), norm, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(all_reduce(total, mesh.data).item())
        norms.append(norm.item())
    final = {name: real(name, p.full_tensor().detach()) for name, p in parameters.items()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "parameters": final}
