"""The named peaks that a run's FLOP/s are measured against.

A peak is the rate of dense matrix products that the maker states. Data sheets since the A100 print the rate with
two-in-four sparsity, which no dense training reaches and which is twice as high: the H100's 1979 TFLOP/s in bfloat16
are 989 here. A device that is not in the table has no peak, rather than a guessed one.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_GB = 10**9
_TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One accelerator."""

    name: str
    """The name it is commonly called by."""

    device_names: str
    """Regular expression for all of a device's name as torch gives it, without the maker's."""

    memory: int
    """Bytes, as the maker names them, in GB of 10^9. What torch reports is a few percent more: the chips hold binary
    GB."""

    flops: Mapping[str, float]
    """Dense matrix FLOP/s by precision: `float64`, `float32` (true float32), `tf32`, `float16`, `bfloat16`. A precision
    that its matrix units lack is missing."""

    source: str
    """Where the figures are stated."""


def _peaks(**teraflops: float) -> Mapping[str, float]:
    return MappingProxyType({precision: rate * _TERA for precision, rate in teraflops.items()})


_V100 = _peaks(float64=7.8, float32=15.7, float16=125)
_A100 = _peaks(float64=19.5, float32=19.5, tf32=156, float16=312, bfloat16=312)
_HOPPER_SXM = _peaks(float64=67, float32=67, tf32=494.5, float16=989, bfloat16=989)

HARDWARE: tuple[Hardware, ...] = (
    Hardware(
        name="V100 SXM3 32 GB (DGX-2H)",
        device_names="V100-SXM3-32GB-H",
        memory=32 * _GB,
        # The DGX-2H runs its V100 at a higher clock, and so all its rates are higher by the same factor.
        flops=_peaks(float64=8.1, float32=16.3, float16=130),
        source="paper, sections 1 and 5.1.1: 39 TFLOP/s are 30% of peak; NVIDIA DGX-2H: 2.1 PFLOP/s in 16 GPUs",
    ),
    Hardware(
        name="V100 SXM 32 GB",
        device_names="V100-SXM[23]-32GB",
        memory=32 * _GB,
        flops=_V100,
        source="NVIDIA Tesla V100 data sheet",
    ),
    Hardware(
        name="V100 SXM2 16 GB",
        device_names="V100-SXM2-16GB",
        memory=16 * _GB,
        flops=_V100,
        source="NVIDIA Tesla V100 data sheet",
    ),
    Hardware(
        name="A100 40 GB",
        device_names="A100-(SXM4?|PCIE)-40GB",
        memory=40 * _GB,
        flops=_A100,
        source="NVIDIA A100 data sheet, dense rates",
    ),
    Hardware(
        name="A100 80 GB",
        device_names="A100-SXM4?-80GB|A100 80GB PCIe",
        memory=80 * _GB,
        flops=_A100,
        source="NVIDIA A100 80GB data sheet, dense rates",
    ),
    Hardware(
        name="H100 SXM",
        device_names="H100 80GB HBM3",
        memory=80 * _GB,
        flops=_HOPPER_SXM,
        source="NVIDIA H100 data sheet, half of the rates with sparsity",
    ),
    Hardware(
        name="H100 PCIe",
        device_names="H100 PCIe",
        memory=80 * _GB,
        flops=_peaks(float64=51, float32=51, tf32=378, float16=756, bfloat16=756),
        source="NVIDIA H100 data sheet, half of the rates with sparsity",
    ),
    Hardware(
        name="H200 SXM",
        device_names="H200",
        memory=141 * _GB,
        flops=_HOPPER_SXM,
        source="NVIDIA H200 data sheet, half of the rates with sparsity",
    ),
    Hardware(
        name="B200 SXM",
        device_names="B200",
        memory=180 * _GB,
        flops=_peaks(float64=37, float32=75, tf32=1125, float16=2250, bfloat16=2250),
        source="NVIDIA HGX B200 data sheet, an eighth of the system, half of the rates with sparsity",
    ),
)


def find_hardware(device_name: str) -> Hardware | None:
    """The hardware of a `torch.cuda.get_device_name()`, or None where no peak is known for it.

    Another form of the same chip (`NVIDIA H200 NVL`, `NVIDIA GB200`) or a part of one (`... MIG 3g.40gb`) runs at
    another rate, so only a full match counts.
    """
    name = re.sub(r"^(NVIDIA|Tesla)\s+", "", device_name.strip())
    return next((hardware for hardware in HARDWARE if re.fullmatch(hardware.device_names, name)), None)
