"""Faults that wrong cuts had in respected codebases, rebuilt from the texts of their issues: the smallest module that
has the fault, the wrong cut, and the right one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from crosscut.parallel import ParallelMesh
from tests.verification.foreign.net import HEAD, HEADS, VOCAB, WIDTH, Enter, Leave, loss_of, span

LATENT, EXPERTS, CHOSEN, INNER = 4, 4, 2, 8


class Around(nn.Module):
    """A language model around one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(VOCAB, WIDTH), layer, nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        return {"logits": self.head(x + self.layer(x))}


def build(layer: Callable[[], nn.Module]) -> Any:
    tokens = torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(3))
    return Around(layer()), {"tokens": tokens}, partial(loss_of, tokens)


# --- torchtitan#1373: the part of the keys that all heads share ------------------------------------------------------


class LatentAttention(nn.Module):
    """Latent attention as in DeepSeek-V3: a key has a part of its head, and a part that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * 2 * HEAD)
        self.wkv_a = nn.Linear(WIDTH, LATENT + HEAD)
        self.kv_norm, self.k_pe = nn.RMSNorm(LATENT), nn.Identity()
        self.wkv_b = nn.Linear(LATENT, HEADS * 2 * HEAD)
        self.wo = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x).unflatten(-1, (-1, 2 * HEAD)).transpose(1, 2)
        latent, shared = self.wkv_a(x).split([LATENT, HEAD], -1)
        own, v = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (-1, 2 * HEAD)).transpose(1, 2).chunk(2, -1)
        k = torch.cat([own, self.k_pe(shared).unsqueeze(1).expand_as(own)], -1)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.wo(heads.transpose(1, 2).flatten(2))
        return y


def cut_latent_attention(module: nn.Module, mesh: ParallelMesh, *, is_right: bool = False) -> None:
    """Cut the heads. `wkv_a` stays whole, so a rank's gradient of the shared keys comes only from the rank's heads."""
    styles = {"wq": ColwiseParallel(), "wkv_b": ColwiseParallel(), "wo": RowwiseParallel()}
    parallelize_module(module.layer, mesh.tensor.device_mesh, styles)
    if is_right:
        module.layer.k_pe.register_forward_hook(partial(sum_gradient, mesh))


def cut_latent_attention_inside(module: nn.Module, mesh: ParallelMesh) -> None:
    """Cut the heads, and sum the gradient of the shared keys inside the module `wkv_a`, as transformers does. Of the
    gradient of the module's output, one part is then whole on every rank, and the other is a summand.
    """
    cut_latent_attention(module, mesh)
    wkv_a = module.layer.wkv_a
    whole = wkv_a.forward

    def forward(x: Tensor) -> Tensor:
        latent, shared = whole(x).split([LATENT, HEAD], -1)
        return torch.cat([latent, sum_gradient(mesh, wkv_a, x, shared)], -1)

    wkv_a.forward = forward


def sum_gradient(mesh: ParallelMesh, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    whole = DTensor.from_local(output, mesh.tensor.device_mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


# --- torchtitan#4245 and #4332: the bias of experts that are cut by rows ---------------------------------------------


class Router(nn.Module):
    """Weights and numbers of the experts that each token chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.gate(x).softmax(-1).topk(CHOSEN)
        return weights, chosen


class Experts(nn.Module):
    """Experts with biases. `scale` is applied to the second bias before the ranks' outputs are summed."""

    keeps_absent_out = False

    def __init__(self) -> None:
        super().__init__()
        self.mlp1_weight, self.mlp1_bias = parameter(EXPERTS, INNER, WIDTH), parameter(EXPERTS, INNER)
        self.mlp2_weight, self.mlp2_bias = parameter(EXPERTS, WIDTH, INNER), parameter(EXPERTS, WIDTH)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        absent = chosen >= self.mlp1_weight.shape[0]  # experts of other ranks
        chosen = chosen.clamp(max=self.mlp1_weight.shape[0] - 1)
        up = torch.einsum("...d,...ekd->...ek", x, self.mlp1_weight[chosen]) + self.mlp1_bias[chosen]
        down = torch.einsum("...ek,...edk->...ed", F.gelu(up), self.mlp2_weight[chosen])
        down = down + self.scale(self.mlp2_bias)[chosen]
        if self.keeps_absent_out:
            weights = weights.masked_fill(absent, 0.0)
        return (weights.unsqueeze(-1) * down).sum(-2)

    def scale(self, bias: Tensor) -> Tensor:
        weight = self.mlp1_weight
        return bias / weight.device_mesh.size() if isinstance(weight, DTensor) else bias


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / 2)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x, *self.router(x))
        return y


