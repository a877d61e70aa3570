"""The rank of a pipeline whose memory peaks highest.

The ranks of a pipeline hold different layers, and different numbers of micro-batches at once. Among ranks with the same
work, the number of micro-batches between their forward and their backward pass falls from rank to rank, and, with the
zero-bubble schedule, the number of those that wait for the gradients of weights rises as much. The bytes at an instant
are linear in both numbers, so the peak is highest on the first or on the last of these ranks.
"""

from crosscut.architecture import Device
from crosscut.config.conventions import AMPERE
from crosscut.planner.candidate import Candidate
from crosscut.planner.memory import MemoryForecast, forecast_memory
from crosscut.planner.stages import separates_weights
from crosscut.planner.stages.alike import alike_ranks


def fullest_rank(
    run: Candidate, *, device: Device = "cuda", capability: tuple[int, int] = AMPERE
) -> tuple[int, MemoryForecast]:
    """Position along the pipeline of the rank with the highest peak, and the forecast of its memory. Of several equal
    ranks, the result has the first one. Without a pipeline, the rank is 0.

    Raises `ConfigError` if `model.vocab_size` is still 0.
    """
    ends = (0, -1) if separates_weights(run.layout) else (0,)
    ranks = sorted({group[end] for group in alike_ranks(run) for end in ends})
    forecasts = [forecast_memory(Candidate.at(run, rank), device=device, capability=capability) for rank in ranks]
    best = max(range(len(ranks)), key=lambda place: forecasts[place].total)
    return ranks[best], forecasts[best]
