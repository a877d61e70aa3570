"""Rotary positions that are scaled for longer sequences: the numbers of `transformers`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from crosscut.config import Layout, ModelConfig
from crosscut.config.published.folders import published_table, read_published, reason_against_export
from crosscut.model.sublayers.rotary import attention_factor, frequencies, rotations
from crosscut.pretrained import find_model
from tests.pretrained import jobs
from tests.pretrained.models import LLAMA3_ROPE, LLAMA_SHAPE, V, their_logits, write_model
from tests.ranks import RankPool

ROPES: dict[str, dict[str, Any]] = {
    "llama3": LLAMA3_ROPE,
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16,
    },
    "yarn with a factor": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16,
        "attention_factor": 0.75, "beta_fast": 32, "beta_slow": 1,
    },
    "yarn of DeepSeek": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 2.5, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 0.5,
    },
}  # fmt: skip
ORIGINAL = 16
"""Longest sequence of the training, in tokens."""


def their_config(rope: dict[str, Any], **shape: Any) -> Any:
    from transformers import LlamaConfig

    longest = ORIGINAL if rope["rope_type"] == "dynamic" else 64
    return LlamaConfig(**{**LLAMA_SHAPE, "max_position_embeddings": longest, "rope_parameters": dict(rope), **shape})


def read(folder: Path, config: Any) -> ModelConfig:
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return read_published(folder).model


@pytest.mark.parametrize("head_size", [8, 128])
@pytest.mark.parametrize("length", [12, 16, 17, 64, 1000])
@pytest.mark.parametrize("name", ROPES)
def test_rotations_are_those_of_transformers(tmp_path: Path, name: str, length: int, head_size: int) -> None:
    """Bit for bit, in float64 as in float32: the published code computes angles in float32 in every precision."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = their_config(ROPES[name], head_dim=head_size)
    ours = read(tmp_path, config)
    places = torch.arange(length)
    theirs = LlamaRotaryEmbedding(config)
    cos, sin = theirs(torch.zeros(1, dtype=torch.float64), places.unsqueeze(0))
    assert theirs.attention_scaling == attention_factor(ours)
    assert torch.equal(frequencies(ours, torch.device("cpu"), length=length), theirs.inv_freq)
    own_cos, own_sin = rotations(places, ours, torch.float64, length=length)
    half = head_size // 2
    assert torch.equal(own_cos, cos[0])
    assert torch.equal(torch.cat((-own_sin[:, :half], own_sin[:, half:]), -1), sin[0])


def test_dynamic_scaling_begins_behind_the_original_length(tmp_path: Path) -> None:
    ours = read(tmp_path, their_config(ROPES["dynamic"]))
    cpu = torch.device("cpu")
    plain, longer = (frequencies(ours, cpu, length=length) for length in (ORIGINAL, ORIGINAL + 1))
    assert torch.equal(plain, frequencies(ours, cpu))
    assert (longer[1:] < plain[1:]).all()


LENGTHS = (12, 60)
"""Shorter than the sequences of the training, and longer."""


@pytest.mark.one_in(2)  # the rotations themselves are compared above
@pytest.mark.parametrize("name", ["yarn with a factor", "yarn", "dynamic", "linear"])
def test_logits_of_short_and_long_texts_are_those_of_transformers(ranks: RankPool, tmp_path: Path, name: str) -> None:
    longest = ORIGINAL if name == "dynamic" else 64
    fields = {**LLAMA_SHAPE, "max_position_embeddings": longest, "rope_parameters": dict(ROPES[name])}
    write_model(tmp_path, "llama", fields)
    source = find_model(tmp_path)
    for length in LENGTHS:
        tokens = torch.arange(2 * length).view(2, length) * 37 % V
        theirs = their_logits(tmp_path, torch.float64, tokens)
        for layout in (Layout(), Layout(tensor=2, sequence_parallel=True)):
            for (ours,) in ranks.run(layout.world_size, jobs.logits, source, layout, ["float64"], tokens):
                assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-9, (length, str(layout))


def test_a_norm_after_the_rotation_removes_the_factor_of_yarn(ranks: RankPool, tmp_path: Path) -> None:
    """As in a NanoChat of `transformers`. Crosscut's norm comes before the rotation."""
    fields = {**LLAMA_SHAPE, "rope_parameters": dict(ROPES["yarn with a factor"])}
    write_model(tmp_path, "nanochat", fields)
    tokens = torch.arange(120).view(2, 60) * 37 % V
    theirs = their_logits(tmp_path, torch.float64, tokens)
    source = find_model(tmp_path)
    ((ours,),) = ranks.run(1, jobs.logits, source, Layout(), ["float64"], tokens)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= 1e-6
    other = dataclasses.replace(source.model, rotary_attention_factor=0.0)
    assert "`model.rotary_attention_factor` must be 1.0" in reason_against_export(other)
    assert not reason_against_export(source.model)


@pytest.mark.parametrize("name", ["linear", "dynamic", "yarn", "yarn with a factor"])
def test_transformers_computes_the_same_with_a_written_file(tmp_path: Path, name: str) -> None:
    longest = ORIGINAL if name == "dynamic" else 64
    fields = {**LLAMA_SHAPE, "max_position_embeddings": longest, "rope_parameters": dict(ROPES[name])}
    write_model(tmp_path, "llama", fields)
    tokens = torch.arange(120).view(2, 60) * 37 % V
    before, model = their_logits(tmp_path, torch.float64, tokens), find_model(tmp_path).model
    table = published_table(model, dtype="float32", begin=2, stops=(3,))
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert torch.equal(their_logits(tmp_path, torch.float64, tokens), before)
    assert find_model(tmp_path).model == model


OURS = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 300, "max_sequence_length": 64, "dropout": 0.0,
    "positions": "rotary", "norm": "rms", "layers": ("attention swiglu",), "biases": "none", "tied": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "scaling",
    [
        {"rotary_scaling": "linear", "rotary_factor": 2.0},
        {"rotary_scaling": "dynamic", "rotary_factor": 4.0, "rotary_original_length": 16},
        {"rotary_scaling": "yarn", "rotary_factor": 8.0, "rotary_original_length": 8},
        {"rotary_scaling": "yarn", "rotary_factor": 8.0, "rotary_attention_factor": 0.5},
    ],
    ids=str,
)
def test_what_is_written_is_read_again(tmp_path: Path, scaling: dict[str, Any]) -> None:
    ours = ModelConfig(**OURS, **scaling)
    table = published_table(ours, dtype="float32", begin=2, stops=(3,))
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert read_published(tmp_path).model == ours