class Divided(Experts):
    """Experts that know the number of ranks, as the mend of #4245 gave it to them."""

    num_ranks = 1

    def scale(self, bias: Tensor) -> Tensor:
        return bias / self.num_ranks


class Scaled(Divided):
    """Experts whose bias is divided in the forward pass and not in the backward pass: the mend of #4332."""

    def scale(self, bias: Tensor) -> Tensor:
        return bias + (bias / self.num_ranks - bias).detach()


def cut_inside_experts(module: nn.Module, mesh: ParallelMesh, *, kind: type[Experts] = Experts) -> None:
    """Cut every expert's inner width. The parameters are plain tensors, so `Experts.scale` finds no `DTensor`."""
    experts = module.layer.experts
    for name in ("mlp1_weight", "mlp1_bias", "mlp2_weight"):
        setattr(experts, name, part_of(getattr(experts, name), place_inside_experts(name, mesh)))
    experts.__class__ = kind
    experts.num_ranks = mesh.tensor.size
    sum_over_ranks(experts)


def place_inside_experts(name: str, mesh: ParallelMesh) -> Any:
    inner, rest = span(INNER, mesh), slice(None)
    places = {"mlp1_weight": (rest, inner), "mlp1_bias": (rest, inner), "mlp2_weight": (rest, rest, inner)}
    return places.get(name.rpartition(".")[2])


def part_of(whole: nn.Parameter, place: Any) -> nn.Parameter:
    part = nn.Parameter(whole.detach()[place].clone())
    part.is_cut = True
    return part


def step(module: nn.Module) -> float:
    """Take a step of SGD. Returns the norm, for which the squares of cut parameters are summed over the ranks."""
    squares = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
    for each in module.parameters():
        squares[hasattr(each, "is_cut")] += each.grad.square().sum()
        each.data -= 0.1 * each.grad
    if any(hasattr(each, "is_cut") for each in module.parameters()):
        dist.all_reduce(squares[True])
    return float((squares[False] + squares[True]).sqrt())


def cut_into_summands(module: nn.Module, mesh: ParallelMesh) -> None:
    """Divide the router's weights by the number of ranks, and sum the outputs of whole experts."""
    router, experts = module.layer.router, module.layer.experts
    whole = router.forward

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = whole(x)
        return Enter.apply(weights) / mesh.tensor.size, chosen

    router.forward = forward
    experts.register_forward_pre_hook(lambda _module, inputs: (Enter.apply(inputs[0]), *inputs[1:]))
    experts.register_forward_hook(lambda _module, _inputs, output: Leave.apply(output))
    for each in experts.parameters():
        each.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))


def sum_over_ranks(experts: nn.Module) -> None:
    """Sum the gradients of the tokens and of the weights, and the outputs."""

    def enter(_module: nn.Module, inputs: Any) -> Any:
        x, weights, chosen = inputs
        return Enter.apply(x), Enter.apply(weights), chosen

    experts.register_forward_pre_hook(enter)
    experts.register_forward_hook(lambda _module, _inputs, output: Leave.apply(output))


# --- transformers#48687: a weight of zero for the experts of other ranks ---------------------------------------------


def cut_between_experts(module: nn.Module, mesh: ParallelMesh, *, is_right: bool = False) -> None:
    """Give each rank some experts. Tokens of other ranks' experts get the weight 0 and go through the last expert, so
    the forward pass is right; the weight's gradient is not 0 unless the experts mask it.
    """
    experts, mine = module.layer.experts, span(EXPERTS, mesh)
    for name, whole in list(experts.named_parameters()):
        setattr(experts, name, part_of(whole, (mine,)))
    experts.keeps_absent_out = is_right

    def dispatch(_module: nn.Module, inputs: Any) -> Any:
        x, weights, chosen = inputs
        absent = (chosen < mine.start) | (chosen >= mine.stop)
        weights = Enter.apply(weights).masked_fill(absent, 0.0)
        return x, weights, (chosen - mine.start).masked_fill(absent, mine.stop - mine.start)

    experts.register_forward_pre_hook(dispatch)
    sum_over_ranks(experts)


def place_between_experts(name: str, mesh: ParallelMesh) -> Any:
    return (span(EXPERTS, mesh),) if ".experts." in name else None
