"""Find the rank of a pipeline with the highest memory peak.

The ranks of a pipeline hold different layers, and different numbers of micro-batches at once. Some ranks do the same
work. Each of these ranks has fewer micro-batches in flight (forward pass done, backward pass not yet run) than the rank
before it. With the zero-bubble schedule, each of these ranks also has more micro-batches that wait for their weight
gradients than the rank before it. Both numbers change by the same amount from rank to rank. The bytes at an instant are
linear in both numbers, so the peak is highest on the first or on the last of these ranks.
"""

from crosscut.architecture import Device
from crosscut.config.conventions import AMPERE
from crosscut.planner.candidate import Candidate
from crosscut.planner.memory.forecast import forecast_memory
from crosscut.planner.memory.instants import MemoryForecast
from crosscut.planner.stages import alike_ranks, separates_weights


def fullest_rank(
    run: Candidate, *, device: Device = "cuda", capability: tuple[int, int] = AMPERE
) -> tuple[int, MemoryForecast]:
    """Return the position of the pipeline rank with the highest memory peak, and the memory forecast of this rank. If
    several ranks have the same peak, the result is the first of them. Without a pipeline, the position is 0.

    Raises `ConfigError` if `model.vocab_size` is still 0.
    """
    ends = (0, -1) if separates_weights(run.layout) else (0,)
    ranks = sorted({group[end] for group in alike_ranks(run) for end in ends})
    forecasts = [forecast_memory(Candidate.at(run, rank), device=device, capability=capability) for rank in ranks]
    return max(zip(ranks, forecasts, strict=True), key=lambda found: found[1].total)
