from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from crosscut.checkpoint import (
    Progress,
    checkpoint_folder,
    latest_good_checkpoint,
    list_checkpoints,
    load_checkpoint,
    load_model,
    read_manifest,
    save_checkpoint,
)
from crosscut.checkpoint.saving.writer import CheckpointWriter
from crosscut.checkpoint.storage import LocalFolder
from crosscut.config import CheckpointError, Layout, ModelConfig, OptimizerConfig
from crosscut.model import GPT, Batch, initialize
from crosscut.parallel import RandomStreams, make_mesh, make_reducer, shard_model
from crosscut.pretrained import require_finite
from crosscut.training.optimization.optimizer import make_optimizer

MODEL = ModelConfig(num_layers=1, hidden_size=16, num_heads=4, vocab_size=300, max_sequence_length=8, dropout=0.0)
ONE = Layout()
PADDED = {"tokens.weight": MODEL.vocab_size}


def latest(root: Path) -> LocalFolder:
    return latest_good_checkpoint(root).folder


def make(layout: Layout, seed: int, model: ModelConfig = MODEL):
    mesh = make_mesh(layout, torch.device("cpu"))
    gpt = GPT(model, mesh=mesh, streams=RandomStreams(mesh, 0), dtype=torch.float64)
    shard_model(gpt, mesh, units=gpt.blocks, always_used=True)
    initialize(gpt, seed)
    return mesh, gpt, make_optimizer(gpt, OptimizerConfig(learning_rate=1e-2))


def take_step(model: GPT, optimizer: torch.optim.Optimizer) -> None:
    """Every data rank takes the same batch, so that its gradient is already the mean."""
    tokens = torch.arange(9).unsqueeze(0)
    reducer = make_reducer(model, model.mesh)
    reducer.arm()
    model.loss(Batch.from_ids(tokens), {"tokens": 1 / (8 * model.mesh.data.size)}).backward()
    reducer.finish()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: GPT) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().full_tensor()[: MODEL.vocab_size if name == "tokens.weight" else None].clone()
        for name, p in model.named_parameters()
    }


