"""The index of a checkpoint is JSON that only gives numbers and texts, whatever stands in it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from crosscut.checkpoint import find_damage, load_checkpoint
from crosscut.checkpoint.format.index import INDEX_FILE, dump_index, parse_index
from crosscut.checkpoint.storage import LocalFolder
from crosscut.checkpoint.stored import StoredTensors
from crosscut.config import CheckpointError
from tests.checkpoint.forged import edit_index, fit_hashes
from tests.checkpoint.states import save_steps, small_state

NAME = "model.0.weight"
LARGEST = (1 << 63) - 1


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    ranks.run(1, save_steps, root, [1])
    return root / "step-00000001"


@pytest.fixture
def checkpoint(saved, tmp_path) -> Path:
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def refusal(checkpoint: Path) -> str:
    assert find_damage(LocalFolder(checkpoint)) == [], "the hashes fit"
    with pytest.raises(CheckpointError) as refused:
        StoredTensors(LocalFolder(checkpoint)).read(NAME)
    return str(refused.value)


def test_index_is_read_as_it_was_written(checkpoint):
    content = (checkpoint / INDEX_FILE).read_bytes()
    assert dump_index(parse_index(content, INDEX_FILE)) == content
    table = json.loads(content)
    assert table["values"]["optimizer.param_groups.0.lr"] == 1e-2
    assert table["tensors"][NAME]["shape"] == [64, 64]


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda tensor, part: part.update(file="../secret"), "must be directly in the checkpoint's folder"),
        (lambda tensor, part: part.update(file="/etc/passwd"), "must be directly in the checkpoint's folder"),
        (lambda tensor, part: part.update(file="absent"), "is not inside `absent`"),
        (lambda tensor, part: part.update(start=LARGEST), "is not inside `rank-0.safetensors`"),
        (lambda tensor, part: part.update(start=-1), "`start` must be from 0 to 2^63 - 1, but is -1"),
        (lambda tensor, part: part.update(start=10**23), "`start` must be from 0 to 2^63 - 1, but is 1000"),
        (lambda tensor, part: part.update(start=True), "`start` must be an integer, but is True"),
        (lambda tensor, part: part.pop("sizes"), "`sizes` is missing"),
        (
            lambda tensor, part: part.update(offsets=[1, 0]),
            "a part of `model.0.weight` lies outside the tensor's shape",
        ),
        (lambda tensor, part: part.update(sizes=[64]), "a part of `model.0.weight` lies outside the tensor's shape"),
        (lambda tensor, part: tensor.update(parts=[]), "must have 4,096 elements, but 0 are stored"),
        (lambda tensor, part: tensor.update(parts=[part, part]), "must have 4,096 elements, but 8,192 are stored"),
        (lambda tensor, part: tensor.update(shape="x"), "`shape` must be a list, but is 'x'"),
        (lambda tensor, part: tensor.update(dtype="load"), "has elements of an unknown type"),
        (
            lambda tensor, part: (tensor.update(shape=[LARGEST, 8]), part.update(sizes=[LARGEST, 8])),
            "is not inside `rank-0.safetensors`",
        ),
    ],
)
def test_part_that_cannot_be_there_is_refused(checkpoint, edit, told):
    def edit_tensor(table):
        edit(table["tensors"][NAME], table["tensors"][NAME]["parts"][0])

    edit_index(checkpoint, edit_tensor)
    message = refusal(checkpoint)
    assert message.startswith(f"`{checkpoint}")
    assert told in message


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"tensors":' * 50_000, b"[]\n", b"\xff", b""])
def test_index_that_is_no_table_is_refused(checkpoint, content):
    (checkpoint / INDEX_FILE).write_bytes(content)
    fit_hashes(checkpoint)
    assert f"`{checkpoint}/{INDEX_FILE}` must be an index of tensors, but is not: " in refusal(checkpoint)


def test_index_larger_than_any_reader_accepts_is_not_written(checkpoint, monkeypatch):
    """The save fails, and not the resume weeks later."""
    content = (checkpoint / INDEX_FILE).read_bytes()
    index = parse_index(content, INDEX_FILE)
    monkeypatch.setattr("crosscut.checkpoint.format.index.MOST_INDEX_BYTES", len(content) - 1)
    with pytest.raises(CheckpointError, match=r"must have at most 0 MiB, but has 0 MiB\. Shard the tensors over fewer"):
        dump_index(index)
    monkeypatch.setattr("crosscut.checkpoint.format.index.MOST_INDEX_BYTES", len(content))
    assert dump_index(index) == content


def load(checkpoint: Path) -> bool:
    """Whether the optimizer keeps its own settings."""
    model, optimizer = small_state(seed=5)
    before = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    load_checkpoint(checkpoint, model=model, optimizer=optimizer)
    return before == [{**group, "params": len(group["params"])} for group in optimizer.param_groups]


def forged(**settings: object) -> Callable[[dict[str, object]], None]:
    """Edit that replaces settings of the optimizer."""

    def edit(values: dict[str, object]) -> None:
        names = {f"optimizer.param_groups.0.{name}": value for name, value in settings.items()}
        assert names.keys() <= values.keys()
        values.update(names)

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        forged(betas=5),
        forged(maximize=True, amsgrad=True),
        forged(betas=[0.0, 2.0], eps=-1.0, lr=1e9, weight_decay=-5.0),
        forged(params=[]),
        forged(capturable=True, differentiable=True, fused=False, foreach=True),
        lambda values: values.pop("optimizer.param_groups.0.params"),
        lambda values: values.pop("optimizer.param_groups.0.lr"),
    ],
)
def test_settings_of_the_optimizer_are_those_of_the_run_whatever_the_checkpoint_has(ranks, checkpoint, edit):
    edit_index(checkpoint, lambda table: edit(table["values"]))
    assert ranks.run(1, load, checkpoint) == [True]


def test_index_that_was_changed_is_refused(checkpoint):
    """A repair relies on it, where the manifest with the hash of the file is lost."""
    path = checkpoint / INDEX_FILE
    path.write_bytes(path.read_bytes().replace(b'.lr":0.01', b'.lr":0.02'))
    fit_hashes(checkpoint)
    assert "its content does not match the SHA-256 at its end" in refusal(checkpoint)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b'{"sha256": "' * 40_000]
)
def test_index_that_is_nested_deeply_is_refused_though_its_hash_fits(checkpoint, content):
    from crosscut.checkpoint.format.index import _sealed

    (checkpoint / INDEX_FILE).write_bytes(_sealed(content))
    fit_hashes(checkpoint)
    assert f"`{checkpoint}/{INDEX_FILE}` must be an index of tensors, but is not: " in refusal(checkpoint)
