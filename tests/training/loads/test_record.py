"""Records of the experts' loads in the folders of real runs."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from crosscut.config import RunConfig
from crosscut.logbook.contents import read_loads
from crosscut.logbook.schema import LOADS_FILE
from crosscut.training.loads.record import LoadsRecord
from crosscut.training.loads.step_loads import StepLoads
from crosscut.training.loop import Loop
from crosscut.training.tracking.metrics import Metrics
from crosscut.verification.routing import Forced, force
from tests.ranks import RankPool
from tests.training.jobs import loop, parts, rows_of, whole_run

EXPERTS = (
    'model.layers=["attention swiglu","attention experts"]', "model.num_layers=4", "model.experts.number=4",
    "model.experts.size=32", "training.precision=float64", "model.dropout=0.0", "output.sample_tokens=0",
)  # fmt: skip
EXPERT_RANKS = ("layout.data=2", "layout.expert=2")
PIPELINE = ("layout.pipeline=2", "training.micro_batch_size=2")


def test_rows_are_the_same_on_all_layouts_and_after_a_resume(
    ranks: RankPool, run_with: Callable[..., RunConfig]
) -> None:
    """Trained on expert ranks, and again from step 3 on in a pipeline."""
    run = run_with(*EXPERTS, *EXPERT_RANKS)
    ranks.run(2, loop, run)
    rows = read_loads(Path(run.output.folder))
    metrics = [row for row in rows_of(run) if "largest_load" in row]
    tokens = run.training.batch_size * run.training.sequence_length
    for row, figures in zip(rows, metrics, strict=True):
        assert list(row["loads"]) == list(row["entropy"]) == ["blocks.1.mlp", "blocks.3.mlp"]
        assert [sum(loads) for loads in row["loads"].values()] == [2 * tokens] * 2
        largest = max(max(loads) * 4 / sum(loads) for loads in row["loads"].values())
        assert figures["largest_load"] == pytest.approx(largest, rel=1e-12)
        assert figures["router_entropy"] == pytest.approx(sum(row["entropy"].values()) / 2, abs=1e-6)
    ranks.run(2, loop, run_with(*EXPERTS, *PIPELINE), Path(run.checkpoints_folder) / "step-00000003")
    again = read_loads(Path(run.output.folder))
    assert [row["step"] for row in again] == [1, 2, 3, 4, 5, 6]
    assert [row["loads"] for row in again] == [row["loads"] for row in rows]


def test_the_report_has_a_picture_and_a_line_about_the_experts(
    ranks: RankPool, run_with: Callable[..., RunConfig]
) -> None:
    run = run_with(*EXPERTS)
    printed, folder = ranks.run(1, whole_run, run)[0], Path(run.output.folder)
    last = next(row for row in reversed(rows_of(run)) if "largest_load" in row)
    assert (folder / "experts.png").read_bytes().startswith(b"\x89PNG")
    assert "loss.png, experts.png, metrics.jsonl, experts.jsonl" in printed
    summary = json.loads((folder / "summary.json").read_text())["experts"]
    assert summary == {**{name: last[name] for name in ("largest_load", "router_entropy")}, "collapses": 0}
    assert "over the last 10% of the steps; no collapse" in " ".join(printed.replace("│", "").split())


def test_a_collapse_is_told_in_the_terminal_and_the_metrics(
    ranks: RankPool, run_with: Callable[..., RunConfig], capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_with(*EXPERTS, "training.steps=4", "training.batch_size=64", "training.idle_expert_steps=2")
    printed = ranks.run(1, collapsed_run, run)[0]
    message = "collapse: experts 2, 3 of layer 1; experts 2, 3 of layer 3: no token for 2 steps. In a new run,"
    assert printed.count("collapse:") == printed.count(message) == 1
    assert [(row["step"], row["idle_layer"], row["idle_expert"]) for row in rows_of(run) if "idle_expert" in row] == [
        (2, 1, 2), (2, 1, 3), (2, 3, 2), (2, 3, 3)
    ]  # fmt: skip


def collapsed_run(run: RunConfig) -> str:
    """Train with all tokens on two experts. Returns the output."""
    trainer, batches = parts(run)
    force(trainer.model, Forced.COLLAPSED)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        Loop(trainer, batches).train()
    return printed.getvalue()


def loads_of(step: int) -> StepLoads:
    return StepLoads(("blocks.0.mlp",), torch.tensor([[step, 1, 0.5]]).double())


def recorded(folder: Path, steps: range, num_steps: int = 1200, start: int = 0) -> list[int]:
    file = LoadsRecord(folder, num_steps=num_steps, start=start)
    for step in steps:
        file.step(step, loads_of(step))
    file.file.close()
    return [row["step"] for row in read_loads(folder)]


def test_a_long_run_records_every_nth_step_and_the_last(tmp_path: Path) -> None:
    assert recorded(tmp_path, range(1, 1201)) == list(range(3, 1201, 3))
    assert recorded(tmp_path, range(1, 1002), 1001)[-2:] == [999, 1001]


def test_a_resumed_or_rolled_back_run_drops_later_rows(tmp_path: Path) -> None:
    assert recorded(tmp_path, range(1, 11), 10) == list(range(1, 11))
    assert recorded(tmp_path, range(4, 6), 10, start=3) == [1, 2, 3, 4, 5]
    file = LoadsRecord(tmp_path, num_steps=10, start=5)
    file.step(6, loads_of(6))
    file.file.rewind(2)
    file.step(3, loads_of(3))
    file.file.close()
    assert [row["step"] for row in read_loads(tmp_path)] == [1, 2, 3]


def test_metrics_roll_back_the_loads_too(tmp_path: Path) -> None:
    with Metrics(tmp_path, num_steps=9, start=0, active=True) as metrics:
        for step in (1, 2, 3):
            metrics.loads(step, loads_of(step))
        metrics.rewind(1)
        metrics.loads(2, loads_of(7))
    assert [row["loads"]["blocks.0.mlp"] for row in read_loads(tmp_path)] == [[1, 1], [7, 1]]


def test_loads_that_do_not_fit_on_the_disk_end_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / LOADS_FILE).mkdir()
    with Metrics(tmp_path, num_steps=9, start=0, active=True) as metrics:
        metrics.loads(1, loads_of(1))
        metrics.loads(2, loads_of(2))
    assert capsys.readouterr().out.count("Some rows of `experts.jsonl` cannot be written: Is a directory.") == 1


ROW = {"step": 2, "loads": {"blocks.0.mlp": [3, 4]}, "entropy": {"blocks.0.mlp": 0.5}}


@pytest.mark.parametrize(
    "change",
    [
        {"loads": {}}, {"loads": {"blocks.0.mlp": [3]}}, {"loads": {"blocks.0.mlp": [3, -1]}},
        {"loads": {"blocks.0.mlp": [3, 10**400]}}, {"loads": {"blocks.0.mlp": 7}}, {"loads": {"blocks.1.mlp": [1, 2]}},
        {"entropy": {"blocks.0.mlp": float("nan")}}, {"entropy": None}, {"step": -1}, {"step": True},
    ],
    ids=lambda change: json.dumps(change)[:40],
)  # fmt: skip
def test_a_row_that_no_run_writes_is_passed_over(tmp_path: Path, change: dict[str, Any]) -> None:
    lines = [json.dumps(ROW | change), json.dumps(ROW), '{"step": 3, "lo']
    (tmp_path / LOADS_FILE).write_text("\n".join(lines))
    assert read_loads(tmp_path) == [ROW]
