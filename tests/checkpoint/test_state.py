import json
from pathlib import Path

import pytest
import torch

from crosscut.checkpoint import (
    Progress,
    checkpoint_folder,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_model,
    read_progress,
    save_checkpoint,
)
from crosscut.config import CheckpointError, Layout, ModelConfig, OptimizerConfig
from crosscut.model import GPT, initialize
from crosscut.parallel import RandomStreams, make_mesh
from crosscut.training.optimizer import make_optimizer

MODEL = ModelConfig(num_layers=1, hidden_size=16, num_heads=4, vocab_size=300, max_sequence_length=8, dropout=0.0)
PADDED = {"tokens.weight": MODEL.vocab_size}


def make(tensor: int, seed: int, model: ModelConfig = MODEL):
    mesh = make_mesh(Layout(tensor=tensor), torch.device("cpu"))
    gpt = GPT(model, mesh=mesh, streams=RandomStreams(mesh, 0), dtype=torch.float64)
    initialize(gpt, seed)
    return mesh, gpt, make_optimizer(gpt, OptimizerConfig(learning_rate=1e-2))


def take_step(model: GPT, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(9).unsqueeze(0)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: GPT) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().full_tensor()[: MODEL.vocab_size if name == "tokens.weight" else None].clone()
        for name, p in model.named_parameters()
    }


def save(root: Path, tensor: int, step: int = 1, keep: int = 2) -> dict[str, torch.Tensor]:
    """A model after one step, saved; the weights after one more step, which the optimizer's state decides too."""
    mesh, model, optimizer = make(tensor, seed=1)
    take_step(model, optimizer)
    progress = Progress(step=step, samples=step, layout=f"tensor {tensor}")
    save_checkpoint(root, progress, model=model, optimizer=optimizer, is_first_rank=mesh.is_first_rank, keep=keep)
    take_step(model, optimizer)
    return weights(model)


def load(root: Path, tensor: int) -> tuple[Progress, dict[str, torch.Tensor]]:
    _, model, optimizer = make(tensor, seed=2)
    progress = load_checkpoint(latest_checkpoint(root), model=model, optimizer=optimizer, padded=PADDED)
    take_step(model, optimizer)
    padding = model.tokens.weight.detach().full_tensor()[MODEL.vocab_size :]
    assert not padding.any(), "the padding of the vocabulary must stay zero"
    return progress, weights(model)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 1), (2, 2), (1, 2), (2, 1), (4, 2), (1, 4)])
def test_any_tensor_size_loads_what_any_other_saved(ranks, tmp_path, saved_by, loaded_by):
    expected = ranks.run(saved_by, save, tmp_path, saved_by)[0]
    progress, actual = ranks.run(loaded_by, load, tmp_path, loaded_by)[0]
    assert progress == Progress(step=1, samples=1, layout=f"tensor {saved_by}")
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-9, atol=1e-12, msg=name)


def load_weights_only(root: Path) -> tuple[dict, dict]:
    _, model, _ = make(1, seed=2)
    load_model(latest_checkpoint(root), model=model, padded=PADDED)
    _, saved, optimizer = make(1, seed=1)
    take_step(saved, optimizer)
    return weights(model), weights(saved)


def test_model_loads_without_its_optimizer(ranks, tmp_path):
    ranks.run(1, save, tmp_path, 1)
    loaded, expected = ranks.run(1, load_weights_only, tmp_path)[0]
    for name, weight in expected.items():
        assert torch.equal(weight, loaded[name]), name


def test_half_written_checkpoint_is_never_taken_for_whole(ranks, tmp_path):
    ranks.run(1, save, tmp_path, 1)
    ranks.run(1, save_and_die, tmp_path)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    assert latest_checkpoint(tmp_path).name == "step-00000001"
    ranks.run(1, save, tmp_path, 1, 2)  # the rest of the dead one is no hindrance
    assert latest_checkpoint(tmp_path).name == "step-00000002"


def save_and_die(root: Path) -> None:
    """Stop where a killed run would: tensors are written, the folder is not renamed."""
    rename = Path.rename

    def die(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise InterruptedError
        return rename(path, target)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(Path, "rename", die)
        save(root, 1, step=2)
    assert any(path.name.endswith(".partial") for path in root.iterdir())


def load_of_another_model(root: Path) -> None:
    other = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, vocab_size=300, max_sequence_length=8)
    _, model, optimizer = make(1, seed=1, model=other)
    load_checkpoint(latest_checkpoint(root), model=model, optimizer=optimizer, padded=PADDED)


def load_of_a_wider_model(root: Path) -> None:
    other = ModelConfig(num_layers=1, hidden_size=32, num_heads=4, vocab_size=300, max_sequence_length=8)
    _, model, optimizer = make(1, seed=1, model=other)
    load_checkpoint(latest_checkpoint(root), model=model, optimizer=optimizer, padded=PADDED)


def load_of_a_larger_vocabulary(root: Path) -> None:
    other = ModelConfig(num_layers=1, hidden_size=16, num_heads=4, vocab_size=400, max_sequence_length=8)
    _, model, optimizer = make(1, seed=1, model=other)
    load_checkpoint(latest_checkpoint(root), model=model, optimizer=optimizer, padded={"tokens.weight": 400})


@pytest.mark.parametrize("job", [load_of_another_model, load_of_a_wider_model, load_of_a_larger_vocabulary])
def test_checkpoint_of_another_model_is_refused(ranks, tmp_path, job):
    ranks.run(1, save, tmp_path, 1)
    with pytest.raises(CheckpointError, match="must be a whole checkpoint of this model, but could not be read"):
        ranks.run(1, job, tmp_path)


def test_checkpoint_with_a_missing_file_is_refused(ranks, tmp_path):
    ranks.run(2, save, tmp_path, 2)
    next(latest_checkpoint(tmp_path).glob("__1_*")).unlink()
    with pytest.raises(CheckpointError, match="could not be read"):
        ranks.run(1, load, tmp_path, 1)


def test_resuming_from_nothing_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"must hold a checkpoint to resume from, but holds none\. Start without"):
        latest_checkpoint(tmp_path)


def test_folder_that_is_no_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"must be a checkpoint, but has no `progress\.json`"):
        read_progress(tmp_path)


def test_damaged_progress_says_so(tmp_path):
    (tmp_path / "progress.json").write_text(json.dumps({"step": 1}))
    with pytest.raises(CheckpointError, match="must tell a run's progress, but is damaged"):
        read_progress(tmp_path)


def test_folders_sort_by_step(tmp_path):
    assert checkpoint_folder(tmp_path, 9).name < checkpoint_folder(tmp_path, 10).name
