import json
from pathlib import Path

import pytest

from crosscut.config.system.deletion import claim
from crosscut.logbook.contents import read_metrics, read_summary, remove_outlived, require_known_versions
from crosscut.logbook.objects import write_object
from crosscut.logbook.rows import RULES, RowFile, append_row
from crosscut.logbook.schema import (
    BY_NAME,
    METRICS_FILE,
    RUN_FILES,
    SUMMARY_FILE,
    VERSION,
    Form,
    Lifetime,
    NewerFileError,
)
from crosscut.logbook.skips import Event, SampleSkip, SkipRecord

HANG = {"step": 3, "hang_seconds": 31.0, "hang_rank": None}


def test_rows_of_every_kind_are_known_and_other_keys_are_not():
    file = BY_NAME[METRICS_FILE]
    validation = {"step": 1, "validation_loss": 2.0, "validation_perplexity": None, "validation_bits_per_byte": 1.0}
    assert file.require_known(HANG) == "hang"
    assert file.require_known(validation) == "validation"
    for row in ({**HANG, "more": 1}, {"step": 3, "hang_seconds": 31.0}, {**HANG, **validation}):
        with pytest.raises(ValueError, match=r"no kind of `metrics\.jsonl` has the keys "):
            file.require_known(row)


STEPS = {
    "metrics.jsonl", "experts.jsonl", "samples.jsonl", "measurements.jsonl", "summary.json", "plan.json", "loss.png",
    "experts.png", "sample.txt",
}  # fmt: skip


@pytest.mark.parametrize(
    ("end", "removed"),
    [
        (Lifetime.RESULT, {"summary.json"}),
        (Lifetime.STEPS, STEPS),
        (Lifetime.RUN, STEPS | {"restarts.jsonl", "hang-3.txt", "hang-3-2.txt"}),
    ],
)
def test_a_start_removes_the_files_that_must_not_outlive_it_and_nothing_else(tmp_path, end, removed):
    claim(tmp_path)
    names = [file.name for file in RUN_FILES if file.form is not Form.FOLDER and "/" not in file.name]
    for name in (*names, "hang-3.txt", "hang-3-2.txt", "hang-3-mine.txt", "notes.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "hang-4.txt").symlink_to(tmp_path / "notes.txt")
    before = {path.name for path in tmp_path.iterdir()}
    remove_outlived(tmp_path, end)
    assert before - {path.name for path in tmp_path.iterdir()} == removed


def test_files_without_a_marker_of_crosscut_stay(tmp_path):
    (tmp_path / METRICS_FILE).write_text("")
    for folder in (tmp_path, tmp_path / "missing"):
        remove_outlived(folder, Lifetime.RUN)
    assert (tmp_path / METRICS_FILE).exists()


def test_keys_of_inner_objects_are_known(tmp_path):
    event = Event(spike_step=61, back_to=50, sequences=44, reason="loss 9", file="01-step-000061.txt")
    for record in (SkipRecord(), SkipRecord(skips=(SampleSkip(50, 44),), events=(event,))):
        record.write(tmp_path)
        table = json.loads((tmp_path / "spikes" / "skips.json").read_text())
        assert table["version"] == VERSION
        assert BY_NAME["spikes/skips.json"].require_known(table) == "record"
    table["events"][0]["more"] = 1
    with pytest.raises(ValueError, match=r"has the keys .*events\.more"):
        BY_NAME["spikes/skips.json"].require_known(table)


def test_every_file_of_rows_has_a_rule_and_a_first_row():
    assert {file.name for file in RUN_FILES if file.form is Form.ROWS} == set(RULES)
    for name in RULES:
        assert BY_NAME[name].kinds[0].name == "first row"


def test_a_file_that_is_written_anew_has_another_first_row(tmp_path):
    firsts = set()
    for step in (0, 2, 2):
        file = RowFile(tmp_path / METRICS_FILE)
        file.start(step)
        file.append({"step": step + 1, "loss": 1.0})
        file.close()
        first, *_ = (tmp_path / METRICS_FILE).read_text().splitlines()
        assert BY_NAME[METRICS_FILE].require_known(json.loads(first)) == "first row"
        firsts.add(first)
    assert len(firsts) == 3


def test_a_hang_can_begin_the_file(tmp_path):
    append_row(tmp_path / METRICS_FILE, HANG)
    append_row(tmp_path / METRICS_FILE, HANG)
    assert read_metrics(tmp_path) == [HANG, HANG]
    assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == 3


def test_files_without_a_version_are_read(tmp_path):
    (tmp_path / METRICS_FILE).write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / SUMMARY_FILE).write_text('{"steps": 1}')
    require_known_versions(tmp_path)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]
    assert read_summary(tmp_path) == {"steps": 1}


@pytest.mark.parametrize("name", [METRICS_FILE, SUMMARY_FILE, "spikes/skips.json"])
def test_a_file_of_a_newer_version_is_refused(tmp_path: Path, name: str):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if name == METRICS_FILE:
        path.write_text(json.dumps({"step": 0, "version": VERSION + 1, "written_at": 1.0}) + "\n")
    else:
        write_object(path, {"skips": []})
        path.write_text(path.read_text().replace(f'"version": {VERSION}', f'"version": {VERSION + 1}'))
    with pytest.raises(NewerFileError) as error:
        require_known_versions(tmp_path)
    assert str(error.value) == (
        f"`{path}` must have version 1 or older, but has version 2: a newer Crosscut wrote it. Use that Crosscut, or "
        "another folder."
    )


def test_rows_that_a_full_disk_has_kept_are_undone(tmp_path):
    steps = [1, 2, 3, 4, 3, 4]
    lines = [json.dumps({"step": step, "loss": float(number)}) for number, step in enumerate(steps)]
    (tmp_path / METRICS_FILE).write_text("\n".join(lines) + "\n")
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path)] == [(1, 0.0), (2, 1.0), (3, 4.0), (4, 5.0)]
