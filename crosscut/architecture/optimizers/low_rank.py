"""Matrices whose gradients are summed in low rank (`optimizer.gradient_rank`).

`crosscut.parallel.state.low_rank` sums these gradients, and the planner counts the messages and the memory.
"""

from crosscut.architecture.parameters import Cut, Parameter

_LEAST_GAIN = 2
"""Smallest number of times by which a gradient must be larger than its factors."""


def has_low_rank(parameter: Parameter, rank: int) -> bool:
    """Whether the gradient of a parameter is summed as two factors of `rank` columns. True for every trained matrix,
    or stack of matrices, that tensor ranks may cut and that is at least twice as large as its factors. 0 as `rank`
    means that all gradients are summed whole.
    """
    if not rank or parameter.is_frozen or parameter.cut is Cut.WHOLE:
        return False
    if len(parameter.shape) != 2 + (parameter.stacked > 0):
        return False
    rows, columns = parameter.shape[-2:]
    return _LEAST_GAIN * rank * (rows + columns) <= rows * columns
