import io
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from crosscut.config import RunConfig
from crosscut.config.system.terminal import typed_command
from crosscut.data import Tokens
from crosscut.generation import Sampling, continue_text
from crosscut.model import GPT
from crosscut.training.watching import run_report
from crosscut.training.watching.run_report import plot_losses, print_summary
from tests.training.conftest import tiny_run
from tests.training.jobs import whole_run

SUMMARY = {
    "parameters": 2_641_920,
    "layout": "tensor 2 x data 1",
    "device": "a processor",
    "versions": {"torch": "2.13.0"},
    "first_step": 0,
    "steps": 300,
    "training_tokens": 614_400,
    "validation_perplexity_before": 4321.0,
    "validation_perplexity_after": 98.765,
    "validation_bits_per_byte_before": 3.21,
    "validation_bits_per_byte_after": 1.76543,
    "validation_tokens": 16_384,
    "validation_bytes": 61_234,
    "evaluation": {"lambada_accuracy": 0.4518, "wikitext103_perplexity": 19.31},
    "tokens_per_second": 6789.0,
    "model_flops_per_second": 1.234e12,
    "utilisation": 0.345,
    "peak": "bfloat16 matrix rate measured on 2 ranks at once",
    "peak_flops_per_second": 3.6e12,
    "gain_of_one_rank": 1.0,
}


def printed(tmp_path, text: str, *overrides: str, folders: Collection[str] = (), **summary: object) -> str:
    run = tiny_run(tmp_path / "tokens", tmp_path / "a run", "layout.tensor=2", *overrides)
    console = Console(file=io.StringIO(), width=200)
    folder = Path(run.output.folder)
    folder.mkdir()
    for name in ("loss.png", "metrics.jsonl", "summary.json", *(["sample.txt"] if text else [])):
        (folder / name).touch()
    for name in folders:
        (folder / name).mkdir()
    samples = {"sample": text, 'sample that continues "It"': "It was."} if text else {}
    print_summary(run, {**SUMMARY, **summary}, samples, console, unwritten=["loss.png"])
    return console.file.getvalue()


SAMPLED = ("output.sample_prompt=It's", "output.sample_temperature=0.5", "output.sample_repetition_penalty=1.2")


def test_summary_says_what_came_out_and_what_comes_next(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["crosscut"])
    out = printed(tmp_path, "And so it was.", *SAMPLED)
    for expected in (
        "GPT-2, ", "2 processes", "4,321.0 before, 98.8 after 300 steps (614k tokens)",
        "a processor; torch 2.13.0", "bits per byte", "3.210 before, 1.765 after; over 61.2 kB of text",
        "6,789 tokens/s, 1.23 TFLOP/s: 34% of 3.6 TFLOP/s", "And so it was.", '─ sample that continues "It" ─',
        "training.steps=600",
        f"watch '{tmp_path}/a run'", "sample.txt", "lambada accuracy 45.18%, wikitext103 perplexity 19.31",
    ):  # fmt: skip
        assert expected in out, expected
    assert f"generate '{tmp_path}/a run' --prompt 'It'\"'\"'s' --temperature 0.5 --repetition-penalty 1.2" in out


def test_a_bert_is_followed_by_commands_for_a_bert(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["crosscut"])
    bert = ("model.attention=bidirectional", "model.head=masked_tokens", "data.objective=masked")
    lines = printed(tmp_path, "", *bert).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("next"))
    run = f"'{tmp_path}/a run'"
    assert [line[7:].removeprefix(typed_command() + " ") for line in lines[first:]] == [
        f"generate {run} --prompt 'It was a [MASK] day.'",
        f"embed {run} --text 'It was a fine day.'",
        f"finetune table --model {run} --train TRAIN.tsv --dev DEV.tsv --text COLUMN --label COLUMN",
        f"train '{tmp_path}/a run/config.toml' --resume training.steps=600",
        f"watch {run}",
    ]


@pytest.mark.parametrize("typed", ["bin/crosscut", "crosscut", "bin/__main__.py"])
def test_the_next_commands_are_those_that_were_typed(tmp_path, monkeypatch, typed):
    monkeypatch.setattr("sys.argv", [typed])
    wanted = "python -m crosscut" if typed.endswith(".py") else typed
    assert printed(tmp_path, "").splitlines()[-1].strip() == f"{wanted} watch '{tmp_path}/a run'"


def test_resumed_run_says_at_which_step_it_began(tmp_path):
    out = printed(tmp_path, "", first_step=210)
    assert "4,321.0 at step 210, 98.8 after 300 steps" in out
    assert "3.210 at step 210, 1.765 after" in out


