import json
import math
import os
import shutil
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from crosscut.config.system.folder_lock import LOCK_FILE, STALE, FolderLock
from crosscut.logbook import columns
from crosscut.logbook.following import ELAPSED, Mark, RunReader, RunState
from crosscut.logbook.objects import write_object
from crosscut.logbook.rows import RowFile, append_row, read_rows
from crosscut.logbook.schema import MEASUREMENTS_FILE, METRICS_FILE, RESTARTS_FILE, SAMPLES_FILE, SUMMARY_FILE
from crosscut.logbook.series import MOST_POINTS, Series
from crosscut.logbook.skips import Event, SampleSkip, SkipRecord


def row(step: int, loss: float | None = None, **more: float | None) -> dict[str, Any]:
    """Row of a training step."""
    loss = float(step) if loss is None else loss
    return {
        "step": step, "loss": loss, "gradient_norm": loss / 2, "learning_rate": 1e-3, "seconds": 0.5,
        "tokens_per_second": 100.0, "model_flops_per_second": 1e9, "utilisation": 0.5, "samples": 4 * step, **more,
    }  # fmt: skip


def losses(reader: RunReader) -> list[tuple[int, float | None]]:
    return reader.series["loss"].pairs() if "loss" in reader.series else []


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Folder of a run of three steps."""
    file = RowFile(tmp_path / METRICS_FILE)
    file.start(0)
    for step in (1, 2, 3):
        file.append(row(step))
    file.append({"step": 3, "validation_loss": 2.5, "validation_perplexity": None, "validation_bits_per_byte": None})
    file.close()
    return tmp_path


def test_figures_are_series_by_name(run):
    reader = RunReader(run)
    assert reader.poll()
    assert losses(reader) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert reader.series["samples"].pairs() == [(1, 4.0), (2, 8.0), (3, 12.0)]
    assert reader.series["validation_loss"].pairs() == [(3, 2.5)]
    assert reader.series["validation_perplexity"].pairs() == [(3, None)]
    assert reader.series[ELAPSED].pairs() == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert reader.step == 3


def test_only_new_bytes_are_read(run):
    reader, path = RunReader(run), run / METRICS_FILE
    reader.poll()
    assert reader.bytes_read == path.stat().st_size
    assert not reader.poll()
    assert reader.bytes_read == path.stat().st_size
    before = path.stat().st_size
    append_row(path, row(4))
    assert reader.poll()
    assert reader.bytes_read - before - (path.stat().st_size - before) <= 200, "and the first line"
    assert losses(reader)[-1] == (4, 4.0)


def test_a_line_without_its_end_is_shown_when_the_end_arrives(run):
    reader, line = RunReader(run), json.dumps(row(4)) + "\n"
    with (run / METRICS_FILE).open("a") as file:
        for part in (line[:1], line[1:30], line[30:-1]):
            file.write(part)
            file.flush()
            reader.poll()
            assert losses(reader)[-1] == (3, 3.0)
        file.write(line[-1])
        file.flush()
        reader.poll()
    assert losses(reader)[-1] == (4, 4.0)


def test_figures_that_are_not_finite_are_gaps(run):
    append_row(run / METRICS_FILE, {**row(4), "loss": None, "utilisation": None})
    with (run / METRICS_FILE).open("a") as file:
        file.write(json.dumps({**row(5), "loss": math.nan}) + "\n")  # no run writes this
        file.write('{"step": 6, "loss": "<b>"}\nno row\n[]\n')
    reader = RunReader(run)
    reader.poll()
    assert losses(reader)[2:] == [(3, 3.0), (4, None), (5, None)]


@pytest.mark.parametrize("anew", ["start", "rewind"])
def test_rows_that_a_rollback_or_a_resume_undoes_are_not_shown(run, anew):
    reader, file = RunReader(run), RowFile(run / METRICS_FILE)
    file.start(3)
    reader.poll()
    for loss in (70.0, 80.0):  # the second new file may have the inode of the first one
        getattr(file, anew)(1)
        for step in range(2, 9):
            file.append(row(step, loss))
    file.close()
    reader.poll()
    assert losses(reader) == [(1, 1.0), *((step, 80.0) for step in range(2, 9))]
    assert "validation_loss" not in reader.series


def test_a_new_file_with_the_old_inode_is_noticed_by_its_first_row(run):
    reader, path = RunReader(run), run / METRICS_FILE
    reader.poll()
    first = json.loads(path.read_text().splitlines()[0])
    lines = [{**first, "written_at": first["written_at"] + 1}, row(1), *(row(step, 9.0) for step in range(2, 9))]
    with path.open("r+") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
    reader.poll()
    assert losses(reader) == [(1, 1.0), *((step, 9.0) for step in range(2, 9))]


def test_steps_that_go_back_in_one_file_undo_the_rows_before(run):
    reader = RunReader(run)
    reader.poll()
    append_row(run / METRICS_FILE, row(2, 9.0))
    reader.poll()
    assert losses(reader) == [(1, 1.0), (2, 9.0)]
    assert reader.series["validation_loss"].pairs() == []


def test_a_folder_that_disappears_and_returns(run, tmp_path_factory):
    reader, copy = RunReader(run), tmp_path_factory.mktemp("copies") / "copy"
    reader.poll()
    run.rename(copy)
    assert reader.poll()
    assert (reader.state, reader.series) == (RunState.GONE, {})
    shutil.copytree(copy, run)
    reader.poll()
    assert losses(reader) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert RunReader(run / "missing").state is RunState.GONE


def test_events_are_marks(run):
    event = Event(spike_step=3, back_to=2, sequences=4, reason="loss 9, usually 3", file="01-step-000003.txt")
    SkipRecord(skips=(SampleSkip(2, 4),), events=(event,)).write(run)
    append_row(run / METRICS_FILE, {"step": 3, "hang_seconds": 31.0, "hang_rank": 1})
    append_row(run / METRICS_FILE, {"step": 2, "idle_layer": 1, "idle_expert": 7, "idle_steps": 100})
    append_row(run / RESTARTS_FILE, {"step": 1, "after": "data 2"})
    for step, layout in ((1, "tensor 2"), (2, "tensor 2"), (3, "data 2")):
        append_row(run / MEASUREMENTS_FILE, {"step": step, "layout": layout, "ranks": []})
    for name in ("step-00000002", "step-x", ".step-00000003.partial"):
        (run / "checkpoints" / name).mkdir(parents=True)
    reader = RunReader(run)
    reader.poll()
    assert reader.marks() == [
        Mark(1, "restart", "continued on data 2"),
        Mark(2, "checkpoint", "step-00000002"),
        Mark(2, "collapse", "expert 7 of layer 1 gets no tokens"),
        Mark(2, "rollback", "rollback from step 3: loss 9, usually 3"),
        Mark(3, "hang", "no progress for 31.0 s; the ranks wait for rank 1"),
        Mark(3, "layout", "tensor 2 before, data 2 from here"),
        Mark(3, "spike", "loss 9, usually 3"),
    ]
    assert reader.series["loss"].pairs() == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_samples_summary_and_settings_are_read_when_they_change(run):
    (run / "config.toml").write_text("[training]\nsteps = 3\n")
    append_row(run / SAMPLES_FILE, {"step": 2, "prompt": "It", "text": "It <b>was</b>"})
    reader = RunReader(run)
    reader.poll()
    assert reader.config == {"training": {"steps": 3}}
    assert [sample["text"] for sample in reader.samples] == ["It <b>was</b>"]
    assert reader.state is RunState.STOPPED
    write_object(run / SUMMARY_FILE, {"steps": 3})
    assert reader.poll()
    assert reader.state is RunState.FINISHED
    (run / "config.toml").write_text("[training")
    reader.poll()
    assert reader.notes["config.toml"].startswith("`config.toml` cannot be read: ")
    assert reader.config == {}


@pytest.mark.parametrize("name", [METRICS_FILE, SAMPLES_FILE, SUMMARY_FILE])
def test_a_file_of_a_newer_version_is_told_and_not_shown(run, name):
    rows = [{"step": 0, "version": 2, "written_at": 1.0}, {**row(1), "prompt": "", "text": ""}]
    text = json.dumps({"version": 2, "steps": 3}) if name == SUMMARY_FILE else "\n".join(map(json.dumps, rows)) + "\n"
    (run / name).write_text(text)
    reader = RunReader(run)
    reader.poll()
    assert reader.notes == {
        name: f"`{name}` is not shown: a newer Crosscut wrote it (version 2; this one reads version 1). Use that "
        "Crosscut."
    }
    assert not (reader.summary or reader.samples)
    assert losses(reader) == ([] if name == METRICS_FILE else [(1, 1.0), (2, 2.0), (3, 3.0)])


WRITER = """
import sys, time
from pathlib import Path
from crosscut.config.system.folder_lock import FolderLock
from crosscut.logbook.rows import RowFile
folder = Path(sys.argv[1])
with FolderLock(folder).held(print):
    file = RowFile(folder / "metrics.jsonl")
    file.start(0)
    for step in range(1, 10**6):
        file.append({"step": step, "loss": float(step), "gradient_norm": 1.0, "seconds": 0.1})
        time.sleep(0.001)
