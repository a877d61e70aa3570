"""A teacher that a run has trained."""

from pathlib import Path

import pytest

from tests.ranks import RankPool
from tests.training.conftest import tiny_run
from tests.training.jobs import whole_run


@pytest.fixture(scope="session")
def teacher(ranks: RankPool, tokens_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run whose model is wider than that of `tiny_run`."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    shape = ("model.hidden_size=96", "model.num_heads=4", "model.mlp_size=128", "model.num_layers=1")
    ranks.run(1, whole_run, tiny_run(tokens_folder, folder, *shape, "training.steps=3", "optimizer.warmup_steps=1"))
    return folder
