"""A plain transformer, and cuts of it that are not Crosscut's: by `parallelize_module`, and by hand with plain
parameters. Both take faults.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from crosscut.parallel import ParallelMesh, copy_to_tensor_parallel, reduce_from_tensor_parallel

WIDTH, HEAD, HEADS, VOCAB, INNER = 8, 2, 4, 12, 16


class Norm(nn.Module):
    """RMS norm that computes in float32, as many do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(self.mean(wide.square()) + 1e-6)).to(x.dtype)

    def mean(self, squares: Tensor) -> Tensor:
        return squares.mean(-1, keepdim=True)


class Attention(nn.Module):
    """Heads with a norm of their queries and, as in latent attention, a part of the keys that all heads share."""

    def __init__(self, *, is_plain: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * HEAD) for _ in range(3))
        self.shared_key = None if is_plain else nn.Linear(WIDTH, HEAD)
        self.q_norm = nn.Identity() if is_plain else Norm(HEAD)
        self.o = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.shared_key is not None:
            k = k + self.shared_key(x).unsqueeze(1)
        heads = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        y: Tensor = self.o(heads.transpose(1, 2).flatten(2))
        return y


class MLP(nn.Module):
    """MLP with a norm over its inner width."""

    def __init__(self, inner: int, *, is_plain: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.norm = nn.Identity() if is_plain else Norm(inner)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.norm(F.gelu(self.up(x))))
        return y


class Block(nn.Module):
    def __init__(self, inner: int, *, is_plain: bool) -> None:
        super().__init__()
        self.norm, self.dropout = Norm(WIDTH), nn.Dropout(0.2)
        self.attention, self.mlp = Attention(is_plain=is_plain), MLP(inner, is_plain=is_plain)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.mlp(x)


class Net(nn.Module):
    """A language model of two blocks that returns a mapping, as those of transformers do."""

    def __init__(self, inner: int, *, is_plain: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(inner, is_plain=is_plain) for _ in range(2))
        self.norm, self.head = Norm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


def build(inner: int = INNER, *, is_plain: bool = False) -> Any:
    tokens = torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(3))
    tokens[0, 0] = VOCAB - 1
    return Net(inner, is_plain=is_plain), {"tokens": tokens}, partial(loss_of, tokens)


def loss_of(tokens: Tensor, output: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), tokens.flatten())


build_plain = partial(build, is_plain=True)
build_uneven = partial(build, INNER - 1)


# --- by torch --------------------------------------------------------------------------------------------------------


def by_torch(module: nn.Module, mesh: ParallelMesh, **changes: Any) -> None:
    """Cut the plain net. `changes` are other styles, by the last two parts of a module's name."""
    plan: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = changes.get("head", ColwiseParallel(output_layouts=Replicate()))
    for i in range(2):
        for name in ("attention.q", "attention.k", "attention.v", "mlp.up"):
            plan[f"blocks.{i}.{name}"] = changes.get(name, ColwiseParallel())
        for name in ("attention.o", "mlp.down"):
            plan[f"blocks.{i}.{name}"] = changes.get(name, RowwiseParallel())
    parallelize_module(module, mesh.tensor.device_mesh, plan)


# --- by hand ---------------------------------------------------------------------------------------------------------


class Enter(Function):
    """The paper's f: the backward pass sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _sum(gradient)


class Leave(Function):
    """The paper's g: the forward pass sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class LeaveTwice(Leave):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _sum(gradient)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: int) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts[::order], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.chunk(dist.get_world_size(), -1)[dist.get_rank()], None


def _sum(x: Tensor) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x)
    return x


