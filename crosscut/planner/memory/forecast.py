"""Forecast the peak memory of one rank in a training step, by category.

Memory can peak at a few instants of a step. The forecast is the maximum over these instants. `A` stands for the
activations of all layers, `G` for the gradients, and `E` for the gradient of the rank's vocabulary shard:

| instant             | bytes besides weights and optimizer state                                                 |
|---------------------|-------------------------------------------------------------------------------------------|
| loss                | A, the last hidden states and their gradient, E, the logits of one chunk                  |
| backward, layer i   | the parts of A and G that exist at layer i, the layer's temporary tensors, E              |
| backward, embedding | G                                                                                         |
| reduction           | G, and a copy of the gradients in the last bucket                                         |
| step                | G, and the buffers of the optimizer                                                       |

From the second micro-batch on, all of G exists throughout the backward pass. In a pipeline, A also counts the other
micro-batches that the rank holds (`architecture.pipeline.flights`). The derivations are in `docs/planner.md`.
The dry run (`crosscut.rehearsal`) measures the same bytes in the running program.
"""

from collections.abc import Iterator

from crosscut.architecture import Device, describe
from crosscut.architecture.pipeline import PERIODS, flights
from crosscut.config.conventions import AMPERE
from crosscut.planner.candidate import Planned, pipeline_rank_of
from crosscut.planner.memory.instants import Instants, MemoryForecast, other_passes
from crosscut.planner.memory.stage import StageMemory
from crosscut.planner.parameters import known_vocab_size
from crosscut.planner.stages import schedule_of, stages_of


def forecast_memory(run: Planned, *, device: Device = "cuda", capability: tuple[int, int] = AMPERE) -> MemoryForecast:
    """Forecast the bytes that one rank of `run` holds at the peak of a step. In a pipeline, this rank is
    `Candidate.pipeline_rank` for a candidate, and the first rank for a `RunConfig`.

    `capability` is the compute capability of the GPU, which decides whether the attention kernel can share key-value
    heads. Raises `ConfigError` if `model.vocab_size` is still 0.
    """
    return max(_instants(run, device, capability), key=lambda forecast: forecast.total)


def forecast_instants(run: Planned, *, device: Device = "cuda") -> list[MemoryForecast]:
    """Forecast the bytes that one rank of `run` holds at each instant at which memory may peak, in order of time."""
    return list(_instants(run, device, AMPERE))


def _instants(run: Planned, device: Device, capability: tuple[int, int]) -> Iterator[MemoryForecast]:
    """Yield the forecast at each instant of a step. In a pipeline, these are the instants of the backward passes during
    which the rank holds the most bytes, and the instants at the end of the step.
    """
    known_vocab_size(run.model)
    whole = describe(run.model)
    if run.layout.num_stages == 1:
        step = Instants(StageMemory(run, device, capability, whole))
        yield from (*step.passes(), *step.after_passes())
        return
    rank = pipeline_rank_of(run)
    stages = [StageMemory(run, device, capability, whole.part([stage])) for stage in stages_of(run, rank)]
    few = min(run.num_micro_batches, PERIODS * run.layout.ranks.owners.size)  # enough to find all flights
    for flight in flights(schedule_of(run.layout, few), rank):
        yield from Instants(stages[flight.chunk], other_passes(stages, flight)).passes()
    yield from Instants(stages[0]).after_passes()
