import json
import re

import pytest
from click.testing import CliRunner

from crosscut.cli.main import commands
from crosscut.config import ConfigError, LayoutError
from tests.refusals import refusal

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
    """Run a command in this process and return its output. The error about a user's mistake is raised."""
    result = CliRunner().invoke(commands, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_dry_run_stands_beside_the_formulas() -> None:
    text = run(*SMALL, "--layout", "tensor=4,data=16", "--rank", "63")
    assert text.startswith("dry run of rank 63 of tensor 4 x data 16 as on cuda")
    assert "blocks.*.mlp.expand" in text
    assert "GB of messages, data" in text
    assert "1 GB is 10^9 bytes" in text
    assert re.search(r"FLOPs +[\d.]+ [MG]FLOP +[\d.]+ [MG]FLOP ", text)
    assert "does not fit" not in text


@pytest.mark.slow  # several dry runs
def test_a_step_that_does_not_fit_into_the_gpu_is_told_with_what_fits() -> None:
    large = ("training.batch_size=4096", "training.sequence_length=256", "--gpu", "h100-sxm", "model.num_layers=8")
    told = run(*SMALL, *large).splitlines()[-1]
    needed = re.match(
        r"The step does not fit: it needs ([\d.,]+) GB per rank, with [\d.]+ GB for fragmentation, ", told
    )
    assert needed is not None
    assert float(needed[1].replace(",", "")) > 80
    assert "but a rank has 80.0 GB. " in told
    fitting = int(told.rpartition("=")[2].rstrip("."))
    assert "does not fit" not in run(*SMALL, *large, f"training.micro_batch_size={fitting}")
    assert "does not fit" in run(*SMALL, *large, f"training.micro_batch_size={2 * fitting}")


def test_a_rank_of_a_later_stage_is_run_and_told() -> None:
    sizes = ("training.batch_size=4", "training.micro_batch_size=1", "model.num_layers=2")
    told = json.loads(run(*SMALL, "--layout", "pipeline=2", "--rank", "1", *sizes, "--json"))
    rows = {row["name"]: row for row in told["compared"]}
    assert told["rank"] == 1
    sent = rows["bytes of messages, pipeline"]
    assert sent["planned"] == sent["counted"] > 0


def test_json_has_the_figures() -> None:
    told = json.loads(run(*SMALL, "--layout", "tensor=2", "training.device=cpu", "--json"))
    assert (told["layout"], told["device"]) == ("tensor 2 x data 1", "cpu")
    assert told["peak_bytes"] == sum(told["modules"].values())


def message(*arguments: str) -> str:
    return refusal(ConfigError, run, *arguments)


def test_a_layout_or_a_rank_without_a_dry_run_is_an_error() -> None:
    plan = ("plan", "--model", "8.3B", "--gpu", "h200-sxm")
    assert message(*plan, "--layout", "tensor=8") == (
        "`--layout` must be omitted without `--dry-run`, but is tensor=8. A plan covers every layout and all ranks. "
        "Add `--dry-run`, or remove `--layout`."
    )
    assert message(*plan, "--rank", "0") == (
        "`--rank` must be omitted without `--dry-run`, but is 0. A plan covers every layout and all ranks. "
        "Add `--dry-run`, or remove `--rank`."
    )


@pytest.mark.parametrize(
    "ignored", ["--gpus 8", "--tokens 1T", "--price 2.5", "--top 8", "--html x.html", "--write x.toml"]
)
def test_what_a_dry_run_would_ignore_is_told(ignored: str) -> None:
    option, value = ignored.split()
    assert message(*SMALL, option, value) == (
        f"`{option}` must be omitted with `--dry-run`, but is {value}. A dry run is one step of one rank, on the run's "
        f"layout or on `--layout`. Remove `{option}`."
    )


def test_a_device_of_another_kind_is_an_error() -> None:
    assert message(*SMALL, "--gpu", "h100-sxm", "training.device=cpu") == (
        '`training.device` must be "auto" or "cuda" on H100 SXM, but is "cpu". Set training.device=auto.'
    )


def test_a_rank_beyond_the_layout_is_an_error() -> None:
    with pytest.raises(LayoutError, match="must be from 0 to 1, the last rank of the layout, but is 2"):
        run(*SMALL, "--layout", "tensor=2", "--rank", "2")
