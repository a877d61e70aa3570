"""What a command line without a file takes from the demo, and what it does not."""

import dataclasses
import json

from crosscut.cli.arguments import run_from
from crosscut.config import PRESETS, ModelConfig


def test_without_a_file_it_is_the_demo_with_what_was_typed():
    demo = run_from(()).model
    assert (demo.num_layers, demo.hidden_size, demo.max_sequence_length) == (4, 192, 256)
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
