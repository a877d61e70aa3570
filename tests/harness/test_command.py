import pytest
from click.testing import CliRunner

from crosscut.cli.main import commands
from crosscut.config import ConfigError
from crosscut.config.system.extras import install_command


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        (["lm-eval", "--model", "crosscut", "--tasks", "arc_easy"], "`crosscut lm-eval`"),
        (["evaluate", "runs/demo", "--harness", "arc_easy"], "`--harness`"),
    ],
    ids=["lm-eval", "evaluate"],
)
def test_without_lm_eval_it_is_said_how_to_get_it(typed, asked, monkeypatch):
    monkeypatch.setattr("crosscut.harness.tasks.find_spec", lambda name: None)
    result = CliRunner().invoke(commands, typed)
    assert isinstance(result.exception, ConfigError), result.exception
    assert str(result.exception) == (
        f"{asked} needs lm-eval, but lm-eval is not installed. Run `{install_command('harness')}`."
    )