def span(size: int, mesh: ParallelMesh, *, shift: int = 0) -> slice:
    """This rank's part of `size` rows, which need not divide."""
    length, rank = -(-size // mesh.tensor.size), (mesh.tensor.rank + shift) % mesh.tensor.size
    return slice(rank * length, min(size, (rank + 1) * length))


COLUMNS = ("q.weight", "q.bias", "k.weight", "k.bias", "v.weight", "v.bias", "up.weight", "up.bias", "mlp.norm.weight")
COLUMNS += ("embed.weight", "head.weight", "head.bias")
ROWS = ("o.weight", "down.weight")


def places(inner: int, name: str, mesh: ParallelMesh) -> Any:
    """The place of a parameter that `by_hand` has cut."""
    size = VOCAB if name.startswith(("embed", "head")) else inner if "mlp" in name else WIDTH
    if name.endswith(COLUMNS):
        return (span(size, mesh),)
    return (slice(None), span(size, mesh)) if name.endswith(ROWS) else None


class Entered(nn.Module):
    """A module whose input's gradient is summed."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Enter.apply(x))


class Left(nn.Module):
    """A row layer: the sum over the ranks, and the bias once."""

    leave: Any = Leave
    bias_first = False

    def forward(self, x: Tensor) -> Tensor:
        first, last = (self.bias, None) if self.bias_first else (None, self.bias)
        y: Tensor = F.linear(x, self.weight, first)
        y = y if self.leave is None else self.leave.apply(y)
        return y if last is None else y + last


class Gathered(nn.Module):
    order = 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Gather.apply(F.linear(Enter.apply(x), self.weight, self.bias), self.order)
        return y


class Looked(nn.Module):
    """An embedding of which each rank holds some rows."""

    first = 0

    def forward(self, tokens: Tensor) -> Tensor:
        mine = tokens - self.first
        inside = (mine >= 0) & (mine < self.weight.shape[0])
        y: Tensor = Leave.apply(F.embedding(mine * inside, self.weight) * inside.unsqueeze(-1))
        return y


class SharedNorm(nn.Module):
    """A norm over a cut dimension of `size` numbers."""

    size = 0

    def mean(self, squares: Tensor) -> Tensor:
        return Enter.apply(Leave.apply(squares.sum(-1, keepdim=True))) / self.size


class Inside(nn.Module):
    """A replicated norm of which each rank's heads see a part."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt(self.mean(wide.square()) + 1e-6)
        return Enter.apply(self.weight) * (wide * scale).to(x.dtype)


class SharedOut(nn.Module):
    """A whole linear layer whose output every rank's heads use."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Enter.apply(F.linear(x, self.weight, self.bias))
        return y


def _become(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> None:
    base = type(module)
    vars(module).update(attributes)
    module.__class__ = type(base.__name__, (kind, base), {})


def by_hand(module: nn.Module, mesh: ParallelMesh, *, fault: str = "") -> None:
    """Cut the net with plain parameters, with a fault or none."""
    for name, parameter in module.named_parameters():
        place = places(module.blocks[0].mlp.up.out_features, name, mesh)
        if fault == "keys of other heads" and name.startswith("blocks.0.attention.k."):
            place = (span(WIDTH, mesh, shift=1),)
        if fault == "rows of another rank" and name == "blocks.1.mlp.down.weight":
            place = (slice(None), span(INNER, mesh, shift=1))
        if place is not None:
            parameter.data = parameter.data[place].clone()
    first = span(VOCAB, mesh).start if fault != "embedding without its offset" else 0
    _become(module.embed, Looked, first=first)
    _become(module.head, Gathered, order=-1 if fault == "logits gathered in another order" else 1)
    for i, block in enumerate(module.blocks):
        _cut_block(block, fault if i == 1 else "")
    if fault == "replicas that start apart":
        module.blocks[1].norm.weight.data += 0.01 * mesh.tensor.rank
    if fault == "replicas that drop apart":
        torch.manual_seed(mesh.tensor.rank)


def _cut_block(block: Any, fault: str) -> None:
    inner = block.mlp.up.out_features
    for part in (block.attention.q, block.attention.k, block.attention.v):
        _become(part, Entered)
    if fault != "no sum of the input's gradient":
        _become(block.mlp.up, Entered)
    leave = {"no sum of the output": None, "the output's gradient summed again": LeaveTwice}.get(fault, Leave)
    _become(block.attention.o, Left, bias_first=fault == "bias added by every rank")
    _become(block.mlp.down, Left, leave=leave)
    if fault != "norm over this rank's part":
        _become(block.mlp.norm, SharedNorm, size=inner)
    if fault != "gradient of a replicated weight not summed":
        _become(block.attention.q_norm, Inside)
    if fault != "gradient of the shared key part not summed":
        _become(block.attention.shared_key, SharedOut)


# --- norm and step ---------------------------------------------------------------------------------------------------


def step_by_hand(module: nn.Module, *, fault: str = "") -> float:
    """Clip to 0.1 and take a step of SGD. The squares of cut parameters are summed over the ranks."""
    own, summed = torch.zeros(2, dtype=torch.float64)
    for name, parameter in module.named_parameters():
        squares = parameter.grad.square().sum()
        if name.endswith((*COLUMNS, *ROWS)):
            summed = summed + squares
        else:
            own = own + squares
    if dist.get_world_size() > 1 and module.embed.weight.shape[0] < VOCAB and fault != "norm of this rank's part":
        summed = _sum(summed)
    norm = float((own + summed).sqrt())
    for name, parameter in module.named_parameters():
        parameter.grad *= min(1.0, 0.1 / norm)
        if fault == "replicas that step apart" and dist.get_rank() and not name.endswith((*COLUMNS, *ROWS)):
            continue
        if fault != "step without biases" or not name.endswith("bias") or module.embed.weight.shape[0] == VOCAB:
            parameter.data -= parameter.grad
    return norm


# --- inputs that need gradients ---------------------------------------------------------------------------------------


class Merge(nn.Module):
    """Two inputs, each of which enters a layer of its own, and is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (MLP(INNER, is_plain=True) for _ in range(2))

    def forward(self, *, x: Tensor, context: Tensor) -> Tensor:
        y: Tensor = self.one(self.entered(x)) + x + self.other(x=self.entered(context))
        return y

    def entered(self, x: Tensor) -> Tensor:
        return x


def build_merge() -> Any:
    drawn = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(3, WIDTH, generator=drawn).requires_grad_() for name in ("x", "context")}
    return Merge(), inputs, squared


