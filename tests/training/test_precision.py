"""Precisions that the device must have."""

import pytest
import torch

from crosscut.config import ConfigError
from crosscut.training.precision import require_precision
from crosscut.training.run import run_training


def test_float8_is_refused_where_the_device_does_not_have_it(run_with) -> None:
    with pytest.raises(ConfigError) as error:
        run_training(run_with("training.precision=float8", "training.device=cpu"))
    assert str(error.value) == (
        '`training.precision` must be one that the device multiplies in, but is "float8": GPUs from Ada and Hopper on '
        '(compute capability 8.9) do, the CPU does not. Set training.precision="bfloat16".'
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_other_precisions_run_anywhere(precision: str) -> None:
    require_precision(precision, torch.device("cpu"))
