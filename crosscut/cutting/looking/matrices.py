"""Linear layers and embeddings that compute what their classes promise.

A layer is run with stand-ins for its weight, so its own weight may lie on `meta`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from crosscut.cutting.looking.states import unchanged

_EXACT = 1e-9


@dataclass(frozen=True)
class Matrix:
    """Linear layer `y = x W + b`, or embedding."""

    name: str
    module: nn.Module
    is_embedding: bool
    output_dim: int
    """Dimension of the weight that goes along the outputs."""

    @property
    def weight(self) -> Tensor:
        """Weight of the layer."""
        return self.module.get_parameter("weight")

    @property
    def num_outputs(self) -> int:
        """Size of the last dimension of the outputs."""
        return self.weight.shape[self.output_dim]

    @property
    def num_inputs(self) -> int:
        """Size of the last dimension of a linear layer's inputs, or number of rows of an embedding."""
        return self.weight.shape[1 - self.output_dim]

    def output_shape(self, x: Any, *_: object) -> tuple[int, ...]:
        """Shape of a linear layer's output for an input."""
        return (*x.shape[:-1], self.num_outputs)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose weight is [in, out], such as `Conv1D` of transformers."""
    weight = module._parameters.get("weight")
    return (
        type(module).__name__ == "Conv1D"
        and weight is not None
        and weight.dim() == 2
        and weight.shape[1] == getattr(module, "nf", None)
    )


def may_be_matrix(module: nn.Module) -> bool:
    """Whether a module has only a weight of two dimensions and a bias, and no hooks that could change its output."""
    weight, own = (
        module._parameters.get("weight"),
        {name for name, each in module._parameters.items() if each is not None},
    )
    plain = weight is not None and weight.dim() == 2 and own <= {"weight", "bias"} and not list(module.children())
    return plain and not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def recognise(
    name: str, module: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Matrix | None:
    """Return the matrix that a module is, by a call of its `forward`. None if it computes something else."""
    if isinstance(module, nn.Embedding):
        matrix = Matrix(name, module, is_embedding=True, output_dim=1)
        return matrix if _looks_up_rows(matrix, lambda: forward(*args, **kwargs)) else None
    values = (*args, *kwargs.values())
    x = values[0] if len(values) == 1 else None
    if not isinstance(module, nn.Linear) and not is_transposed(module):
        return None
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() == 0:
        return None
    for output_dim in (0, 1):
        matrix = Matrix(name, module, is_embedding=False, output_dim=output_dim)
        if x.shape[-1] == matrix.num_inputs and _is_linear(matrix, forward, x.detach()):
            return matrix
    return None


def is_plain(module: nn.Module, *, output_dim: int) -> bool:
    """Whether a linear layer or an embedding, whose weight has the outputs along `output_dim`, computes what
    `F.linear` or `F.embedding` computes.
    """
    matrix = Matrix("", module, is_embedding=isinstance(module, nn.Embedding), output_dim=output_dim)
    if not matrix.is_embedding:
        return _is_linear(matrix, module.forward, torch.zeros(1, matrix.num_inputs))
    ids, drawn = torch.arange(matrix.num_inputs), torch.Generator().manual_seed(0)
    rows = torch.randn(matrix.num_inputs, 1, dtype=torch.float64, generator=drawn).expand(matrix.weight.shape)
    with stand_in(module, rows):
        found = module.forward(ids)
    return isinstance(found, Tensor) and torch.equal(found, rows)


def _is_linear(matrix: Matrix, forward: Callable[..., object], x: Tensor) -> bool:
    """Whether a layer multiplies by its weight. The stand-ins for the weight take no memory."""
    if type(matrix.module) is nn.Linear:
        return matrix.output_dim == 0
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    for along in (0, 1):
        ends = torch.randn(matrix.weight.shape[along], dtype=torch.float64, generator=generator)
        weight = (ends[:, None] if along == 0 else ends[None]).expand(matrix.weight.shape)
        held, bias = matrix.module._parameters.get("bias"), None
        if held is not None:
            bias = torch.randn(held.shape, dtype=torch.float64, generator=generator)
        with stand_in(matrix.module, weight, bias):
            try:
                y = forward(x.clone())
            except (RuntimeError, ValueError):
                return False
        expected = F.linear(x, weight if matrix.output_dim == 0 else weight.t(), bias)
        if not isinstance(y, Tensor) or y.shape != expected.shape or (y - expected).abs().max() > _EXACT:
            return False
    return True


def _looks_up_rows(matrix: Matrix, call: Callable[[], Any]) -> bool:
    """Whether an embedding looks rows up by `F.embedding`, so that ranks that hold some of the rows can add up."""
    generator, shape = torch.Generator().manual_seed(0), matrix.weight.shape
    rows = torch.randn(shape[0], 1, dtype=torch.float64, generator=generator)
    here, found = torch.arange(shape[0])[:, None] % 2 == 0, []
    if getattr(matrix.module, "max_norm", None) is not None:
        return False
    with _LookUps() as looks:
        for held in (rows, rows * here, rows * ~here):
            with stand_in(matrix.module, held.expand(shape), None):
                found.append(call())
    if not looks.count or not all(isinstance(each, Tensor) and each.shape[-1:] == shape[1:] for each in found):
        return False
    whole, *halves = found
    return bool(whole.abs().max() > 0 and (whole - sum(halves)).abs().max() < _EXACT)


class _LookUps(TorchFunctionMode):
    """Counts the calls of `F.embedding`."""

    count = 0

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.count += func is F.embedding
        return func(*args, **(kwargs or {}))


@contextmanager
def stand_in(module: nn.Module, weight: Tensor, bias: Tensor | None = None) -> Iterator[None]:
    """Give a module another weight and bias until the end of the context."""
    with unchanged(module), torch.no_grad():
        module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            module._parameters["bias"] = nn.Parameter(bias, requires_grad=False)
        yield
