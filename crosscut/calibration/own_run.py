"""Measure the CPU for the forecast of one run, with the ranks of the run and the shapes of its products.

`crosscut plan --calibrate` measures many shapes for any run, in about a minute. This measurement takes about a second,
so that a run can say before its first step how long it will take.
"""

from crosscut.architecture import Product, describe, flat, lower
from crosscut.architecture.readings import attention_products
from crosscut.architecture.steps import Multiply
from crosscut.calibration.device import Sizes
from crosscut.calibration.device_file import device_table
from crosscut.calibration.ranks import measure_on
from crosscut.config import RunConfig
from crosscut.config.system.machine import available_memory, processor_name
from crosscut.parallel import ParallelMesh
from crosscut.planner.candidate import target_of
from crosscut.planner.hardware import Hardware, make_hardware

_MOST_TOKENS, _LONGEST = 2048, 512
"""Maximum number of tokens in the measured products, and maximum length of a sequence in the measured attention."""
_SCORES = Product(_LONGEST, 64, _LONGEST)
"""Scores that are measured for a model without attention."""
_ELEMENTS = 1 << 22
_MESSAGES = (1 << 17, 1 << 20)
"""Number of float32 elements in each measured message. The sizes are those of activations and gradients of small
models."""
_TURNS = 2


def measure_for(run: RunConfig, mesh: ParallelMesh) -> Hardware:
    """Measure the CPU for a run that computes in float32. Every rank of the run's mesh must call this function."""
    rates, link = measure_on(mesh, _sizes(run), _MESSAGES)
    num_ranks = run.layout.world_size
    table = device_table(processor_name(), rates, link, memory=available_memory(), ranks=num_ranks, known=None)
    return make_hardware("own-run", {"device": "cpu", **table})


def _sizes(run: RunConfig) -> Sizes:
    """Return the sizes of the matrix products and of the attention in the run's layers, limited so that the measurement
    is quick.
    """
    target = target_of(run, device="cpu")
    kinds = describe(run.model).kinds
    products: list[Product] = [
        product
        for layer in kinds
        for step in flat(lower(layer, target))
        if isinstance(step, Multiply)
        for product in step.products(target)
    ]
    scores = next((each for layer in kinds for each in attention_products(layer, target)), _SCORES)
    return Sizes(
        tokens=(min(max(product.m for product in products), _MOST_TOKENS),),
        widths=tuple({(product.k, product.n): None for product in products}),
        elements=_ELEMENTS,
        attention=(1, max(1, scores.batch // target.sequences), min(run.training.sequence_length, _LONGEST), scores.k),
        turns=_TURNS,
    )
