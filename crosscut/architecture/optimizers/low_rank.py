"""Matrices whose gradients are summed in low rank (`optimizer.gradient_rank`).

`crosscut.parallel.state.low_rank` sums these gradients, and the planner counts the messages and the memory.
"""

from collections.abc import Iterable

from crosscut.architecture.parameters import Cut, Parameter
from crosscut.config import ConfigError

_LEAST_GAIN = 2
"""Smallest number of times by which a gradient must be larger than its factors."""


def has_low_rank(parameter: Parameter, rank: int) -> bool:
    """Whether the gradient of a parameter is summed as two factors of `rank` columns. 0 as `rank` means that all
    gradients are summed whole.
    """
    return 0 < rank <= _largest_rank(parameter)


def require_low_rank(parameters: Iterable[Parameter], rank: int) -> None:
    """Raise `ConfigError` if `optimizer.gradient_rank` is so large that all gradients of a model would be whole."""
    largest = max(map(_largest_rank, parameters), default=0)
    if rank > largest:
        raise ConfigError(
            f"`optimizer.gradient_rank` must be at most {largest} for this model, but is {rank}. A gradient is only "
            f"summed in low rank if it is at least {_LEAST_GAIN} times as large as its factors. Set "
            f"optimizer.gradient_rank={largest // 2}."
        )


def _largest_rank(parameter: Parameter) -> int:
    """Largest rank in which the gradient of a parameter is summed. Above 0 for every trained matrix, or stack of
    matrices, that tensor ranks may cut and that is at least twice as large as its factors.
    """
    if parameter.is_frozen or parameter.cut is Cut.WHOLE or len(parameter.shape) != 2 + (parameter.stacked > 0):
        return 0
    rows, columns = parameter.shape[-2:]
    return rows * columns // (_LEAST_GAIN * (rows + columns))
