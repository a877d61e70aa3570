"""Low-rank adapters of a whole model (LoRA): every matrix of a layer gets an adapter, and everything else is frozen.

    columns   X --f--> X A_i + scale (X D) U_i          D whole on every rank, U cut like the columns of A
    rows      X_i A_i + scale (X_i D_i) U  --g--> sum   D cut like the rows of A, U whole on every rank
    whole     X A + scale (X D) U                       D and U whole on every rank, outside of the parallel regions

X is the input, A the matrix, and D and U its adapter. f and g are the entry and the exit of the parallel region.

The products with an adapter are inside the parallel region of the product with A, so an adapter adds no message to the
forward or the backward pass. Every rank holds one of the two matrices, D or U, whole, but computes only a part of its
gradient. The ranks sum these parts once per step.

Source: Hu et al. 2021 (arXiv 2106.09685).
"""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from crosscut.architecture.parameters import Adapter, Cut, Matrix, Parameter, Role

_Part = TypeVar("_Part")


def adapted(part: _Part, *, rank: int, alpha: float) -> _Part:
    """Return the description of a part of a model, such as a sublayer, with an adapter of rank `rank` at each matrix.
    All other parameters are frozen.
    """
    changed: _Part = _changed(part, rank, alpha)
    return changed


def _changed(part: Any, rank: int, alpha: float) -> Any:
    if isinstance(part, Matrix):
        return _with_adapter(part, rank, alpha)
    if isinstance(part, Parameter):
        return replace(part, is_frozen=True)
    if isinstance(part, tuple):
        return tuple(_changed(each, rank, alpha) for each in part)
    if is_dataclass(part) and not isinstance(part, type):
        values = {field.name: _changed(getattr(part, field.name), rank, alpha) for field in fields(part)}
        return replace(part, **values)
    return part


def _with_adapter(matrix: Matrix, rank: int, alpha: float) -> Matrix:
    weight, name = matrix.weight, matrix.adapter_name
    is_by_rows, is_whole = weight.cut is Cut.ROWS, weight.cut is Cut.WHOLE
    down = Parameter(
        name=f"{name}.down",
        shape=(rank * weight.num_matrices, matrix.in_features),
        role=Role.DOWN,
        cut=Cut.ROWS if is_by_rows else Cut.WHOLE,
        inside=not (is_by_rows or is_whole),
    )
    up = replace(
        weight,
        name=f"{name}.up",
        shape=(matrix.out_features, rank),
        role=Role.UP,
        cut=Cut.WHOLE if is_by_rows else weight.cut,
        inside=is_by_rows,
    )
    bias = None if matrix.bias is None else replace(matrix.bias, is_frozen=True)
    return Matrix(replace(weight, is_frozen=True), bias, Adapter(down, up, alpha / rank))
