"""Muon's work: the products of the Newton-Schulz iteration, and the turns in which ranks orthogonalize parameters.

`crosscut.training.optimization.muon` runs these products, and the planner counts them.
"""

from dataclasses import replace

from crosscut.architecture.parameters import Parameter
from crosscut.architecture.steps import Product
from crosscut.config.optimizer import ParameterGroup

NEWTON_SCHULZ_STEPS = 5
"""Number of steps of the Newton-Schulz iteration (Jordan et al. 2024)."""


def takes_muon(parameter: Parameter) -> bool:
    """Whether `optimizer.matrices` selects the optimizer for this parameter. This is true for the matrices in the
    layers.
    """
    return parameter.role.group is ParameterGroup.MATRIX and not parameter.is_frozen


def without_name(parameter: Parameter) -> Parameter:
    """Description that a parameter shares with all parameters that are equal to it, in any layer. The ranks that hold
    parts of equal parameters orthogonalize these parameters in turns.
    """
    return replace(parameter, name="")


def num_turns(number: int, num_ranks: int) -> int:
    """Number of turns of `number` equal parameters, each cut over `num_ranks` ranks. In a turn, each rank gets one
    parameter. The last turn may have fewer parameters; the last ranks then get none.
    """
    return -(-number // num_ranks)


def newton_schulz_products(parameter: Parameter) -> tuple[Product, ...]:
    """Matrix products that orthogonalize the update of a parameter. A parameter may store several matrices.

    For a matrix X [s, l] with s <= l, a step computes X X^T, the square of X X^T, and the product of an [s, s] matrix
    and X.
    """
    rows, columns = parameter.shape[0] // parameter.num_matrices, parameter.shape[1]
    s, length = min(rows, columns), max(rows, columns)
    step = (Product(s, length, s), Product(s, s, s), Product(s, s, length))
    return step * NEWTON_SCHULZ_STEPS * parameter.num_matrices
