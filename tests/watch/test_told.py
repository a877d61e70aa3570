"""Messages to the page: only new points travel, and all of a series whose earlier points have changed."""

import base64
import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from crosscut.logbook.schema import RUN_FILES, Form
from crosscut.watch.source import Source
from crosscut.watch.told import ToldRun
from tests.watch.runs import append, row, validation, write_rich_run, write_run


class Page:
    """What a page has: it takes in answers as the script of the page does."""

    def __init__(self, folder: Path) -> None:
        self.run = ToldRun("id", "name", Source(folder))
        self.cursor, self.series, self.parts = "", {}, {}

    def ask(self) -> dict[str, Any]:
        self.run.source.refresh()
        told = json.loads(json.dumps(self.run.tell(self.cursor)))
        self.cursor = told["cursor"]
        if told["fresh"]:
            self.series = {}
        for name, (start, steps, values) in told["series"].items():
            columns = [array("d", base64.b64decode(told["columns"][steps]))]
            columns.append(array("f", base64.b64decode(told["columns"][values])))
            before = self.series.get(name, [])[:start] if start else []
            self.series[name] = [*before, *zip(*columns, strict=True)]
        self.parts |= told["parts"]
        return told

    def losses(self) -> dict[int, float]:
        return {int(step): pytest.approx(value) for step, value in self.series["loss"]}


def expected(steps: int, **more: Any) -> dict[int, float]:
    return {step: row(step, **more)["loss"] for step in range(1, steps + 1)}


def test_only_new_points_travel(tmp_path):
    page = Page(write_run(tmp_path, 50))
    first = page.ask()
    assert first["fresh"] and expected(50) == page.losses()
    quiet = page.ask()
    assert not quiet["fresh"] and not quiet["series"] and not quiet["columns"] and not quiet["parts"]
    append(tmp_path, row(51), row(52), validation(52, 2.0))
    new = page.ask()
    assert {start for name, (start, *_) in new["series"].items() if name == "loss"} == {50}
    assert len(base64.b64decode(new["columns"][new["series"]["loss"][1]])) == 2 * 8
    assert expected(52) == page.losses()
    assert page.series["validation_loss"][-1] == (52, 2.0)


def test_series_with_equal_steps_share_their_steps(tmp_path):
    told = Page(write_run(tmp_path, 50)).ask()
    assert told["series"]["loss"][1] == told["series"]["gradient_norm"][1] != told["series"]["validation_loss"][1]


def test_a_run_that_was_rewritten_is_not_drawn_twice(tmp_path):
    page = Page(write_run(tmp_path, 50))
    page.ask()
    write_run(tmp_path, 30, seed=1)
    page.ask()
    assert page.losses() == expected(30, seed=1)
    append(tmp_path, row(20, seed=2))
    page.ask()
    assert page.losses() == {**expected(19, seed=1), 20: row(20, seed=2)["loss"]}


def test_a_series_that_is_thinned_is_sent_anew(tmp_path):
    page = Page(write_run(tmp_path, 8000))
    page.ask()
    append(tmp_path, *map(row, range(8001, 9001)))
    told = page.ask()
    assert told["series"]["loss"][0] == 0 and not told["fresh"]
    points = [value for _, value in page.series["loss"]]
    assert len(points) < 8192
    assert max(points) == pytest.approx(max(expected(9000).values()))


@pytest.mark.parametrize("cursor", ["", "x", "a.b.c", "0.0:-5.x:1", "....", "0.0:1.marks:x"])
def test_a_cursor_that_no_answer_had_gets_everything(tmp_path, cursor):
    page = Page(write_run(tmp_path, 5))
    page.cursor = cursor
    assert page.ask()["fresh"] and page.losses() == expected(5)


def test_parts_travel_when_they_change(tmp_path):
    page = Page(write_rich_run(tmp_path))
    page.ask()
    assert page.parts["config"]["training"]["steps"] == 100
    assert [mark["kind"] for mark in page.parts["marks"]] == ["hang"]
    rank = page.parts["ranks"]["ranks"][1]
    assert (rank["planned"], rank["measured"], rank["places"]) == (2_900_000, 3_000_000, {"tensor": 1})
    assert rank["messages"]["tensor"] == {
        "planned": 12,
        "measured": 12,
        "planned_bytes": 98304,
        "measured_bytes": 98304,
    }
    assert page.parts["rates"] == {"step": 3, "rates": {"embedding": 0.002, "matrix": 0.01, "scalar": 0.001}}
    assert page.parts["loads"]["layers"]["0.mlp"][0] == [0.9, 1.1, 1.0, 1.0]
    append(tmp_path, {"step": 61, "prompt": "a", "text": "ab"}, name="samples.jsonl")
    assert page.ask()["parts"].keys() == {"samples"}
    assert page.parts["samples"][-1] == {"step": 61, "prompt": "a", "text": "ab"}


def test_run_of_these_tests_has_the_keys_of_the_schema(tmp_path):
    write_rich_run(tmp_path)
    written = [file for file in RUN_FILES if file.kinds and (tmp_path / file.name).exists()]
    assert len(written) == 5
    for file in written:
        text = (tmp_path / file.name).read_text()
        for one in text.splitlines() if file.form is Form.ROWS else [text]:
            file.require_known(json.loads(one))


def test_figures_of_ranks_that_are_missing_are_left_out(tmp_path):
    write_rich_run(tmp_path)
    (tmp_path / "plan.json").write_text('{"version": 1, "ranks": 7, "stages": {"a": 1}, "axes": []}')
    page = Page(tmp_path)
    page.ask()
    assert [(one["planned"], one["measured"]) for one in page.parts["ranks"]["ranks"]] == [(None, 3_000_000)] * 2
    append(
        tmp_path, {"step": 9, "layout": "", "learning_rates": {"a": 1, "b": 1}, "ranks": []}, name="measurements.jsonl"
    )
    page.ask()
    assert page.parts["rates"] is None  # all groups have one rate
    (tmp_path / "measurements.jsonl").unlink()
    page.ask()
    assert page.parts["ranks"] is None


def test_a_folder_that_disappears_keeps_its_last_figures(tmp_path):
    folder = write_run(tmp_path / "run", 5)
    page = Page(folder)
    page.ask()
    assert page.run.listed()["state"] == "stopped"
    folder.rename(tmp_path / "away")
    page.ask()
    assert page.run.listed()["state"] == "gone" and page.losses() == expected(5)


def test_an_error_in_one_run_is_a_note_on_it(tmp_path, monkeypatch):
    page = Page(write_run(tmp_path, 5))
    page.ask()
    append(tmp_path, row(6))
    monkeypatch.setattr(page.run.source._reader, "poll", lambda: [][0])
    page.ask()
    (note,) = page.parts["notes"]
    assert "cannot be read (IndexError: list index out of range)" in note and page.losses() == expected(5)
    monkeypatch.undo()
    page.ask()
    assert page.parts["notes"] == [] and page.losses() == expected(6)


@pytest.mark.parametrize("config", ["d = 2020-01-01", "training = 3", "[training]\nx = inf\nsteps = nan"])
def test_an_odd_config_does_not_end_the_page(tmp_path, config):
    folder = write_run(tmp_path / "run", 5)
    (folder / "config.toml").write_text(config)
    (folder / "summary.json").write_text('{"version": 1, "perplexity": NaN, "speed": 1e999}')
    page = Page(folder)
    page.ask()
    listed = page.run.listed()
    json.dumps([listed, page.parts], allow_nan=False)
    assert page.parts["summary"]["speed"] is None or page.parts["notes"]
