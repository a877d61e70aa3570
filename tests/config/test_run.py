import dataclasses
import subprocess
import sys
from dataclasses import replace

import pytest

import crosscut.config
from crosscut.config import PRESETS, Layout, ModelConfig, RunConfig, TrainingConfig, padded_vocab_size
from crosscut.planner.parameters import parameters_per_rank

MODEL = ModelConfig(num_layers=2, hidden_size=48, num_heads=6)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_a_model(name: str) -> None:
    model = ModelConfig(**PRESETS[name])
    assert model.query_size == model.hidden_size or PRESETS[name]["head_size"]


@pytest.mark.parametrize("name", ["megatron-1.2b", "megatron-2.5b", "megatron-4.2b", "megatron-8.3b"])
def test_scaling_models_keep_96_per_head(name: str) -> None:
    assert ModelConfig(**PRESETS[name]).head_size == 96


def test_mlp_is_four_times_the_hidden_size() -> None:
    assert MODEL.mlp_size == 192


def test_world_size_is_the_product_of_the_axes() -> None:
    assert Layout(tensor=8, data=64).world_size == 512


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(), "tensor 1 x data 1"),
        (Layout(tensor=2, data=3, sequence_parallel=True), "tensor 2 x data 3, sequence parallel"),
        (Layout(data=4, sharding="zero2"), "tensor 1 x data 4, zero2"),
        (Layout(data=4, sharding="zero3", shard_group=2), "tensor 1 x data 4, zero3 in groups of 2"),
        # One file serves a cluster and a laptop: what has nobody to share with is not told.
        (Layout(sequence_parallel=True), "tensor 1 x data 1"),
        (Layout(tensor=2, sharding="zero3"), "tensor 2 x data 1"),
        (Layout(data=4, sharding="zero2", shard_group=1), "tensor 1 x data 4"),
    ],
)
def test_a_layout_reads_as_a_sentence_does(layout: Layout, text: str) -> None:
    assert str(layout) == text


@pytest.mark.parametrize(
    ("vocab_size", "tensor", "padded"),
    [(50_257, 8, 51_200), (50_257, 1, 50_304), (1024, 8, 1024), (1025, 8, 2048), (1, 1, 128)],
)
def test_vocabulary_is_padded_to_128_per_tensor_rank(vocab_size: int, tensor: int, padded: int) -> None:
    assert padded_vocab_size(vocab_size, tensor) == padded


@pytest.mark.parametrize(("tensor", "padded"), [(1, 51_200), (2, 51_200), (8, 51_200), (3, 52_224), (16, 51_200)])
def test_vocabulary_is_padded_to_the_multiple_of_the_model_on_every_layout(tensor: int, padded: int) -> None:
    assert padded_vocab_size(50_257, tensor, 1024) == padded
    model = replace(MODEL, vocab_size=50_257, vocab_multiple=1024)
    added = parameters_per_rank(model, Layout(tensor=tensor)) - parameters_per_rank(
        replace(model, vocab_multiple=128), Layout(tensor=tensor)
    )
    assert added == (padded - padded_vocab_size(50_257, tensor)) // tensor * model.hidden_size


@pytest.mark.parametrize(("micro", "expected"), [(0, (6, 1)), (6, (6, 1)), (2, (2, 3))])
def test_a_data_ranks_sequences_are_split_into_micro_batches(micro: int, expected: tuple[int, int]) -> None:
    training = TrainingConfig(batch_size=12, micro_batch_size=micro)
    run = RunConfig(model=MODEL, layout=Layout(data=2), training=training)
    assert (run.micro_batch_size, run.num_micro_batches) == expected


def test_a_run_cannot_be_changed() -> None:
    run = RunConfig(model=MODEL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.layout.tensor = 2  # type: ignore[misc]


def test_defaults_are_the_papers() -> None:
    run = RunConfig(model=ModelConfig(**PRESETS["megatron-8.3b-24-heads"]))
    training, optimizer = run.training, run.optimizer
    assert (training.steps, training.batch_size, training.sequence_length) == (300_000, 512, 1024)
    assert (optimizer.learning_rate, optimizer.min_learning_rate, optimizer.warmup_steps) == (1.5e-4, 1e-5, 3000)
    assert (optimizer.weight_decay, optimizer.clip_norm, run.model.dropout) == (0.01, 1.0, 0.1)
    assert (run.data.train_to_validation, run.data.num_shards) == (29, 5)


def test_public_names_exist_and_are_sorted() -> None:
    names = crosscut.config.__all__
    assert all(hasattr(crosscut.config, name) for name in names)
    assert len(set(names)) == len(names)


def test_config_and_planner_import_neither_torch_nor_numpy() -> None:
    program = "import sys, crosscut.config, crosscut.planner; print(*({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def sizes(num_steps: int, **training: int) -> list[int]:
    config = TrainingConfig(steps=num_steps, **training)
    return [config.batch_size_at(step) for step in range(num_steps)]


def test_a_batch_grows_in_equal_parts_at_equal_distances() -> None:
    assert sizes(8, batch_size=8, initial_batch_size=2, ramp_steps=6) == [2, 2, 4, 4, 6, 6, 8, 8]
    assert sizes(6, batch_size=8, initial_batch_size=2, ramp_steps=4) == [2, 2, 4, 6, 8, 8], "rounded up"
    assert sizes(4, batch_size=8, initial_batch_size=2, ramp_steps=1) == [2, 8, 8, 8], "steeper than a part a step"
    assert sizes(3, batch_size=8) == [8, 8, 8]


def test_samples_before_a_step_are_those_of_the_batches_before() -> None:
    config = TrainingConfig(steps=50, batch_size=12, initial_batch_size=2, ramp_steps=33)
    seen = 0
    for step in range(50):
        assert config.samples_before(step) == seen
        seen += config.batch_size_at(step)
    assert config.batch_size_at(32) == 10
    assert config.batch_size_at(33) == 12


def test_a_micro_batch_of_a_growing_batch_fits_into_its_first_step() -> None:
    assert TrainingConfig(batch_size=16, initial_batch_size=4, ramp_steps=9).sequences_at_once(2) == 2
