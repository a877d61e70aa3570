"""Settings that a command line without a file takes from the demo, and settings that it does not take."""

import dataclasses
import json
import sys

import pytest
from click.testing import CliRunner

from crosscut.cli.arguments import run_from
from crosscut.cli.main import commands
from crosscut.config import PRESETS, ModelConfig, write_toml


def test_without_a_file_it_is_the_demo_with_what_was_typed():
    demo = run_from(()).model
    assert (demo.num_layers, demo.hidden_size, demo.max_sequence_length) == (4, 128, 128)
    assert run_from(("model.num_layers=6",)).model == dataclasses.replace(demo, num_layers=6)


def test_a_preset_that_was_typed_is_the_model_and_nothing_of_the_demos():
    assert run_from(("model.preset=gpt2-medium",)).model == ModelConfig(**PRESETS["gpt2-medium"])
    assert run_from(("model.preset=gpt2-medium", "model.dropout=0.2")).model.dropout == 0.2
    assert run_from(("model.dropout=0.2", "model.preset=gpt2-medium")).model.dropout == 0.2


def test_a_published_model_that_was_typed_is_the_model(tmp_path):
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 256, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps({**config, "activation_function": "gelu_new"}), encoding="utf-8")
    model = run_from((f"training.initialize_from={tmp_path}",)).model
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (2, 32, 300)


@pytest.fixture
def runs_of(monkeypatch):
    """The runs that a command would do on a machine with so many GPUs, and what it says before."""

    def find(num_gpus, *arguments):
        found = []
        monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
        monkeypatch.setattr("crosscut.training.run_training", lambda run, **_: found.append(run))
        monkeypatch.setattr("crosscut.verification.verify_runs", lambda runs: found.extend(runs) or sys.exit(0))
        result = CliRunner().invoke(commands, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return [run.training.device for run in found], result.output

    return find


def test_the_demo_is_for_processors_too_where_there_are_fewer_gpus_than_its_ranks(runs_of, tmp_path):
    told = "The 2 ranks run on the CPU, because there are fewer GPUs than ranks."
    demo = f"{told} Add layout.tensor=1 to train on a GPU.\n"
    assert runs_of(1, "train") == runs_of(1, "train", "layout.sequence_parallel=true") == (["cpu"], demo)
    assert runs_of(1, "train", "layout.tensor=1") == (["auto"], "")
    assert runs_of(1, "train", "layout.tensor=4") == (["auto"], ""), "it is refused, not done a thousand times slower"
    assert runs_of(1, "train", "training.device=cuda") == (["cuda"], "")
    assert runs_of(0, "train") == runs_of(2, "train") == (["auto"], "")
    file = tmp_path / "run.toml"
    write_toml(run_from(()), file)
    assert runs_of(1, "train", str(file)) == (["auto"], ""), "it is refused, too"
    assert runs_of(1, "verify", str(file)) == (["cpu"], f"{told}\n")
    assert runs_of(1, "verify", str(file), "--layout", "tensor=1") == (["auto"], "")


def test_own_text_trains_on_one_rank_and_so_on_a_single_gpu(runs_of):
    assert run_from(("data.text=book.txt",)).layout.world_size == 1
    assert runs_of(1, "train", "data.text=book.txt") == (["auto"], "")
