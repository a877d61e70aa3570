"""Runners for the layers of a model. A runner calls the functions of a layer, with the compilation, the recomputation
and the matrix products that the run asks for.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from crosscut.config.training import Recompute, TrainingConfig
from crosscut.kernels.deferral import Deferral
from crosscut.kernels.products import deferring
from crosscut.launch.heap import LEAN_BYTES, give_freed_tensors_back
from crosscut.model.running import Runner
from crosscut.parallel import RandomStreams
from crosscut.training.memory.host_activations import HostActivations
from crosscut.training.memory.recomputation import CheapOutputs, Recomputed
from crosscut.training.precision import products
from crosscut.training.speed.compilation import CompiledCode, Compiler, marked_cheap, marked_kept


def make_runners(
    training: TrainingConfig,
    *,
    streams: RandomStreams,
    device: torch.device,
    compiler: Compiler | None,
    deferral: Deferral | None = None,
) -> Callable[[int], Runner]:
    """Return a function that takes the index of a layer and returns the runner of this layer.

    Starting with the first layer, every `training.recompute_every`-th layer recomputes as `training.recompute` says.
    Compiled code runs inside recomputation. With `training.recompute="full"` on the CPU, this call also makes the
    process return freed memory to the system earlier. With `deferral`, a backward pass can defer the weight gradients.
    """
    own = products(training.precision)
    runner = Runner(products=own if deferral is None else deferring(own, deferral))
    if compiler is not None:
        runner = replace(runner, layer=CompiledCode(compiler), kept=marked_kept, compiler=compiler)
    if training.recompute == Recompute.FULL and device.type == "cpu":
        give_freed_tensors_back(LEAN_BYTES)
    host = HostActivations(device) if "activations" in training.offload else None
    recomputing = _recomputing(runner, training.recompute, streams=streams, host=host, compiler=compiler)
    return lambda index: runner if index % training.recompute_every else recomputing


def _recomputing(
    runner: Runner, recompute: str, *, streams: RandomStreams, host: HostActivations | None, compiler: Compiler | None
) -> Runner:
    """Add recomputation to `runner`."""
    if recompute == Recompute.FULL:  # compiled code cannot skip the layer's last product
        layer = Recomputed(streams, call=runner.layer, host=host)
        return replace(runner, layer=layer, skips_last_product=compiler is None)
    if recompute == Recompute.SELECTIVE and compiler is None:  # compiled attention keeps no scores (checked before)
        return replace(runner, core=Recomputed(streams))
    if recompute == Recompute.OPERATORS and compiler is not None:
        return replace(runner, layer=CompiledCode(compiler, recomputes_operators=True), cheap=marked_cheap)
    if recompute == Recompute.OPERATORS:
        outputs = CheapOutputs()
        return replace(runner, layer=outputs.layer, cheap=outputs.cheap)
    return runner
