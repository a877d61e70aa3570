"""Pictures of the experts' loads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosscut.training.loads.picture import plot_loads


def write(folder: Path, num_rows: int, layers: int, experts: int, idle: tuple[int, int] | None = None) -> None:
    drawn = np.random.default_rng(0)
    rows = []
    for step in range(1, num_rows + 1):
        loads = drawn.integers(1, 100, (layers, experts))
        if idle:
            loads[idle] = 0
        names = [f"blocks.{layer}.mlp" for layer in range(layers)]
        entropy = dict.fromkeys(names, 0.5)
        rows.append({"step": step, "loads": dict(zip(names, loads.tolist(), strict=True)), "entropy": entropy})
    (folder / "experts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are drawn."""
    from matplotlib import pyplot

    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    return figures


def test_a_model_with_many_layers_shows_those_with_idle_experts(tmp_path: Path, figure: list[Any]) -> None:
    write(tmp_path, 150, 30, 16, idle=(7, 3))
    plot_loads(tmp_path)
    assert (tmp_path / "experts.png").read_bytes().startswith(b"\x89PNG")
    (drawn,) = figure
    maps = {axes.get_title(loc="left"): axes for axes in drawn.axes if axes.collections and axes.get_title(loc="left")}
    assert len(maps) == 12
    assert {"layer 0", "layer 7"} <= maps.keys()
    values = maps["layer 7"].collections[0].get_array()
    assert values.shape == (16, 120)
    assert values.mask[3].all()
    assert values.mask.sum() == 120
    np.testing.assert_allclose(values.filled(0).mean(0), 1.0)


@pytest.mark.parametrize(("rows", "layers", "experts"), [(1, 1, 1), (2, 5, 2)])
def test_small_runs_have_a_picture(tmp_path: Path, rows: int, layers: int, experts: int) -> None:
    write(tmp_path, rows, layers, experts)
    plot_loads(tmp_path)
    assert (tmp_path / "experts.png").exists()


def test_a_run_without_experts_has_none(tmp_path: Path) -> None:
    plot_loads(tmp_path)
    assert not list(tmp_path.iterdir())