def whole_state(model: GPT, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and moments, put together."""
    state = {}
    for name, parameter in model.named_parameters():
        kept = {"weight": parameter.detach(), **optimizer.state[parameter]}
        del kept["step"]
        for kind, tensor in kept.items():
            rows = MODEL.vocab_size if name == "tokens.weight" else None
            state[f"{name} {kind}"] = tensor.full_tensor()[:rows].clone()
    return state


def save(root: Path, layout: Layout = ONE, step: int = 1) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The state of a model that is saved after one step, and the weights after one more step, which the optimizer's
    state decides too.
    """
    mesh, model, optimizer = make(layout, seed=1)
    take_step(model, optimizer)
    state = whole_state(model, optimizer)
    progress = Progress(step=step, samples=step, layout=str(layout))
    save_checkpoint(root, progress, model=model, optimizer=optimizer, is_first_rank=mesh.is_first_rank, keep=2)
    take_step(model, optimizer)
    return state, weights(model)


def load(root: Path, layout: Layout = ONE) -> tuple[Progress, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    _, model, optimizer = make(layout, seed=2)
    progress = load_checkpoint(latest(root), model=model, optimizer=optimizer, padded=PADDED)
    state = whole_state(model, optimizer)
    take_step(model, optimizer)
    padding = model.tokens.weight.detach().full_tensor()[MODEL.vocab_size :]
    assert not padding.any(), "the padding of the vocabulary must stay zero"
    return progress, state, weights(model)


LAYOUTS = {
    "1": ONE,
    "tensor 2": Layout(tensor=2),
    "tensor 4": Layout(tensor=4),
    "data 2": Layout(data=2),
    "2 x 2": Layout(tensor=2, data=2),
    "2 x 2 split": Layout(tensor=2, data=2, sequence_parallel=True),
    "tensor 4 split": Layout(tensor=4, sequence_parallel=True),
    "zero2": Layout(data=2, sharding="zero2"),
    "zero3": Layout(tensor=2, data=2, sharding="zero3"),
    "three shares": Layout(data=3, sharding="zero3"),
    "hybrid": Layout(data=4, sharding="zero3", shard_group=2),
}
OVER_DATA = {
    LAYOUTS["zero2"]: "Shard(0) over data=2, ",
    LAYOUTS["zero3"]: "Shard(0) over data=2, ",
    LAYOUTS["three shares"]: "Shard(0) over data=3, ",
    LAYOUTS["hybrid"]: "Replicate over replica=2, Shard(0) over shard=2, ",
}
PAIRS = [
    ("1", "1"), ("tensor 2", "tensor 2"), ("1", "tensor 2"), ("tensor 2", "1"), ("tensor 4", "tensor 2"),
    ("1", "tensor 4"), ("2 x 2", "tensor 4"), ("zero3", "tensor 4"), ("2 x 2", "1"), ("2 x 2", "data 2"),
    ("tensor 4", "2 x 2"), ("1", "2 x 2"), ("data 2", "tensor 2"), ("tensor 2", "hybrid"), ("2 x 2 split", "tensor 4"),
    ("tensor 4", "2 x 2 split"), ("tensor 4 split", "data 2"), ("zero3", "1"), ("hybrid", "zero3"),
    ("zero2", "three shares"), ("three shares", "2 x 2 split"),
]  # fmt: skip


@pytest.mark.one_in(7)
@pytest.mark.parametrize(("saved_by", "loaded_by"), PAIRS)
def test_any_layout_loads_what_any_other_saved_to_the_last_bit(ranks, tmp_path, saved_by, loaded_by):
    ours, theirs = LAYOUTS[saved_by], LAYOUTS[loaded_by]
    expected, later = ranks.run(ours.world_size, save, tmp_path, ours)[0]
    for progress, actual, after_a_step in ranks.run(theirs.world_size, load, tmp_path, theirs):
        assert progress == Progress(step=1, samples=1, layout=str(ours))
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(actual[name], tensor), name
        for name, weight in later.items():
            torch.testing.assert_close(after_a_step[name], weight, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_manifest_tells_what_was_saved(ranks, tmp_path, layout):
    ranks.run(layout.world_size, save, tmp_path, layout)
    manifest = read_manifest(latest(tmp_path))
    rows = -(-MODEL.vocab_size // (128 * layout.tensor)) * 128 * layout.tensor
    tokens = manifest.tensors["optimizer.state.tokens.weight.exp_avg"]
    assert (tokens.shape, tokens.dtype) == ((rows, 16), "float64")
    shared = OVER_DATA.get(layout, "")
    assert tokens.placement == f"{shared}Shard(0) over tensor={layout.tensor}"
    norm = manifest.tensors["model.final_norm.weight"]
    assert norm.placement == f"{shared}Replicate over tensor={layout.tensor}"
    assert manifest.tensors["optimizer.state.tokens.weight.step"].placement == "whole"
    assert sorted(manifest.files) == [*(f"rank-{i}.safetensors" for i in range(layout.world_size)), "tensors.json"]
    assert set(manifest.versions) == {"python", "torch", "crosscut"}


def test_other_programs_can_read_it(tmp_path, ranks):
    """Each rank's file is a safetensors file: its library needs nothing of ours."""
    ranks.run(2, save, tmp_path, Layout(tensor=2))
    parts = [load_file(latest(tmp_path).path / f"rank-{rank}.safetensors")["model.tokens.weight"] for rank in range(2)]
    ranks.run(1, save, tmp_path / "one", ONE)
    ours = load_file(latest(tmp_path / "one").path / "rank-0.safetensors")["model.tokens.weight"]
    whole = torch.cat(parts)
    torch.testing.assert_close(whole[: MODEL.vocab_size], ours[: MODEL.vocab_size], rtol=1e-9, atol=1e-12)


def load_without_pickle(root: Path, layout: Layout) -> tuple[dict, dict]:
    _, model, _ = make(layout, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.distributed_c10d._pickler", lambda *_: pytest.fail("a message is pickled"))
        load_model(latest(root), model=model, padded=PADDED)
        require_finite(model, root, is_published=False)
    _, saved, optimizer = make(layout, seed=1)
    take_step(saved, optimizer)
    return weights(model), weights(saved)


@pytest.mark.parametrize("layout", [ONE, Layout(tensor=2)], ids=str)
def test_model_loads_without_its_optimizer_and_ranks_send_each_other_nothing_pickled(ranks, tmp_path, layout):
    ranks.run(layout.world_size, save, tmp_path, layout)
    for loaded, expected in ranks.run(layout.world_size, load_without_pickle, tmp_path, layout):
        for name, weight in expected.items():
            assert torch.equal(weight, loaded[name]), name


def test_half_written_checkpoint_is_never_taken_for_whole(ranks, tmp_path):
    ranks.run(1, save, tmp_path)
    ranks.run(1, save_and_die, tmp_path)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    assert latest(tmp_path).name == "step-00000001"
    ranks.run(1, save, tmp_path, ONE, 2)  # the rest of the dead one is no hindrance
    assert latest(tmp_path).name == "step-00000002"


def save_and_die(root: Path) -> None:
    """Stop where a killed run would: tensors are written, the folder is not renamed."""
    rename = Path.rename

    def die(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise InterruptedError
        return rename(path, target)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError):
        patch.setattr(Path, "rename", die)
        patch.setattr(CheckpointWriter, "discard", lambda writer: None)  # a killed run does not clean up
        save(root, step=2)
    assert any(path.name.endswith(".partial") for path in root.iterdir())


def load_of_another_model(root: Path, changes: dict[str, int]) -> None:
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 4, "vocab_size": 300, "max_sequence_length": 8}
    other = ModelConfig(**sizes | changes)
    _, model, optimizer = make(ONE, seed=1, model=other)
    load_checkpoint(latest(root), model=model, optimizer=optimizer, padded={"tokens.weight": other.vocab_size})


@pytest.mark.parametrize("changes", [{"num_layers": 2}, {"hidden_size": 32}, {"vocab_size": 400}], ids=str)
def test_checkpoint_of_another_model_is_refused(ranks, tmp_path, changes):
    ranks.run(1, save, tmp_path)
    with pytest.raises(CheckpointError, match="must be a complete checkpoint of this model, but cannot be read"):
        ranks.run(1, load_of_another_model, tmp_path, changes)


def test_file_that_goes_missing_before_it_is_read_is_told(ranks, tmp_path):
    ranks.run(2, save, tmp_path, Layout(tensor=2))
    folder = latest(tmp_path)
    next(folder.path.glob("rank-1.*")).unlink()
    with pytest.raises(CheckpointError, match=r"cannot be read: No such file or directory \(`.*rank-1\.safetensors`\)"):
        ranks.run(1, load_from, folder.path)


def load_from(folder: Path) -> None:
    _, model, optimizer = make(ONE, seed=2)
    load_checkpoint(folder, model=model, optimizer=optimizer, padded=PADDED)


def test_resuming_from_nothing_says_so(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"must hold a checkpoint, but holds none\. Choose another folder, or start"
    ):
        latest(tmp_path)


def test_folder_that_is_no_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"must be a checkpoint, but `manifest\.json` is missing"):
        read_manifest(LocalFolder(tmp_path))


def test_folders_sort_by_step(tmp_path):
    assert checkpoint_folder(tmp_path, 9).name < checkpoint_folder(tmp_path, 10).name
