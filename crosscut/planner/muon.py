"""Cost of Muon on one rank: stored momentum, memory, products and messages of a step (`training.optimization.muon`).

Every rank gathers the update of each whole matrix and orthogonalizes the whole matrix, so the products of Muon do not
shrink with the number of ranks. For a square matrix of width h, five Newton-Schulz steps take 30 h^3 FLOPs.
"""

from collections import Counter
from functools import lru_cache, partial
from math import prod

from crosscut.architecture import Operation, Parameter, Product, describe
from crosscut.architecture.messages import Phase
from crosscut.architecture.muon import newton_schulz_products, takes_muon
from crosscut.config import ModelConfig
from crosscut.config.optimizer import MatrixOptimizer
from crosscut.planner.candidate import Planned
from crosscut.planner.messages.collective import Collective
from crosscut.planner.messages.sharding import shard_axis

MUON_BYTES = 52
"""Bytes per parameter in float32 that Muon reads and writes on the rank's own part, without the orthogonalization:
three operators that read two tensors and write one, and two operators that read one tensor and write one."""
MUON_KERNELS = 12
"""Kernels of one parameter's update, excluding the products that orthogonalize the update."""


def muon_parameters(run: Planned) -> Counter[Parameter]:
    """Parameters that Muon updates, with the number of equal parameters in the model; empty without Muon."""
    return _matrices(run.model) if run.optimizer.matrices is MatrixOptimizer.MUON else Counter()


@lru_cache(maxsize=4096)
def _matrices(model: ModelConfig) -> Counter[Parameter]:
    found: Counter[Parameter] = Counter()
    for layer, count in describe(model).kinds.items():
        for parameter in layer.parameters():
            if takes_muon(parameter):
                found[parameter] += count
    return found


def muon_share(run: Planned) -> int:
    """Elements of momentum that one rank stores."""
    return sum(count * _share(run, parameter) for parameter, count in muon_parameters(run).items())


def largest_muon_share(run: Planned) -> int:
    """Number of elements of the largest parameter that one rank stores. 0 without Muon."""
    return max((_share(run, parameter) for parameter in muon_parameters(run)), default=0)


def _share(run: Planned, parameter: Parameter) -> int:
    """Elements of a parameter that one rank stores."""
    rows, *columns = parameter.on(run.layout.tensor).shape
    return -(-rows // run.layout.shard_size) * prod(columns)


def muon_products(run: Planned) -> Counter[Product]:
    """Muon's matrix products on one rank in one step, and the number of times that each product is computed."""
    found: Counter[Product] = Counter()
    for parameter, count in muon_parameters(run).items():
        for product in newton_schulz_products(parameter):
            found[product] += count
    return found


def muon_flops(run: Planned) -> int:
    """FLOPs of Muon's matrix products on one rank in one step. Every rank computes all of these products."""
    return sum(count * product.flops for product, count in muon_products(run).items())


def muon_buffers(run: Planned) -> int:
    """Largest number of bytes that the update of one parameter needs besides parameter, gradient and momentum.

    The rank's part of the update exists in the type of the parameters. The Newton-Schulz iteration holds the gathered
    update, the matrices of the previous and of the current step, and two square products whose width is the smaller
    dimension.
    """
    numbers = run.training.numbers
    return max((_buffers(run, parameter, numbers.muon_bytes) for parameter in muon_parameters(run)), default=0)


def _buffers(run: Planned, parameter: Parameter, size: int) -> int:
    rows, columns = parameter.shape[0] // parameter.num_matrices, parameter.shape[1]
    own = _share(run, parameter) * run.training.numbers.accumulation_bytes
    return own + size * (prod(parameter.shape) + 2 * rows * columns + 2 * min(rows, columns) ** 2)


def muon_messages(run: Planned) -> list[Collective]:
    """All-gathers of the updates of one step: over the data ranks that shard a copy, then over the tensor ranks."""
    layout = run.layout
    gather = partial(
        Collective, operation=Operation.ALL_GATHER, phase=Phase.STEP, element_bytes=run.training.numbers.muon_bytes
    )
    over_shares = partial(gather, axis=shard_axis(layout), purpose="updates of shards", ranks=layout.shard_size)
    over_tensor = partial(gather, axis="tensor", purpose="updates", ranks=layout.tensor)
    found = []
    for parameter, count in muon_parameters(run).items():
        found.append(over_shares(count=count, elements=_share(run, parameter) * layout.shard_size))
        if parameter.dim_cut(layout.tensor) is not None:
            found.append(over_tensor(count=count, elements=prod(parameter.shape)))
    return found
