"""Throughput of a run in tokens/s and in model FLOP/s, and utilisation: the model FLOP/s as a share of a named peak
rate.

FLOPs are counted with the planner's formula, so the forecast and the report cannot differ.
"""

import time
from dataclasses import dataclass

import torch

from crosscut.config import ResolvedRun
from crosscut.config.precision import PRECISIONS
from crosscut.kernels import ORDINARY
from crosscut.parallel import ParallelMesh
from crosscut.parallel.collectives import from_all_ranks
from crosscut.planner import find_hardware, model_flops_per_token
from crosscut.training.precision import torch_dtype

_WARM_UP = 2
"""Number of matrix products that are run before the measurement starts."""
_SECONDS_TO_MEASURE = 0.1
"""Minimum duration of the measurement. A CPU without float16 instructions takes this long for one product of 512
rows."""


@dataclass(frozen=True, kw_only=True)
class PeakRate:
    """Peak rate of matrix products. Utilisation is the share of this rate that a run attains."""

    name: str
    flops_per_second: float
    """Peak rate of all ranks together."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Conversion of tokens and seconds into rates."""

    flops_per_token: float
    peak: PeakRate

    @classmethod
    def of(cls, run: ResolvedRun, mesh: ParallelMesh) -> "Throughput":
        """Create the conversion for the steps of a run. Every rank must call this method, because the ranks measure the
        peak rate together.
        """
        length = run.training.sequence_length
        return cls(
            flops_per_token=model_flops_per_token(run.model, length, mask_fraction=run.config.mask_fraction),
            peak=find_peak(run.precision, mesh),
        )

    def rates(self, seconds: float, *, num_tokens: int) -> dict[str, float | None]:
        """Return tokens per second, model FLOP/s and utilisation (0 to 1), if all ranks together train on `num_tokens`
        tokens in `seconds` seconds.

        The utilisation is None if the FLOP/s are above the peak. The peak of a CPU is measured once, when the run
        starts. If other programs use the cores at this moment, the result is not the peak, and a share of it would
        mean nothing.
        """
        tokens_per_second = num_tokens / seconds
        flops_per_second = tokens_per_second * self.flops_per_token
        utilisation = flops_per_second / self.peak.flops_per_second
        return {
            "seconds": seconds,
            "tokens_per_second": tokens_per_second,
            "model_flops_per_second": flops_per_second,
            "utilisation": utilisation if utilisation <= 1 else None,
        }


def find_peak(precision: str, mesh: ParallelMesh) -> PeakRate:
    """Return the published dense peak of all ranks' GPUs together. If a rank's GPU is unknown or a rank is on a CPU,
    return the matrix rate measured on all ranks at the same time. Every rank must call this function.
    """
    published = from_all_ranks(_published_peak(precision, mesh.device), mesh)
    known = [peak for peak in published if peak is not None]
    if len(known) == len(published):
        names = sorted({name for name, _ in known})
        name = f"{len(known)} x {' and '.join(names)}, published dense {precision} peak"
        return PeakRate(name=name, flops_per_second=sum(rate for _, rate in known))
    rates = from_all_ranks(measure_matrix_rate(mesh.device, torch_dtype(PRECISIONS[precision].compute)), mesh)
    together = f" on {len(rates)} ranks at once" if len(rates) > 1 else ""
    return PeakRate(name=f"{precision} matrix rate measured{together}", flops_per_second=sum(rates))


def _published_peak(precision: str, device: torch.device) -> tuple[str, float] | None:
    if device.type != "cuda":
        return None
    hardware = find_hardware(torch.cuda.get_device_name(device))
    rate = hardware.flops.get(precision) if hardware else None
    return (hardware.name, rate) if hardware and rate else None


@torch.no_grad()
def measure_matrix_rate(device: torch.device, dtype: torch.dtype, *, size: int = 0) -> float:
    """Measure the FLOP/s that square matrix products attain on this rank's device for `_SECONDS_TO_MEASURE` seconds.

    The result is the mean rate of all products, not the rate of the fastest product. Ranks that share a core take
    turns, so the fastest product of each rank has the core to itself. The sum of these rates over the ranks would count
    the core once per rank. `size` is the number of rows; 0 means 8192 on CUDA and 512 on CPUs.
    """
    size = size or (8192 if device.type == "cuda" else 512)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    for _ in range(_WARM_UP):
        ORDINARY.output(a, b)
    synchronize(device)
    start, seconds, products = time.perf_counter(), 0.0, 0
    while seconds < _SECONDS_TO_MEASURE:
        ORDINARY.output(a, b)
        synchronize(device)
        products += 1
        seconds = time.perf_counter() - start
    return products * 2.0 * size**3 / seconds


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
