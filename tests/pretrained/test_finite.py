"""Weights that are NaN or infinite are told when they are loaded, by name and number, the same on all ranks."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from crosscut.config import CheckpointError, Layout
from crosscut.pretrained import ModelSource, find_model
from crosscut.pretrained.finite import count_not_finite
from tests.pretrained import jobs

UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.1.post_attention_layernorm.weight"


@pytest.fixture
def folder(published, tmp_path) -> Path:
    return Path(shutil.copytree(published("llama"), tmp_path / "model"))


def spoil(folder: Path, *places: tuple[str, tuple[int, ...], float]) -> None:
    """Set elements of tensors to a value."""
    tensors = load_file(folder / "model.safetensors")
    for name, place, value in places:
        tensors[name][place] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(source: ModelSource, layout: Layout, precision: str = "float32") -> str:
    with pytest.raises(CheckpointError) as refused:
        jobs.load(source, layout, precision)
    return str(refused.value)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "layout", [Layout(tensor=4), Layout(), Layout(data=2, sharding="zero3"), Layout(tensor=2, data=2)], ids=str
)
def test_weights_that_are_not_finite_are_told_alike_on_all_ranks(ranks, folder, layout):
    nan, infinity = float("nan"), float("inf")
    spoil(folder, (UP, (0, 3), nan), (UP, (47, 0), infinity), (UP, (20, 31), -infinity), (NORM, (2,), nan))
    told = ranks.run(layout.world_size, refusal, find_model(folder), layout)
    assert told[0] == (
        f"`{folder}` must hold finite weights, but 1 value in `{NORM}` is not finite (NaN or infinity), and 1 other "
        "tensor also has such values. Download the model again."
    )
    assert set(told) == {told[0]}


@pytest.mark.parametrize(("name", "shown"), [(UP, UP), ("model.layers.0.self_attn.v_proj.weight", "v_proj.weight")])
def test_values_of_all_ranks_are_counted_once(ranks, folder, name, shown):
    spoil(folder, *((name, (row, 5), float("nan")) for row in (0, 9, 30)))
    for told in ranks.run(4, refusal, find_model(folder), Layout(tensor=2, data=2)):
        assert "but 3 values in `" in told
        assert f"{shown}` are not finite" in told


def test_a_value_in_an_expert_is_told_with_the_first_and_the_last_name(ranks, published, tmp_path):
    folder = Path(shutil.copytree(published("mixtral"), tmp_path / "mixture"))
    name = "model.layers.1.block_sparse_moe.experts.{}.w3.weight"
    spoil(folder, (name.format(4), (0, 0), float("nan")))
    for told in ranks.run(2, refusal, find_model(folder), Layout(data=2, expert=2)):
        assert f"but 1 value in `{name.format(0)}` to `{name.format(5)}` is not finite" in told


def test_weights_beyond_the_range_of_float16_are_told(ranks, folder):
    spoil(folder, (UP, (1, 1), 1e6))
    assert (
        "If float16 is too narrow for this model" in ranks.run(1, refusal, find_model(folder), Layout(), "float16")[0]
    )
    ranks.run(1, jobs.weights, find_model(folder), Layout())


@pytest.mark.parametrize(
    ("tensor", "count"),
    [
        (torch.full((100,), 3e38), 0),  # their sum is infinite
        (torch.full((100,), 6e4, dtype=torch.float16), 0),
        (torch.full((3, 5), 3e38, dtype=torch.bfloat16), 0),
        (torch.tensor([float("inf"), -float("inf"), 1.0]), 2),
        (torch.tensor([[1.0, float("nan")]], dtype=torch.bfloat16), 1),
        (torch.tensor(float("nan"), dtype=torch.float64), 1),
        (torch.empty(0, 4), 0),
        (torch.full((3, 1 << 22), float("nan"))[:, ::2], 3 << 21),
    ],
)
def test_elements_that_are_not_finite_are_counted(tensor, count):
    assert count_not_finite(tensor) == count
