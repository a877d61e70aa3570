"""A mixture of experts in plain PyTorch, written independently of Crosscut: every expert computes every token."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config.parts.experts import ExpertsConfig


def relu2(x: Tensor) -> Tensor:
    return x.clamp(min=0) ** 2


ACTIVATIONS = {
    "swiglu": F.silu, "geglu": lambda x: F.gelu(x, approximate="tanh"), "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_exact": F.gelu, "relu2": relu2,
}  # fmt: skip


def mlp(kind: str, x: Tensor, first: list[Tensor], last: Tensor) -> Tensor:
    inner = ACTIVATIONS[kind](x @ first[0].T)
    return (inner * (x @ first[1].T) if len(first) == 2 else inner) @ last.T


def mixture(c: ExpertsConfig, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor], list[int]]:
    """Result [B, S, H] for `x`, the terms of the loss, and the loads. The names are those of Crosscut's parameters."""
    logits = x @ weights["router.weight"].T
    exponentials = torch.exp(logits - logits.max(-1, keepdim=True).values)
    softmax = exponentials / exponentials.sum(-1, keepdim=True)
    scores = softmax if c.scores == "softmax" else 1 / (1 + torch.exp(-logits))
    names = ("gate", "up") if c.mlp in ("swiglu", "geglu") else ("expand",)
    of_experts = [mlp(c.mlp, x, [weights[name][e] for name in names], weights["contract"][e]) for e in range(c.number)]
    used = torch.zeros_like(scores)  # weight of each expert for each token
    picked = torch.zeros_like(scores)
    for b, s in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(x.shape[1])).tolist():
        ranked = ranking(c, (scores[b, s] + weights.get("router.bias", torch.zeros(()))).detach())
        total = sum(scores[b, s, e] for e in ranked) if c.renormalise else 1.0
        for e in ranked:
            used[b, s, e] = c.scaling * scores[b, s, e] / total
            picked[b, s, e] = 1.0
    y = sum(used[..., e, None] * of_experts[e] for e in range(c.number))
    assert isinstance(y, Tensor)
    if c.shared_size:
        every = ("gate", "up") if len(names) == 2 else ("expand",)
        prefix = "shared.expand." if len(names) == 2 else "shared."
        first = [weights[f"{prefix}{name}.weight"] for name in every]
        shared = mlp(c.mlp, x, first, weights["shared.contract.weight"])
        gate = 1 / (1 + torch.exp(-(x @ weights["shared_gate.weight"].T))) if c.shared_gate else 1.0
        y = y + gate * shared
    shares = scores / scores.sum(-1, keepdim=True)
    fractions = picked.mean(1) * c.number / c.per_token
    balance = (fractions * shares.mean(1)).sum(-1).sum() * x.shape[1]
    squares = torch.log(torch.exp(logits).sum(-1)) ** 2
    return y, {"balance": balance, "router_z": squares.sum()}, [int(n) for n in picked.sum((0, 1))]


def ranking(c: ExpertsConfig, scores: Tensor) -> list[int]:
    """Experts of a token, from its scores [E]."""
    size = c.number // c.groups
    groups = [sorted(scores.tolist()[g * size : (g + 1) * size], reverse=True) for g in range(c.groups)]
    best = sorted(range(c.groups), key=lambda g: -sum(groups[g][: c.group_top]))[: c.groups_per_token]
    candidates = [e for e in range(c.number) if c.groups == 1 or e // size in best]
    ranked = sorted(candidates, key=lambda e: -float(scores[e]))[: c.per_token]
    assert math.isfinite(float(scores.sum()))
    return ranked
