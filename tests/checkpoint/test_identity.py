"""Settings that a run must share with the checkpoint that it continues."""

from pathlib import Path

import pytest
import torch

from crosscut.checkpoint import latest_good_checkpoint, require_identity
from crosscut.config import CheckpointError
from crosscut.launch import process_group
from crosscut.training.resuming import defaults_of_identity
from tests.checkpoint.states import save_steps


def test_a_setting_that_is_newer_than_the_checkpoint_must_have_its_default(tmp_path: Path) -> None:
    with process_group(torch.device("cpu")):
        save_steps(tmp_path, [1])
    folder = latest_good_checkpoint(tmp_path).folder
    defaults = defaults_of_identity()
    assert require_identity(folder, {"model.mlp_pattern": ()}, defaults=defaults).step
    assert require_identity(folder, {"optimizer.matrices": "adamw"}, defaults=defaults).step
    with pytest.raises(CheckpointError, match=r"`optimizer.matrices` must be 'adamw' as .* is 'muon'"):
        require_identity(folder, {"optimizer.matrices": "muon"}, defaults=defaults)
    with pytest.raises(CheckpointError, match=r"must be \[\] as in the checkpoint .* is \['relu2'\]"):
        require_identity(folder, {"model.mlp_pattern": ("relu2",)}, defaults=defaults)
