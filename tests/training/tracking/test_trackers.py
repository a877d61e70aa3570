import sys
import types
from pathlib import Path
from typing import Any

import pytest

from crosscut.config import ConfigError
from crosscut.config.system.extras import install_packages
from crosscut.training.tracking.metrics import Metrics
from crosscut.training.tracking.trackers import TRACKERS, TrackerKind, require_trackers

VALUES = {
    "loss": 2.5, "gradient_norm": float("inf"), "learning_rate": 1e-3, "seconds": 0.5, "tokens_per_second": 100.0,
    "model_flops_per_second": 1e9, "utilisation": None,
}  # fmt: skip


class Own:
    """Tracker of the tests. It fails at step 3."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self.calls: list[Any] = [(folder, first_step)]

    def figures(self, step, values):
        if step == 3:
            raise ConnectionError("no route to the server")
        self.calls.append((step, dict(values)))

    def restart(self, first_step):
        self.calls.append(first_step)

    def close(self):
        self.calls.append("closed")


def test_a_tracker_of_the_users_gets_finite_figures_and_may_fail(tmp_path, monkeypatch, capsys):
    made = []
    kind = TrackerKind("json", lambda *place: made.append(Own(*place)) or made[0], "Some figures are lost")
    monkeypatch.setitem(TRACKERS, "own", kind)
    require_trackers(["tensorboard", "own"])
    (tmp_path / "run").mkdir()
    with Metrics(tmp_path / "run", num_steps=9, start=1, active=True, trackers=["own"]) as metrics:
        for step in (2, 3, 3, 4):
            metrics.step(step, VALUES)
        metrics.rewind(2)
    figures = {name: value for name, value in VALUES.items() if name not in ("gradient_norm", "utilisation")}
    assert made[0].calls == [(tmp_path / "run", 2), (2, figures), (4, figures), 3, "closed"]
    told = capsys.readouterr().out
    assert told.count("Some figures are lost: no route to the server. Training continues.") == 1
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_tracker_that_cannot_begin_does_not_stop_the_run(tmp_path, monkeypatch, capsys):
    def fail(*_: object) -> Own:
        raise RuntimeError("not logged in")

    monkeypatch.setitem(TRACKERS, "own", TrackerKind("json", fail, "Some figures are lost"))
    with Metrics(tmp_path, num_steps=9, start=0, active=True, trackers=["own"]) as metrics:
        metrics.step(1, VALUES)
    assert capsys.readouterr().out.count("Some figures are lost: not logged in. Training continues.") == 1


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_calls_of_a_package_that_logs(tmp_path, monkeypatch, name):
    """The calls are those that the package's documentation describes: neither package is installed here."""
    calls: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda values, step=None: calls.append((values, step)), finish=lambda: calls.append("finished")
    )
    module = types.SimpleNamespace(init=lambda **settings: calls.append(settings) or run)
    monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "config.toml").write_text("[training]\nsteps = 9\n")
    with Metrics(tmp_path, num_steps=9, start=0, active=True, trackers=[name]) as metrics:
        metrics.step(1, {**VALUES, "gradient_norm": 1.0})
        metrics.rewind(0)
    settings = {"project": "crosscut", "name": tmp_path.name, "config": {"training": {"steps": 9}}}
    figures = {key: value for key, value in VALUES.items() if value is not None}
    assert calls == [settings, ({**figures, "gradient_norm": 1.0}, 1), "finished"]


def test_a_tracker_that_is_unknown_or_not_installed_is_refused(monkeypatch):
    with pytest.raises(ConfigError) as unknown:
        require_trackers(["mlflow"])
    assert (
        str(unknown.value) == "`output.trackers` must have names among tensorboard, trackio, wandb, but has `mlflow`."
    )
    monkeypatch.setitem(TRACKERS, "wandb", TrackerKind("no_such_package", Own, ""))
    with pytest.raises(ConfigError) as missing:
        require_trackers(["wandb"])
    assert str(missing.value) == (
        "`output.trackers` must name installed packages, but `no_such_package` is not installed. Install it with "
        f"`{install_packages('no_such_package')}`, or remove `wandb`."
    )
