"""Cost of Muon on one rank: stored momentum, memory, products and messages of a step (`training.optimization.muon`).

Ranks that hold parts of equal parameters orthogonalize these parameters in turns. The products of Muon are therefore
divided among these ranks. If the last turn has fewer parameters than ranks, the first rank has more products than the
last ranks. All figures in this module are for the first rank. For a square matrix of width h, five Newton-Schulz steps
take 30 h^3 FLOPs.
"""

from collections import Counter
from functools import lru_cache, partial
from math import prod

from crosscut.architecture import Decoder, Operation, Parameter, Product, Target
from crosscut.architecture.messages import Phase
from crosscut.architecture.optimizers.muon import newton_schulz_products, num_turns, takes_muon, without_name
from crosscut.config.optimizer import MatrixOptimizer
from crosscut.planner.candidate import Planned
from crosscut.planner.messages.collective import Collective, along
from crosscut.planner.parameters import Shares
from crosscut.planner.stages import part_of

MUON_BYTES = 52
"""Bytes per float32 element that Muon reads and writes on the rank's own part of a parameter, without the
orthogonalization: three operators that read two tensors and write one, and two operators that read one tensor and write
one."""
MUON_KERNELS = 12
"""Kernels of one parameter's update, excluding the products that orthogonalize the update."""


def muon_parameters(run: Planned) -> Counter[Parameter]:
    """Parameters on one rank that Muon updates. Equal parameters share one key, whose value is their number. Empty
    without Muon. In a pipeline, these are the parameters of the stages of rank `Candidate.pipeline_rank`.
    """
    return _matrices(part_of(run)) if run.optimizer.matrices is MatrixOptimizer.MUON else Counter()


@lru_cache(maxsize=4096)
def _matrices(part: Decoder) -> Counter[Parameter]:
    found: Counter[Parameter] = Counter()
    for layer, count in part.kinds.items():
        for parameter in layer.parameters():
            if takes_muon(parameter):
                found[without_name(parameter)] += count
    return found


def muon_share(run: Planned) -> int:
    """Elements of momentum that one rank stores."""
    return sum(count * _share(run, parameter) for parameter, count in muon_parameters(run).items())


def largest_muon_share(run: Planned) -> int:
    """Number of elements of the largest parameter that one rank stores. 0 without Muon."""
    return max((_share(run, parameter) for parameter in muon_parameters(run)), default=0)


def _share(run: Planned, parameter: Parameter) -> int:
    """Elements of a parameter that one rank stores."""
    return Shares.of(run.layout).own(parameter.on(Target.of(run.layout)))


def _holders(run: Planned, parameter: Parameter) -> int:
    """Number of ranks over which a parameter is cut."""
    own = parameter.on(Target.of(run.layout))
    owners = run.layout.expert if own.is_expert else 1
    return Shares.of(run.layout).number(own) * own.num_parts * owners


def muon_products(run: Planned) -> Counter[Product]:
    """Muon's matrix products on the first rank in one step, and the number of times that each product is computed."""
    found: Counter[Product] = Counter()
    for parameter, count in muon_parameters(run).items():
        for product in newton_schulz_products(parameter):
            found[product] += num_turns(count, _holders(run, parameter))
    return found


def muon_flops(run: Planned) -> int:
    """FLOPs of Muon's matrix products on the first rank in one step."""
    return sum(count * product.flops for product, count in muon_products(run).items())


def muon_buffers(run: Planned) -> int:
    """Largest number of bytes that the update of one parameter needs besides parameter, gradient and momentum.

    The Newton-Schulz iteration holds the whole update, the matrices of the previous and of the current step, and two
    square products whose width is the smaller dimension; for stacked matrices, also the results of all. The exchanges
    before and after the iteration need no more.
    """
    size = run.training.numbers.muon_bytes
    return max((size * _largest(parameter) for parameter in muon_parameters(run)), default=0)


def _largest(parameter: Parameter) -> int:
    """Elements that the Newton-Schulz iteration of a parameter holds at once."""
    rows, columns = parameter.shape[-2] // parameter.num_matrices, parameter.shape[-1]
    results = prod(parameter.shape) if parameter.stacked else 0
    return results + prod(parameter.shape) + 2 * rows * columns + 2 * min(rows, columns) ** 2


def muon_messages(run: Planned) -> list[Collective]:
    """All-to-alls of one step. In each turn, the data ranks that shard a copy of the model, and then the tensor ranks,
    exchange parts of updates, so that each rank gets one whole update. Afterwards, the ranks send the results back. A
    turn with fewer parameters than ranks sends as many elements as any other turn.
    """
    ranks = run.layout.ranks
    exchange = partial(
        Collective, operation=Operation.ALL_TO_ALL, phase=Phase.STEP, element_bytes=run.training.numbers.muon_bytes
    )
    over_cuts = partial(along(exchange, ranks.cuts), purpose="updates")
    found = []
    for parameter, count in muon_parameters(run).items():
        holders = _holders(run, parameter)
        twice = 2 * num_turns(count, holders)
        slices = run.layout.ranks_of(experts=parameter.stacked > 0).slices
        over_slices = partial(along(exchange, slices), purpose="updates of shards")
        found.append(over_slices(count=twice, elements=_share(run, parameter) * holders))
        if parameter.on(Target.of(run.layout)).num_parts > 1:
            found.append(over_cuts(count=twice, elements=prod(parameter.shape)))
        if parameter.stacked and run.layout.expert > 1:
            over_experts = along(exchange, run.layout.line("expert"))
            found.append(over_experts(purpose="updates of experts", count=twice, elements=prod(parameter.shape)))
    return found
