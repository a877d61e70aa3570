import errno
import json
import math
import os
import sys
import threading
from contextlib import suppress

import pytest

from crosscut.evaluation import Score
from crosscut.evaluation.progress import Bar, progress
from crosscut.logbook.contents import read_metrics
from crosscut.logbook.rows import is_header
from crosscut.logbook.schema import METRICS_FILE
from crosscut.training.tracking.metrics import Metrics
from tests.disks import small_disk
from tests.terminal import Terminal

VALUES = {
    "loss": 2.5, "gradient_norm": 1.5, "learning_rate": 1e-3, "seconds": 0.5, "tokens_per_second": 100.0,
    "model_flops_per_second": 1e9, "utilisation": 0.5,
}  # fmt: skip


def note(folder, steps, start=0) -> None:
    with Metrics(folder, num_steps=10, start=start, active=True) as metrics:
        for step in steps:
            metrics.step(step, VALUES)


def test_resuming_drops_the_rows_after_the_checkpoint(tmp_path):
    note(tmp_path, range(1, 6))
    note(tmp_path, range(4, 7), start=3)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_half_written_row_of_a_killed_run_is_passed_over(tmp_path):
    note(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    note(tmp_path, [3], start=2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize(
    "row",
    ['{"step": -1}', f'{{"step": {10**400}}}', f'{{"step": 2, "loss": {10**400}}}', '{"step": 2, "loss": -Infinity}'],
    ids=["negative step", "large step", "large loss", "infinite loss"],
)
def test_a_row_with_a_number_that_no_run_writes_is_passed_over(tmp_path, row):
    note(tmp_path, [1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(row + "\n")
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def test_a_new_run_starts_an_empty_file(tmp_path):
    note(tmp_path, range(1, 3))
    note(tmp_path, [1])
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


def test_the_time_left_does_not_count_the_first_step(tmp_path, monkeypatch, capsys):
    ends = {3: 600.0, 4: 620.0, 5: 640.0}
    now = [0.0]
    monkeypatch.setattr("crosscut.training.tracking.metrics.time.monotonic", lambda: now[0])
    with Metrics(tmp_path, num_steps=10, start=2, active=True) as metrics:
        for step, now[0] in ends.items():
            metrics.step(step, VALUES)
    first, second, third = (line for line in capsys.readouterr().out.splitlines() if "Training" in line)
    assert "left" not in first
    assert "step 4/10  0:02:00 left  " in second
    assert "step 5/10  0:01:40 left  " in third


def test_a_full_disk_loses_rows_but_neither_the_run_nor_a_traceback(tmp_path, capsys):
    """The files of the metrics and of TensorBoard are written in the caller's thread."""
    before = set(threading.enumerate())
    with small_disk(tmp_path / "disk", 64) as disk:
        with Metrics(disk, num_steps=500, start=0, active=True) as metrics:
            metrics.step(1, VALUES)
            assert set(threading.enumerate()) - before <= {metrics._display._bar.live._refresh_thread}
            with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
            for step in range(2, 200):
                metrics.step(step, VALUES)
        assert read_metrics(disk)[0]["step"] == 1
    out, errors = capsys.readouterr()
    assert (
        out.count("Some rows of `metrics.jsonl` cannot be written: No space left on device. Training continues.") == 1
    )
    assert "Traceback" not in out + errors


def test_a_full_disk_for_tensorboard_is_told_of_tensorboard(tmp_path, capsys, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("crosscut.training.tracking.board.Board.figures", full)
    with Metrics(tmp_path, num_steps=3, start=0, active=True) as metrics:
        metrics.step(1, VALUES)
        metrics.step(2, VALUES)
    out = capsys.readouterr().out
    assert (
        out.count("Some scalars in `tensorboard` cannot be written: No space left on device. Training continues.") == 1
    )
    assert "metrics.jsonl" not in out
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_numbers_that_are_none_are_null(tmp_path):
    with Metrics(tmp_path, num_steps=1, start=0, active=True) as metrics:
        metrics.validation(0, Score(loss=float("nan"), num_tokens=8, num_bytes=20))
    figures = ("validation_loss", "validation_perplexity", "validation_bits_per_byte")
    assert read_metrics(tmp_path) == [{"step": 0, **dict.fromkeys(figures)}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_the_loss_of_labels_has_no_perplexity(tmp_path, capsys):
    with Metrics(tmp_path, num_steps=1, start=0, active=True) as metrics:
        metrics.validation(0, Score(loss=0.5, num_tokens=8, of_labels=True))
    assert read_metrics(tmp_path)[0]["validation_perplexity"] is None
    assert capsys.readouterr().out.strip() == "step      0  validation loss 0.5000"


def test_only_the_first_rank_writes(tmp_path):
    with Metrics(tmp_path, num_steps=1, start=0, active=False) as metrics:
        metrics.step(1, VALUES)
        metrics.validation(1, Score(loss=1.0, num_tokens=8))
    assert not list(tmp_path.iterdir())


def test_lines_tell_loss_norm_rate_and_speed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("crosscut.training.tracking.metrics._SECONDS_BETWEEN_LINES", 0.0)
    note(tmp_path, [1, 2])
    out = capsys.readouterr().out
    for expected in ("2/10", "loss 2.5000", "norm 1.50", "rate 1.0e-03", "100 tokens/s", "(50%)", "left"):
        assert expected in out, expected


def test_a_line_gives_no_share_of_a_peak_that_was_exceeded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("crosscut.training.tracking.metrics._SECONDS_BETWEEN_LINES", 0.0)
    with Metrics(tmp_path, num_steps=2, start=0, active=True) as metrics:
        metrics.step(1, {**VALUES, "utilisation": None})
    line = capsys.readouterr().out.strip()
    assert line.endswith("100 tokens/s  1 GFLOP/s")
    (row,) = read_metrics(tmp_path)
    assert (row["utilisation"], row["loss"]) == (None, 2.5)


def test_lines_tell_the_loss_scale_where_there_is_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("crosscut.training.tracking.metrics._SECONDS_BETWEEN_LINES", 0.0)
    note(tmp_path, [1])
    assert "scale" not in capsys.readouterr().out
    skipped = {**VALUES, "loss": float("inf"), "gradient_norm": float("nan"), "loss_scale": 65536.0, "skipped": 1}
    with Metrics(tmp_path, num_steps=10, start=0, active=True) as metrics:
        metrics.step(1, skipped)
        metrics.step(2, {**VALUES, "loss_scale": 32768.0, "skipped": 0})
    out = capsys.readouterr().out
    assert "scale 65536 (skipped)  100 tokens/s" in out
    assert "scale 32768  100 tokens/s" in out
    assert [row["loss"] for row in read_metrics(tmp_path)] == [None, 2.5]


def test_a_step_that_was_validated_before_the_stop_keeps_that_row(tmp_path):
    for start, loss in ((0, 1.0), (3, 2.0)):
        with Metrics(tmp_path, num_steps=10, start=start, active=True) as metrics:
            metrics.validation(3, Score(loss=loss, num_tokens=8))
            metrics.validation(4, Score(loss=loss, num_tokens=8))
    assert [(row["step"], row["validation_loss"]) for row in read_metrics(tmp_path)] == [(3, 1.0), (4, 2.0)]


def test_a_validation_is_a_row_and_a_line(tmp_path, capsys):
    """Eight tokens of probability 1/2 each, 20 bytes long."""
    with Metrics(tmp_path, num_steps=10, start=0, active=True) as metrics:
        metrics.validation(4, Score(loss=math.log(2), num_tokens=8, num_bytes=20))
        metrics.validation(5, Score(loss=math.log(2), num_tokens=8))
    first, second = read_metrics(tmp_path)
    assert first == pytest.approx(
        {"step": 4, "validation_loss": math.log(2), "validation_perplexity": 2.0, "validation_bits_per_byte": 0.4}
    )
    assert second["validation_bits_per_byte"] is None
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines() if "validation" in line] == [
        "step      4  validation loss 0.6931  perplexity 2.00  bits per byte 0.4000",
        "step      5  validation loss 0.6931  perplexity 2.00",
    ]


def test_scores_are_a_row_and_a_line(tmp_path, capsys):
    figures = {"wikitext103_perplexity": 19.31, "wikitext103_loss_per_token": 2.69, "lambada_accuracy": 0.4518}
    with Metrics(tmp_path, num_steps=10, start=0, active=True) as metrics:
        metrics.scores(4, {**figures, "text_perplexity": float("inf")})
    assert read_metrics(tmp_path) == [{"step": 4, **figures, "text_perplexity": None}]
    line = "step      4  wikitext103 perplexity 19.31, lambada accuracy 45.18%, text perplexity inf"
    assert line in capsys.readouterr().out


def test_the_bar_gives_way_to_another_and_comes_back(tmp_path, monkeypatch):
    terminal = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    for name, value in {"TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    with Metrics(tmp_path, num_steps=10, start=0, active=True) as metrics:
        metrics.step(4, VALUES)
        with metrics.aside():
            assert terminal.lines() == []
            with progress(Bar("lambada", shown=True), 100) as advance:
                advance(40)
                assert [line.split()[0] for line in terminal.lines()] == ["lambada"]
            assert terminal.lines() == []
        metrics.scores(4, {"lambada_accuracy": 0.5})
        metrics.step(5, VALUES)
    scores, bar = terminal.lines()
    assert scores == "step      4  lambada accuracy 50.00%"
    assert bar.startswith("Training  step 5/10")


@pytest.mark.parametrize(
    "line",
    [
        "7", '"step"', "[]", '{"loss": 1.0}', '{"step": "x"}', '{"step": 3, "loss": [1]}', "[" * 9999,
        '{"step": ' + "1" * 5000 + "}", '{"step": 3, "\\ud800": 1}', '{"step": 3}' + " " * (1 << 20),
    ],
    ids=lambda line: line[:20].strip(),
)  # fmt: skip
def test_lines_that_no_run_writes_are_left_out(tmp_path, line):
    (tmp_path / METRICS_FILE).write_text('{"step": 1, "loss": 2.0}\n' + line + '\n{"step": 2, "loss": null}\n')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}]
    with Metrics(tmp_path, num_steps=5, start=1, active=True):
        pass
    first, rest = (tmp_path / METRICS_FILE).read_text().split("\n", 1)
    assert is_header(json.loads(first))
    assert rest == '{"step": 1, "loss": 2.0}\n'


def test_tensorboard_shows_each_step_once_although_the_clock_was_set_back(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    note(tmp_path, range(1, 6))
    monkeypatch.setattr("crosscut.training.tracking.board.time.time", lambda: 1e9)  # years before the first start
    note(tmp_path, range(4, 7), start=3)
    note(tmp_path, range(6, 8), start=5)
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [event.step for event in read.Scalars("loss")] == [1, 2, 3, 4, 5, 6, 7]
