"""Precisions that the device must have, and the one that it is given."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from crosscut.config import ConfigError, load_run
from crosscut.config.conventions import CONFIG_FILE
from crosscut.training.job import run_training
from crosscut.training.precision import fast_precision, require_imitable_precision, require_precision
from crosscut.training.step import Trainer
from tests.refusals import refusal
from tests.training.jobs import loop, parts


def test_float8_is_refused_where_the_device_does_not_have_it(run_with):
    assert refusal(ConfigError, run_training, run_with("training.precision=float8", "training.device=cpu")) == (
        '`training.precision` must be a precision that the device supports, but is "float8". float8 needs a GPU of '
        "compute capability 8.9 or higher (Ada, Hopper or later), but the device is the CPU. Set "
        'training.precision="bfloat16".'
    )


NO_FLOAT8 = (
    '`--precision` must be a precision that the device supports, but is "float8". float8 needs a GPU of compute '
    "capability 8.9 or higher (Ada, Hopper or later), but the device is {}. Use --precision bfloat16{}."
)


def test_float8_that_is_imitated_is_enough_to_verify_with():
    require_imitable_precision("float8", torch.device("cpu"))
    with (
        mock.patch.object(torch, "_scaled_mm", side_effect=NotImplementedError("not for the CPU")),
        pytest.raises(ConfigError) as error,
    ):
        require_imitable_precision("float8", torch.device("cpu"))
    assert str(error.value) == NO_FLOAT8.format("the CPU", "")


def test_a_gpu_without_float8_does_not_imitate_it():
    gpu = torch.device("cuda", 0)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)),
        mock.patch.object(torch.cuda, "get_device_name", return_value="A100"),
        pytest.raises(ConfigError) as error,
    ):
        require_imitable_precision("float8", gpu)
    elsewhere = ', or verify on the CPU with training.device="cpu"'
    assert str(error.value) == NO_FLOAT8.format("A100", elsewhere)
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)):
        require_imitable_precision("float8", gpu)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_other_precisions_run_anywhere(precision):
    require_precision(precision, torch.device("cpu"))
    require_imitable_precision(precision, torch.device("cpu"))


def test_a_processor_trains_in_float32_unless_another_type_is_set():
    assert fast_precision(torch.device("cpu")) == "float32"


@pytest.mark.parametrize(("capability", "precision"), [((9, 0), "bfloat16"), ((8, 0), "bfloat16"), ((7, 5), "float16")])
def test_a_gpu_trains_in_the_half_precision_that_it_has(capability, precision):
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        assert fast_precision(torch.device("cuda", 0)) == precision


def _trained(run) -> tuple[str, str]:
    trainer: Trainer = parts(run)[0]
    loop(run)
    saved = load_run(Path(run.output.folder) / CONFIG_FILE)
    return trainer.run.training.precision, saved.training.precision


def test_a_run_saves_which_precision_it_was(ranks, run_with):
    run = run_with("training.steps=3")
    assert run.training.precision == "auto"
    assert ranks.run(1, _trained, run)[0] == ("float32", "float32")
