import json

import pytest
from click.testing import CliRunner

from crosscut.cli.main import commands
from crosscut.config import ConfigError, LayoutError

SMALL = (
    "plan",
    "--dry-run",
    "--model",
    "laptop-small",
    "model.num_layers=1",
    "model.vocab_size=512",
    "training.sequence_length=64",
)


def run(*arguments: str) -> str:
    """What a command prints, in this process; a user's mistake is raised."""
    result = CliRunner().invoke(commands, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_dry_run_stands_beside_the_formulas() -> None:
    text = run(*SMALL, "--layout", "tensor=4,data=16", "--rank", "63")
    assert text.startswith("dry run of rank 63 of tensor 4 x data 16 as on cuda")
    assert "blocks.*.mlp.expand" in text
    assert "bytes of messages, data" in text


def test_json_has_the_figures() -> None:
    told = json.loads(run(*SMALL, "--layout", "tensor=2", "training.device=cpu", "--json"))
    assert (told["layout"], told["device"]) == ("tensor 2 x data 1", "cpu")
    assert told["peak_bytes"] == sum(told["modules"].values())


def test_a_layout_without_a_dry_run_is_an_error() -> None:
    with pytest.raises(ConfigError) as error:
        run("plan", "--model", "8.3B", "--gpu", "h200-sxm", "--layout", "tensor=8")
    assert str(error.value) == (
        "`--layout` must come with `--dry-run`, since a plan tries every one, but is tensor=8 alone."
    )


def test_a_rank_beyond_the_layout_is_an_error() -> None:
    with pytest.raises(LayoutError, match="one of the layout's 2 ranks, but is 2"):
        run(*SMALL, "--layout", "tensor=2", "--rank", "2")