def test_summary_says_where_one_rank_would_be_faster(tmp_path):
    assert "one rank would be" not in printed(tmp_path, "")
    (tmp_path / "again").mkdir()
    assert "one rank would be about 1.42 times as fast here" in printed(tmp_path / "again", "", gain_of_one_rank=1.4234)


@pytest.mark.parametrize("utilisation", [None, 1.12, 2.62])
def test_a_share_above_one_is_not_given(tmp_path, utilisation):
    out = " ".join(printed(tmp_path, "", utilisation=utilisation).split())
    assert "above 3.6 TFLOP/s (bfloat16 matrix rate measured on 2 ranks at once), as the machine was busy when" in out
    assert "%" not in out.partition("speed")[2].partition("files")[0]


def test_a_share_of_one_is_given(tmp_path):
    out = printed(tmp_path, "", utilisation=1.0)
    assert "100% of 3.6 TFLOP/s" in " ".join(out.split())
    assert "busy" not in out


def test_text_is_printed_as_it_is(tmp_path):
    assert "[/Applause] [bold] :smile:" in printed(tmp_path, "[/Applause] [bold] :smile:")


def test_no_sample_leaves_no_panel(tmp_path):
    out = printed(tmp_path, "")
    assert "─ sample ─" not in out
    assert "sample.txt" not in out


def test_files_that_are_not_written_are_not_listed(tmp_path):
    listed = next(line for line in printed(tmp_path, "Text").splitlines() if line.startswith("files"))
    assert listed == f"files  {tmp_path}/a run/: sample.txt, metrics.jsonl, summary.json"


def test_folders_that_a_run_may_have_are_listed(tmp_path):
    out = printed(tmp_path, "", folders=("tokens", "initial", "tensorboard", "profile"))
    listed = next(line for line in out.splitlines() if line.startswith("files"))
    assert listed.endswith("a run/: metrics.jsonl, summary.json, tensorboard, profile, initial, tokens")


def drawn(run: RunConfig) -> list[tuple[str, int, str]]:
    """On a rank: prompt, seed and text of every sample that a whole run draws."""
    samples = []

    def noted(model: GPT, tokens: Tokens, prompt: str, sampling: Sampling, **more: Any) -> str:
        text = continue_text(model, tokens, prompt, sampling, **more)
        samples.append((prompt, sampling.seed, text))
        return text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_report, "continue_text", noted)
        whole_run(run)
    return samples


def test_each_sample_is_the_only_one_that_is_drawn(ranks, run_with):
    run = run_with("training.steps=3", "training.seed=7", "output.sample_prompt=The people")
    first, second = ranks.run(1, drawn, run)[0]
    assert first[:2] == ("", 7)
    assert second[:2] == ("The people", 7)
    assert (Path(run.output.folder) / "sample.txt").read_bytes() == f"{first[2]}\n\n{second[2]}\n".encode()


def test_a_validation_of_no_text_has_no_bits_per_byte(tmp_path):
    unknown = dict.fromkeys(("validation_bits_per_byte_before", "validation_bits_per_byte_after"))
    assert "bits per byte" not in printed(tmp_path, "", **unknown, validation_bytes=0)


def test_losses_are_drawn_also_after_a_single_step(tmp_path):
    rows = [
        {"step": 0, "validation_loss": 5.0, "validation_bits_per_byte": 3.0},
        {"step": 1, "loss": 4.9},
        {"step": 1, "validation_loss": None},
        {"step": 2, "loss": None},  # of a step that a loss scale has skipped
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_losses(tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".loss*"))


def test_the_legend_of_the_losses_lies_beside_the_curves(tmp_path, monkeypatch):
    from matplotlib import pyplot  # imported by no other test of this file

    steps = range(1, 301)
    rows = [{"step": step, "loss": 3 + 6 * math.exp(-step / 30) + 0.2 * (step % 2)} for step in steps]
    rows += [{"step": step, "validation_loss": 3 + 6 * math.exp(-step / 30)} for step in range(0, 301, 50)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = []
    close = pyplot.close
    monkeypatch.setattr(pyplot, "close", figures.append)
    plot_losses(tmp_path)
    (figure,) = figures
    (axes,) = figure.axes
    figure.canvas.draw()
    legend = axes.get_legend()
    told = legend.get_texts()[-1].get_text()
    assert told.startswith("validation, 9.00 nats at step 0, at the end perplexity 20.")
    assert list(axes.lines[-1].get_xdata()) == [50, 100, 150, 200, 250, 300], "no line from the untrained model"
    assert not axes.texts, "no other text lies in the plot"
    box = legend.get_window_extent()
    for line in axes.lines:
        points = axes.transData.transform(line.get_xydata())
        assert len(points) >= 6
        assert not any(box.contains(*point) for point in points), line.get_label()
    assert axes.bbox.contains(box.x0, box.y0)
    close(figure)
