"""A manifest may hold anything, since whoever writes it can make its hash fit: it is read, or refused with a reason."""

from dataclasses import replace
from pathlib import Path

import pytest

from crosscut.checkpoint import list_checkpoints, read_manifest
from crosscut.checkpoint.format.manifest import MANIFEST_FILE, Manifest, dump_manifest, step_of
from crosscut.checkpoint.storage import LocalFolder
from crosscut.config import CheckpointError
from tests.checkpoint.forged import edit_manifest
from tests.checkpoint.states import progress_at


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    manifest = Manifest(progress=progress_at(1), files={}, tensors={})
    (tmp_path / MANIFEST_FILE).write_bytes(dump_manifest(manifest))
    return tmp_path


def refusal(checkpoint: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        read_manifest(LocalFolder(checkpoint))
    message = str(refused.value)
    assert message.startswith(f"`{checkpoint}/{MANIFEST_FILE}` must be ")
    assert len(message) < 400 + len(str(checkpoint)), "a long value is shortened"
    return message


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"format": 2, "progress": ' + b"[" * 100_000,
        b'{"sha256": "", "format": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}",
        b"9" * 5000,
    ],
    ids=["lists", "tables", "inner", "just parsed", "digits"],
)
def test_nested_json_is_told_as_a_damaged_manifest(checkpoint, content):
    (checkpoint / MANIFEST_FILE).write_bytes(content)
    refusal(checkpoint)


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("x", "`step` must be an integer, but is 'x'"),
        (-1, "`step` must be from 0 to 2^63 - 1, but is -1"),
        (1.5, "`step` must be an integer, but is 1.5"),
        (True, "`step` must be an integer, but is True"),
        (None, "`step` must be an integer, but is None"),
        (10**22, "`step` must be from 0 to 2^63 - 1, but is 10000000000000000000000"),
        (10**4000, "`step` must be from 0 to 2^63 - 1, but is 100000"),
        ("x" * 100_000, "`step` must be an integer, but is 'xxx"),
    ],
    ids=["text", "negative", "fraction", "truth", "null", "23 digits", "4001 digits", "long text"],
)
def test_step_that_is_no_count_is_told(checkpoint, step, told):
    edit_manifest(checkpoint, lambda table: table["progress"].update(step=step))
    assert told in refusal(checkpoint)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda table: table.update(progress=[]), "`progress` must be an object, but is []"),
        (lambda table: table["progress"].update(config="x"), "`config` must be an object, but is 'x'"),
        (lambda table: table.update(files={"a": 1}), "`files.a` must be an object, but is 1"),
        (lambda table: table.update(files={"../a": {"size": 1, "sha256": ""}}), "folder, but '../a' is not"),
        (lambda table: table.update(files={"a": {"size": "x", "sha256": ""}}), "`size` must be an integer"),
        (
            lambda table: table.update(tensors={"a": {"shape": ["x"], "dtype": "", "placement": ""}}),
            "`shape[0]` must be",
        ),
        (lambda table: table.update(values=[3]), "`values[0]` must be a string, but is 3"),
        (lambda table: table.update(versions=[3]), "`versions` must be an object, but is [3]"),
        (lambda table: table.pop("progress"), "`progress` is missing"),
        (lambda table: table.update(format="x"), "`format` must be an integer, but is 'x'"),
    ],
)
def test_field_of_another_type_is_told(checkpoint, edit, told):
    edit_manifest(checkpoint, edit)
    assert told in refusal(checkpoint)


@pytest.mark.parametrize("digits", ["1" * 23, "0" * 23, "1" * 200, "1" * 5000, "\N{ARABIC-INDIC DIGIT ONE}" * 8])
def test_folder_whose_step_has_too_many_digits_is_no_checkpoint(tmp_path, digits):
    assert step_of(f"step-{digits}") is None
    if len(digits) <= 200:
        (tmp_path / f"step-{digits}").mkdir()
    assert list_checkpoints(tmp_path) == []


def test_folder_of_a_long_run_is_a_checkpoint():
    assert step_of("step-123456789012345678") == 123456789012345678


def test_the_mlps_of_an_older_checkpoint_are_its_layers(checkpoint):
    progress = replace(
        progress_at(1),
        config={"model": {"num_layers": 3, "mlp": "gelu", "mlp_pattern": ["swiglu", "gelu"] * 2}},
        identity={"model.mlp": "gelu", "model.mlp_pattern": ["swiglu", "gelu"] * 2, "model.num_layers": 3},
    )
    (checkpoint / MANIFEST_FILE).write_bytes(dump_manifest(Manifest(progress=progress, files={}, tensors={})))
    found, layers = read_manifest(LocalFolder(checkpoint)).progress, ["attention swiglu", "attention gelu"]
    assert found.config == {"model": {"num_layers": 3, "layers": layers}}
    assert found.identity == {"model.layers": layers, "model.num_layers": 3}
