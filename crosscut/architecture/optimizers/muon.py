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
    """Whether the setting `optimizer.matrices` chooses the optimizer of this parameter. True for the trained matrices
    in the layers.
    """
    return parameter.role.group is ParameterGroup.MATRIX and not parameter.is_frozen


def without_name(parameter: Parameter) -> Parameter:
    """Return the parameter without its name, so that the same parameter compares equal in all layers. The ranks that
    hold parts of such equal parameters orthogonalize them in turns.
    """
    return replace(parameter, name="")


def num_turns(number: int, num_ranks: int) -> int:
    """Number of turns in which `num_ranks` ranks orthogonalize `number` equal parameters, each cut over all of these
    ranks. In a turn, each rank orthogonalizes one parameter. The last turn may have fewer parameters than ranks; the
    last ranks are then idle.
    """
    return -(-number // num_ranks)


def newton_schulz_products(parameter: Parameter) -> tuple[Product, ...]:
    """Matrix products that orthogonalize the update of a parameter. A parameter may store several matrices.

    For a matrix X [s, l] with s <= l, each Newton-Schulz step computes X X^T, the square of X X^T, and the product of
    an [s, s] matrix and X.
    """
    rows, columns = parameter.shape[-2] // parameter.num_matrices, parameter.shape[-1]
    s, length = min(rows, columns), max(rows, columns)
    step = (Product(s, length, s), Product(s, s, s), Product(s, s, length))
    return step * NEWTON_SCHULZ_STEPS * parameter.num_matrices * max(parameter.stacked, 1)