"""


def test_a_writer_that_is_killed(tmp_path, monkeypatch):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)])
    try:
        reader, deadline = RunReader(tmp_path), time.monotonic() + 60
        while reader.step < 50:
            assert time.monotonic() < deadline
            reader.poll()
            time.sleep(0.01)
        assert reader.state is RunState.RUNNING
    finally:
        writer.kill()
        writer.wait()
    assert reader.state is RunState.KILLED
    reader.poll()
    assert [step for step, _ in losses(reader)] == list(range(1, reader.step + 1))
    # A copy of the folder on another machine shows the time of the lock only.
    monkeypatch.setattr("crosscut.config.system.folder_lock.machine_identity", lambda: "another machine")
    old = time.time() - 2 * STALE
    os.utime(tmp_path / LOCK_FILE, (old, old))
    assert RunReader(tmp_path).state is RunState.KILLED


def test_a_lock_that_is_no_longer_renewed(tmp_path, monkeypatch):
    reader, now = RunReader(tmp_path), time.monotonic()
    with FolderLock(tmp_path).held(print):
        assert reader.state is RunState.RUNNING
        monkeypatch.setattr("crosscut.logbook.following.time.monotonic", lambda: now + 2 * STALE)
        assert reader.state is RunState.KILLED


def test_a_long_series_keeps_its_spikes_and_gaps():
    series = Series()
    values = [float(step % 7) for step in range(100_000)]
    values[77_777], values[88_888], values[99_990] = 1000.0, -1000.0, math.nan
    for first in range(0, 100_000, 1000):
        series.extend(range(first, first + 1000), values[first : first + 1000])
    pairs = dict(series.pairs())
    assert len(pairs) <= MOST_POINTS
    assert (pairs[77_777], pairs[88_888], pairs[99_990]) == (1000.0, -1000.0, None)
    assert sorted(pairs) == list(series.steps)
    assert {pairs[step] for step in pairs if step < 70_000} == {0.0, 6.0}
    series.undo(77_777)
    assert series.steps[-1] < 77_777


def test_a_row_after_half_a_line_is_read(tmp_path):
    path = tmp_path / METRICS_FILE
    append_row(path, row(1))
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    append_row(path, row(3))
    assert [one["step"] for one in read_rows(path)] == [1, 3]


def test_columns_of_a_long_text_are_those_of_its_rows(tmp_path, monkeypatch):
    file = RowFile(tmp_path / METRICS_FILE)
    file.start(0)
    for step in range(1, 600):
        file.append({**row(step, math.sin(step)), "loss": None if step == 300 else math.sin(step), "seconds": step / 7})
        if step % 100 == 0:
            file.append({"step": step, "validation_loss": 1.0})
    file.close()
    fast, slow = RunReader(tmp_path), RunReader(tmp_path)
    slow.poll()
    monkeypatch.setattr(columns, "_LONG", 1000)
    monkeypatch.setattr("crosscut.logbook.tail._AT_ONCE", 30_000)
    fast.poll()
    for name in (*(name for name in columns.WATCHED if name in row(1)), "validation_loss"):
        assert fast.series[name].pairs() == slow.series[name].pairs(), name
    assert list(fast.series[ELAPSED].values) == pytest.approx(list(accumulate(step / 7 for step in range(1, 600))))


@pytest.mark.slow  # writes 300 MB
@pytest.mark.alone
def test_a_million_rows_take_seconds_and_bounded_memory(tmp_path):
    figures = [repr(step / 7_000_003) for step in range(1_000_000)]
    with (tmp_path / METRICS_FILE).open("w") as file:
        for step, figure in enumerate(figures, start=1):
            file.write(json.dumps(row(step, 9.0 if step == 777_777 else float(figure))) + "\n")
    begin = time.process_time()
    assert len(list(map(float, figures))) == 1_000_000
    unit = time.process_time() - begin
    reader, begin = RunReader(tmp_path), time.process_time()
    reader.poll()
    seconds = time.process_time() - begin
    assert (777_777, 9.0) in losses(reader)
    assert max(len(series.steps) for series in reader.series.values()) <= MOST_POINTS
    assert seconds < 20 * unit, "3 s where Python converts a million figures in 0.15 s"