def squared(output: Tensor) -> Tensor:
    return output.square().mean()


def merge_places(name: str, mesh: ParallelMesh) -> Any:
    if "up." in name:
        return (span(INNER, mesh),)
    return (slice(None), span(INNER, mesh)) if name.endswith("down.weight") else None


def step_merge(module: Any) -> float:
    """Take a step of SGD, and return the norm."""
    parts = torch.zeros(2, dtype=torch.float64)
    for name, parameter in module.named_parameters():
        parts[int("down.bias" in name)] += parameter.grad.square().sum()
        parameter.data -= parameter.grad
    if module.one.up.weight.shape[0] < INNER:
        dist.all_reduce(parts[:1])
    return float(parts.sum().sqrt())


def cut_merge(module: Any, mesh: ParallelMesh, *, fault: str = "") -> None:
    """Cut both MLPs by plain parts. The parent applies f to what enters them."""
    for mlp in (module.one, module.other):
        for layer, dim in ((mlp.up, 0), (mlp.down, 1)):
            layer.weight = nn.Parameter(layer.weight.detach().chunk(mesh.tensor.size, dim)[mesh.tensor.rank].clone())
        mlp.up.bias = nn.Parameter(mlp.up.bias.detach().chunk(mesh.tensor.size)[mesh.tensor.rank].clone())
        mlp.down.forward = partial(_summed_rows, mlp.down, mesh)
    contexts = 0

    def entered(x: Tensor) -> Tensor:
        nonlocal contexts
        contexts += 1
        return x if fault == "second input" and contexts % 2 == 0 else copy_to_tensor_parallel(x, mesh.tensor)

    module.entered = entered


def _summed_rows(layer: nn.Linear, mesh: ParallelMesh, x: Tensor) -> Tensor:
    return reduce_from_tensor_parallel(x @ layer.weight.T, mesh.tensor) + layer.bias


# --- cuts that reach beyond their module ------------------------------------------------------------------------------


class Scaled(nn.Linear):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


def build_scaled() -> tuple[nn.Module, dict[str, Tensor], Callable[[Tensor], Tensor]]:
    return Scaled(4, 4), {"x": torch.randn(3, 4)}, torch.sum


def patch_class(_module: nn.Module, _mesh: ParallelMesh) -> None:
    Scaled.factor = 2.0


ONE = Scaled(4, 4)


def build_one() -> tuple[nn.Module, dict[str, Tensor], Callable[[Tensor], Tensor]]:
    return ONE, {"x": torch.randn(3, 4)}, torch.sum
