import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from crosscut.cli.main import commands
from crosscut.config import ConfigError

ROWS = [
    {"step": 0, "version": 1, "written_at": 1.5},
    {"step": 0, "validation_loss": 5.5},
    {"step": 1, "loss": 2.5, "gradient_norm": None},
    {"step": 2, "loss": 2.25, "gradient_norm": 1e-05},
    {"step": 2, "validation_loss": 2.125},
    {"step": 2, "hang_seconds": 31.0, "hang_rank": 1},
]
TABLE = "step,validation_loss,loss,gradient_norm\n0,5.5,,\n1,,2.5,\n2,2.125,2.25,1e-05\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def test_figures_are_a_table_with_a_row_for_each_step(run):
    assert CliRunner().invoke(commands, ["metrics", str(run)], catch_exceptions=False).output == TABLE
    CliRunner().invoke(commands, ["metrics", str(run), "--csv", str(run / "table.csv")], catch_exceptions=False)
    assert (run / "table.csv").read_text() == TABLE
    with (run / "table.csv").open() as file:
        assert [row["loss"] for row in csv.DictReader(file)] == ["", "2.5", "2.25"]


def test_a_folder_in_place_of_the_figures_is_told(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(commands, ["metrics", str(tmp_path)], catch_exceptions=False)
    assert str(error.value) == (
        f"`{tmp_path / 'metrics.jsonl'}` must be a file that can be read, but is not: Is a directory. Name the folder "
        "of a run, or grant access."
    )


def test_a_folder_without_figures_is_refused(tmp_path):
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(commands, ["metrics", str(tmp_path)], catch_exceptions=False)
    assert str(error.value) == (
        f"`RUN` must be the folder of a run that has trained, but `{tmp_path}` has no rows in `metrics.jsonl`. "
        "Check the path."
    )
