"""The real command."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from crosscut.cli.main import commands
from crosscut.config import ConfigError, DataError
from tests.pretrained.models import make

TEXT = "the quick brown fox jumps over the lazy dog, and the dog jumps over the quick brown fox. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make(folder, "llama")
    (folder / "text.txt").write_text(TEXT)
    (folder / "lambada.txt").write_text("the quick brown fox jumps over the dog\nthe lazy dog\n")
    return folder


def arguments(model: Path, *more: str) -> list[str]:
    files = ["--text", str(model / "text.txt"), "--task", f"lambada={model / 'lambada.txt'}"]
    return ["evaluate", str(model), *files, "--window", "16", "--stride", "4", "--device", "cpu", *more]


def test_ranks_give_what_one_process_gives(model, crosscut_here, tmp_path):
    written = tmp_path / "scores.json"
    one = CliRunner().invoke(commands, arguments(model, "--json"), catch_exceptions=False)
    assert one.exit_code == 0
    two = crosscut_here(*arguments(model, "--tensor", "2", "--output", str(written)), status=0)
    for expected in ("LAMBADA", "perplexity", "tensor 2 x data 1, cpu, float32", "last token accuracy"):
        assert expected in two.stdout
    expected, found = json.loads(one.stdout)["tasks"], json.loads(written.read_text())["tasks"]
    for task in ("lambada", "text"):
        assert found[task]["figures"] == pytest.approx(expected[task]["figures"], rel=1e-5)
        for name in ("counts", "protocol", "data"):
            assert found[task][name] == expected[task][name]


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "float64"])
def test_precisions_agree_in_the_first_digits(model, precision):
    perplexities = []
    for more in ((), ("--precision", precision)):
        done = CliRunner().invoke(commands, arguments(model, "--json", *more), catch_exceptions=False)
        perplexities.append(json.loads(done.stdout)["tasks"]["text"]["figures"]["loss_per_token"])
    assert perplexities[0] == pytest.approx(perplexities[1], rel=0.02)


def test_own_text_is_scored_by_half_windows_and_the_command_says_so(model, monkeypatch):
    monkeypatch.setattr("crosscut.evaluation.progress._MEASURED_SECONDS", 0.0)
    wanted = ["--text", str(model / "text.txt"), "--window", "16", "--batch-size", "1", "--device", "cpu"]
    table = CliRunner().invoke(commands, ["evaluate", str(model), *wanted], catch_exceptions=False)
    assert "window 16, stride 8" in table.stdout
    done = CliRunner().invoke(commands, ["evaluate", str(model), *wanted, "--json"], catch_exceptions=False)
    task = json.loads(done.stdout)["tasks"]["text"]
    assert (task["protocol"]["window"], task["protocol"]["stride"]) == (16, 8)
    size, forecast = done.stderr.splitlines()[:2]
    counts = f"{task['counts']['tokens']:,} tokens to score in {task['counts']['windows']:,} windows"
    assert size == f"text  {counts} (window 16, stride 8)"
    assert forecast.startswith("text  expected time 0:00:0")


def test_a_limit_scores_the_first_passages(model):
    task = ["evaluate", str(model), "--task", f"lambada={model / 'lambada.txt'}", "--device", "cpu"]
    done = CliRunner().invoke(commands, [*task, "--limit", "1", "--json"], catch_exceptions=False)
    found = json.loads(done.stdout)["tasks"]["lambada"]
    assert (found["counts"]["passages"], found["protocol"]["limit"]) == (1, 1)
    one = model / "one passage.txt"
    one.write_text((model / "lambada.txt").read_text().splitlines()[0])
    alone = CliRunner().invoke(
        commands, [*task[:3], f"lambada={one}", "--device", "cpu", "--json"], catch_exceptions=False
    )
    assert found["figures"] == json.loads(alone.stdout)["tasks"]["lambada"]["figures"]


def test_settings_that_are_not_used_are_not_shown(model):
    done = CliRunner().invoke(commands, arguments(model), catch_exceptions=False)
    assert "None" not in done.stdout
    assert "counted all tokens of the last word, teacher forcing" in " ".join(done.stdout.split())


def test_a_window_smaller_than_the_stride_is_for_lambada(model):
    wanted = ["--task", f"lambada={model / 'lambada.txt'}", "--window", "12", "--stride", "16", "--device", "cpu"]
    wanted += ["--json"]
    done = CliRunner().invoke(commands, ["evaluate", str(model), *wanted], catch_exceptions=False)
    assert json.loads(done.stdout)["tasks"]["lambada"]["protocol"]["window"] == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--overlap", "17"), "`--stride` must be at most the window's 16 tokens, but is 17."),
        (("--window", "65"), "`--window` must be at most the model's maximum of 64 tokens, but is 65."),
        (("--tensor", "3"), "`--tensor` must divide `model.num_heads` (4), but is 3. Try 1, 2 or 4."),
        (("--text", "no.txt"), "`--text` must name existing files, but nothing matches `no.txt`. Check the path."),
    ],
)
def test_messages_name_the_options(model, options, message):
    result = CliRunner().invoke(commands, arguments(model, *options))
    assert isinstance(result.exception, ConfigError | DataError)
    assert str(result.exception).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    {
        "": "Either files (`--task`, `--text`) or lm-eval tasks (`--harness`) must be given, not both, but",
        "--task lambda=x": "`--task` must be `wikitext103=FILE` or `lambada=FILE`, but is `lambda=x`.",
        "--task lambada": "`--task` must be `wikitext103=FILE` or `lambada=FILE`, but is `lambada`.",
        "--task lambada=a --task lambada=b": "`--task lambada=FILE` must be given once, but names both `a` and `b`",
        "--text a --limit 1": "`--limit` must be 0 without `--task lambada`, but is 1. Only LAMBADA has pass",
        "--text a --limit -1": "`--limit` must be at least 0, but is -1.",
        "--text a.txt --stride -1": "`--stride` must be at least 0, but is -1.",
        "--text a.txt --tensor 0": "`--tensor` must be at least 1, but is 0.",
    }.items(),
)
def test_a_mistake_is_one_message(options, message):
    result = CliRunner().invoke(commands, ["evaluate", "somewhere", *options.split()])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(message)


@pytest.mark.parametrize("tensor", ["1", "2"])
def test_a_model_with_finite_weights_that_gives_no_numbers_is_an_error(model, crosscut_here, tmp_path, tensor):
    """Logits of the output projection overflow to infinity, so the losses are NaN."""
    folder = shutil.copytree(model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.full_like(weights["lm_head.weight"], 3e38)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    done = crosscut_here(*arguments(folder, "--tensor", tensor), status=2)
    assert done.stderr.splitlines()[-1] == (
        "crosscut: The losses of `lambada` must be numbers, but some are NaN, because the model's logits are not "
        "finite. The weights are damaged, or the precision cannot hold the numbers. Try --precision float32; check a "
        "checkpoint with `crosscut checkpoint verify`."
    )
    assert "infinite" not in done.stdout
