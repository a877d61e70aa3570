"""Precisions of a run and their element types. Element types are strings with torch's names, because neither `config`
nor `planner` may import torch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from crosscut.config.checks import Choice

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}

FLOAT8_MULTIPLE = 16
"""Every dimension of a float8 product must be a multiple of this number, because the hardware requires that the size of
a row is a multiple of 16 bytes.
"""


class Precision(Choice):
    """The choices for `training.precision`."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8 = "float8"
    FLOAT64 = "float64"


class ElementTypes(NamedTuple):
    """Element types of a run. Each value is torch's name of a type, such as "bfloat16"."""

    compute: str
    """Element type of activations and of the results of matrix products."""

    accumulation: str
    """Element type of parameters, gradients, optimizer state and the sums in the loss."""

    products: str
    """Element type of the factors in the layers' matrix products."""

    @property
    def muon(self) -> str:
        """Element type in which Muon gathers and orthogonalizes matrices: bfloat16 if activations are bfloat16, and
        otherwise the type of the parameters. float16 is not used, because its range is too small for gradients without
        a loss scale.
        """
        return self.compute if self.compute == Precision.BFLOAT16 else self.accumulation

    @property
    def muon_bytes(self) -> int:
        """Bytes per element of a matrix that Muon gathers and orthogonalizes."""
        return _BYTES[self.muon]

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of an activation."""
        return _BYTES[self.compute]

    @property
    def accumulation_bytes(self) -> int:
        """Bytes per element of a parameter or gradient."""
        return _BYTES[self.accumulation]


PRECISIONS: Mapping[str, ElementTypes] = MappingProxyType(
    {
        Precision.FLOAT32: ElementTypes(compute="float32", accumulation="float32", products="float32"),
        Precision.BFLOAT16: ElementTypes(compute="bfloat16", accumulation="float32", products="bfloat16"),
        Precision.FLOAT16: ElementTypes(compute="float16", accumulation="float32", products="float16"),
        Precision.FLOAT8: ElementTypes(compute="bfloat16", accumulation="float32", products="float8_e4m3fn"),
        Precision.FLOAT64: ElementTypes(compute="float64", accumulation="float64", products="float64"),
    }
)
"""Element types of every precision except `auto`."""

OF_MODELS = tuple(str(name) for name, precision in PRECISIONS.items() if precision.products == precision.compute)
"""Precisions in which a model can run inference. Float8 is missing because it is only for products during training."""


def precision_on(device: str, *, has_bfloat16: bool = True) -> Precision:
    """Precision that `training.precision = "auto"` selects on a kind of device ("cuda", or any other name for the CPU).
    This is the fastest precision that is known to train as well as float32.
    """
    if device != "cuda":
        return Precision.FLOAT32
    return Precision.BFLOAT16 if has_bfloat16 else Precision.FLOAT16
