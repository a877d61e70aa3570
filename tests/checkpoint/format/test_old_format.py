"""Checkpoints of format 1 load at any layout, and no program in their pickles runs.

`format-1.tar.xz` holds a checkpoint that Crosscut wrote before format 2, on two tensor ranks. Its numbers follow a
pattern (`pattern`), so that every element has its own value.
"""

import io
import pickle
import re
import struct
import tarfile
from pathlib import Path

import pytest
import torch

from crosscut.checkpoint import Progress, checkpoint_folder, load_checkpoint, require_undamaged, save_checkpoint
from crosscut.checkpoint.format.old_format import OLD_INDEX_FILE, read_old_index
from crosscut.checkpoint.maintenance.comparison import compare
from crosscut.checkpoint.storage import LocalFolder
from crosscut.checkpoint.stored import StoredTensors
from crosscut.config import CheckpointError, Layout, ModelConfig, OptimizerConfig
from crosscut.model import GPT
from crosscut.parallel import RandomStreams, make_mesh, shard_model
from crosscut.training.optimization.optimizer import make_optimizer, rules_of, set_learning_rate
from tests.checkpoint.forged import Program, fit_hashes, with_old_index
from tests.checkpoint.test_state import LAYOUTS
from tests.endless import ENDLESS
from tests.memory import at_most

ARCHIVE = Path(__file__).with_name("format-1.tar.xz")
MODEL = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=100, max_sequence_length=8, dropout=0.0)
PADDED = {"tokens.weight": MODEL.vocab_size}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "step-00000003"


def pattern(shape: torch.Size, kind: str, number: int) -> torch.Tensor:
    start = 1000 * number + {"weight": 0, "exp_avg": 100_000, "exp_avg_sq": 200_000}[kind]
    return torch.arange(shape.numel(), dtype=torch.float64).reshape(shape) / 4 + start


def require_pattern(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, (name, parameter) in enumerate(model.named_parameters()):
        for kind, tensor in {"weight": parameter.detach(), **optimizer.state[parameter]}.items():
            if kind == "step":
                assert tensor == 1
                continue
            whole, expected = tensor.full_tensor(), pattern(tensor.shape, kind, number)
            rows = MODEL.vocab_size if name in PADDED else len(whole)
            assert torch.equal(whole[:rows], expected[:rows]), (name, kind)


def make(layout: Layout, dtype: torch.dtype = torch.float64) -> tuple[GPT, torch.optim.Optimizer]:
    mesh = make_mesh(layout, torch.device("cpu"))
    model = GPT(MODEL, mesh=mesh, streams=RandomStreams(mesh, 0), dtype=dtype)
    shard_model(model, mesh, units=model.blocks, always_used=True)
    return model, make_optimizer(model, OptimizerConfig(), rules=rules_of(MODEL, OptimizerConfig()))


def load(folder: Path, layout: Layout) -> Progress:
    model, optimizer = make(layout)
    progress = load_checkpoint(folder, model=model, optimizer=optimizer, padded=PADDED)
    require_pattern(model, optimizer)
    return progress


@pytest.mark.parametrize("layout", ["1", "tensor 4", "zero3"])
def test_old_checkpoint_loads_on_any_layout(ranks, old, layout):
    require_undamaged(LocalFolder(old))
    progress = ranks.run(LAYOUTS[layout].world_size, load, old, LAYOUTS[layout])[0]
    assert (progress.step, progress.samples, progress.seed) == (3, 12, 7)


def load_and_save(folder: Path, root: Path) -> None:
    model, optimizer = make(Layout(tensor=2), torch.float32)
    set_learning_rate(optimizer, 0.01)  # of the old checkpoint; an optimizer keeps its own settings
    progress = load_checkpoint(folder, model=model, optimizer=optimizer, padded=PADDED)
    save_checkpoint(root, progress, model=model, optimizer=optimizer, is_first_rank=model.mesh.is_first_rank, keep=2)


def test_old_checkpoint_saved_again_has_the_same_tensors_and_values(ranks, old, tmp_path):
    ranks.run(2, load_and_save, old, tmp_path / "new")
    new = checkpoint_folder(tmp_path / "new", 3)
    assert {*new.files()} == {"manifest.json", "rank-0.safetensors", "rank-1.safetensors", "tensors.json"}
    assert StoredTensors(new).values["optimizer.param_groups.0.betas"] == [0.9, 0.999]
    assert compare(LocalFolder(old), new).same


class Named:
    """A pickle that names something without calling it."""

    def __init__(self, module: str, name: str) -> None:
        self.content = b"\x80\x04" + b"".join(pickle.dumps(text, 4)[2:-1] for text in (module, name)) + b"\x93."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("torch.distributed.checkpoint.metadata", "os.system"),  # reached through a module that is known
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
        ("torch.serialization", "load"),
        ("torch", "hub.load"),
        ("copyreg", "_reconstructor"),
        ("functools", "partial"),
    ],
)
def test_old_index_that_names_anything_else_is_refused(old, module, name):
    with_old_index(old, Named(module, name).content)
    with pytest.raises(
        CheckpointError, match=r"must be the index of a checkpoint, but is not: it names `.*`, which no"
    ):
        read_old_index(LocalFolder(old))


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04\x8c\x01aQ.",  # a persistent id
        b"\x80\x02\x82\x01.",  # a number of copyreg's register of extensions
        pickle.dumps({"storage_data": {}}),
        pickle.dumps([]),
        b"(" * 100_000,
        b"",
    ],
    ids=["persistent", "extension", "table", "list", "marks", "empty"],
)
def test_old_index_that_is_no_index_is_refused(old, content):
    with_old_index(old, content)
    with pytest.raises(CheckpointError, match="must be the index of a checkpoint, but is not: "):
        read_old_index(LocalFolder(old))


