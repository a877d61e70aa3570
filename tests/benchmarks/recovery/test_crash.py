"""The benchmark of kills and damages in its short form: it kills real runs, so it takes minutes."""

import json

import pytest

from benchmarks.recovery import crash
from tests.benchmarks.conftest import run_program


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["tensor 2", "data 2", "pipeline 2", "context 2"])
def test_killed_runs_end_as_the_unharmed_ones(tmp_path, layout):
    """The benchmark does all layouts in one command. Here, each is a test, so that several slices can share them."""
    figures = tmp_path / "figures.json"
    numbers = ("--kills", 5, "--damages", 25)
    done = run_program("recovery/crash.py", *numbers, "--layouts", layout, "--json", figures, timeout=850)
    told = json.loads(figures.read_text())
    assert told["well"]
    assert told["damaged"] == []
    assert [kill["target"] for kill in told["kills"]] == ["launcher", "rank 0", "rank 1", "all", "launcher"]
    assert {kill["layout"] for kill in told["kills"]} == {layout}
    assert max(kill["lost"] for kill in told["kills"] if not kill["damages"]) <= 4
    assert told["compared"] >= 5
    assert told["damages"]["number"] == 25
    assert told["damages"]["lost"] == []
    for expected in ("5 kills: ", "steps lost: at most", "0 differ", "damages lost: 0", "nothing was lost"):
        assert expected in done.stdout, expected


def test_numbers_are_checked(capsys):
    with pytest.raises(SystemExit):
        crash.main(["--kills", "0", "--damages", "0"])
    assert "one of them must be at least 1, but they are 0 and 0." in capsys.readouterr().err