def test_program_in_an_old_index_does_not_run(old, tmp_path):
    with_old_index(old, pickle.dumps(Program(tmp_path / "mark")))
    with pytest.raises(CheckpointError, match=r"it names `posix\.mkdir`, which no checkpoint needs"):
        StoredTensors(LocalFolder(old))
    assert not (tmp_path / "mark").exists()


def test_program_in_a_value_of_an_old_checkpoint_does_not_run(old, tmp_path):
    """The value's bytes stand in a file beside the tensors'."""
    metadata = pickle.loads((old / OLD_INDEX_FILE).read_bytes())
    place = next(place for index, place in metadata.storage_data.items() if index.offset is None)
    content = io.BytesIO()
    torch.save(Program(tmp_path / "mark"), content)
    (old / "__2_0.distcp").write_bytes(content.getvalue())
    place.relative_path, place.offset, place.length = "__2_0.distcp", 0, len(content.getvalue())
    with_old_index(old, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="must be the index of a checkpoint, but is not: "):
        StoredTensors(LocalFolder(old))
    assert not (tmp_path / "mark").exists()


def move(old: Path, name: str, *, values: bool, **place: int) -> None:
    """Let the index place all values, or all parts of tensors, into one file."""
    metadata = pickle.loads((old / OLD_INDEX_FILE).read_bytes())
    for index, found in metadata.storage_data.items():
        if (index.offset is None) == values:
            vars(found).update(place, relative_path=name)
    (old / OLD_INDEX_FILE).write_bytes(pickle.dumps(metadata))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [OLD_INDEX_FILE, "more.distcp"])
@pytest.mark.parametrize("kind", ENDLESS)
def test_file_of_an_old_checkpoint_whose_reading_never_ends_is_told_at_once(old, name, kind):
    move(old, "more.distcp", values=True, offset=0, length=10)
    (old / name).unlink(missing_ok=True)
    ENDLESS[kind](old / name)
    with pytest.raises(CheckpointError, match=re.escape(str(old))):
        StoredTensors(LocalFolder(old))


@pytest.mark.parametrize("values", [True, False])
def test_sparse_file_of_an_old_checkpoint_takes_no_memory(old, values):
    """A value is read as a whole. So is the directory of a tensor's archive, whose size stands at the archive's end."""
    size, ends = 1 << 34, 56 + 20 + 22
    with (old / "more.distcp").open("wb") as file:
        file.seek(size - ends)
        file.write(b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1, 1, size - ends, 0))
        file.write(b"PK\6\7" + struct.pack("<IQI", 0, size - ends, 1))
        file.write(b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, 0xFFFFFFFF, 0xFFFFFFFF, 0))
        assert file.tell() == size
    move(old, "more.distcp", values=values, offset=0, length=size)
    with at_most(1 << 26), pytest.raises(CheckpointError, match=r"is larger than the allowed 16,777,216 bytes"):
        stored = StoredTensors(LocalFolder(old))
        stored.read(next(iter(stored.tensors)))


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", ".."])
def test_old_index_reads_no_file_outside_its_folder(old, path):
    metadata = pickle.loads((old / OLD_INDEX_FILE).read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = path
    (old / OLD_INDEX_FILE).write_bytes(pickle.dumps(metadata))
    fit_hashes(old)
    with pytest.raises(CheckpointError, match="every file must be directly in the checkpoint's folder"):
        StoredTensors(LocalFolder(old))


def test_pickle_cannot_change_the_classes_of_the_next_one(old):
    """A pickle may set attributes of a class that it has named; the class is a new one for each pickle."""
    content = (old / OLD_INDEX_FILE).read_bytes()
    where = pickle.dumps("torch.distributed.checkpoint.metadata", 4)[2:-1] + pickle.dumps("MetadataIndex", 4)[2:-1]
    (old / OLD_INDEX_FILE).write_bytes(b"\x80\x04" + where + b"\x93N}\x8c\x08__hash__K\x05s\x86b.")
    with pytest.raises(CheckpointError):
        read_old_index(LocalFolder(old))
    (old / OLD_INDEX_FILE).write_bytes(content)
    assert read_old_index(LocalFolder(old)).tensors
