"""Checkpoints on object stores: the same guarantees where nothing can be renamed."""

import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import fsspec
import pytest
import torch

from crosscut.checkpoint import (
    checkpoint_folder,
    find_damage,
    folder_at,
    latest_good_checkpoint,
    list_checkpoints,
    load_checkpoint,
)
from crosscut.checkpoint.folders import remove_checkpoint
from crosscut.checkpoint.format.manifest import MANIFEST_FILE
from crosscut.checkpoint.maintenance.inspection import checkpoints_at
from crosscut.checkpoint.saving.writer import CheckpointWriter
from crosscut.checkpoint.storage import LocalFolder, ObjectFolder, storage_errors_told
from crosscut.config import CheckpointError
from crosscut.pretrained import find_model
from tests.checkpoint.states import save_steps, small_state, step
from tests.refusals import refusal


def names(root: str) -> list[str]:
    return [folder.name for folder in list_checkpoints(root)]


def save_and_load(root: str) -> None:
    """A run of three checkpoints, and the state of the newest in another model."""
    save_steps(root, [1, 2, 3], keep=2)
    expected, optimizer = small_state()
    for _ in range(3):
        step(expected, optimizer)
    model, optimizer = small_state(seed=5)
    good = latest_good_checkpoint(root)
    load_checkpoint(good.folder, model=model, optimizer=optimizer)
    assert good.manifest.progress.step == 3
    for ours, theirs in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def damage_in_memory() -> None:
    root = "memory://damaged/run"
    save_steps(root, [1, 2])
    store = fsspec.filesystem("memory")
    store.pipe_file("/damaged/run/step-00000002/rank-0.safetensors", b"short")
    assert latest_good_checkpoint(root).folder.name == "step-00000001"
    store.rm_file(f"/damaged/run/step-00000001/{MANIFEST_FILE}")
    assert names(root) == ["step-00000002"], "without its manifest it is none"
    with pytest.raises(CheckpointError, match="must hold an undamaged checkpoint, but every checkpoint is damaged"):
        latest_good_checkpoint(root)


def interrupted_in_memory() -> None:
    """A save that dies before its manifest is written leaves no checkpoint, and is no hindrance."""
    root = "memory://interrupted/run"
    save_steps(root, [1])
    write = ObjectFolder.write
    with pytest.MonkeyPatch.context() as patch:

        def die(self: ObjectFolder, name: str, content: bytes) -> None:
            if name == MANIFEST_FILE:
                raise OSError("the connection is gone")
            write(self, name, content)

        patch.setattr(ObjectFolder, "write", die)
        patch.setattr(CheckpointWriter, "discard", lambda writer: None)  # a killed run does not clean up
        with pytest.raises(CheckpointError, match="the connection is gone"):
            save_steps(root, [2])
    assert checkpoint_folder(root, 2).files(), "a part was written"
    assert names(root) == ["step-00000001"]
    save_steps(root, [2])
    assert names(root) == ["step-00000001", "step-00000002"]
    assert find_damage(checkpoint_folder(root, 2)) == []


def left_over_in_memory() -> None:
    """A killed run leaves parts under final names; one of a later step may be of a run that was taken up again."""
    root = "memory://left/run"
    save_steps(root, [2])
    store = fsspec.filesystem("memory")
    for number in (1, 3, 5):
        (folder_at(root) / f"step-{number:08d}").begin(MANIFEST_FILE)
        store.pipe_file(f"/left/run/step-{number:08d}/rank-0.safetensors", b"half")
    store.pipe_file("/left/run/notes/text", b"not ours")
    save_steps(root, [4])
    assert folder_at(root).folders() == ["notes", "step-00000002", "step-00000004", "step-00000005"]


@pytest.mark.parametrize("work", [damage_in_memory, interrupted_in_memory, left_over_in_memory])
def test_a_store_in_memory_has_the_guarantees_of_a_disk(ranks, work):
    ranks.run(1, work)


def test_memory_store_saves_and_loads(ranks):
    ranks.run(1, save_and_load, "memory://bucket/run")


def test_what_object_stores_do_differently_is_done(monkeypatch):
    """They remember listings, a folder at their top is a bucket that the user makes, and their errors are their own."""
    store, forgotten = fsspec.filesystem("memory"), []
    monkeypatch.setattr(type(store), "invalidate_cache", lambda self, path=None: forgotten.append(path))
    folder = ObjectFolder("memory://no-bucket/run")
    assert (folder.files(), len(forgotten)) == ({}, 1)
    made: list[str] = []
    monkeypatch.setattr(type(store), "makedirs", lambda self, path, exist_ok=False: made.append(path))
    for protocol, expected in (("s3", []), (("gcs", "gs"), []), ("memory", ["/no-bucket/run"])):
        monkeypatch.setattr(type(store), "protocol", protocol)
        folder.begin(MANIFEST_FILE)
        assert made == expected
    told = "`memory://no-bucket/run` must be writable, but is not: No bucket"
    with pytest.raises(CheckpointError, match=told), storage_errors_told(folder, "writable"):
        raise type("ClientError", (Exception,), {})("No bucket.")


def test_a_store_that_does_not_answer_is_told(monkeypatch):
    def refuse(self: object, path: str, **_options: object) -> NoReturn:
        raise type("NoCredentialsError", (Exception,), {})("Unable to locate credentials.")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "ls", refuse)
    told = "`memory://bucket/run` must be a folder that can be read, but is not: Unable to locate credentials."
    assert refusal(CheckpointError, checkpoints_at, "memory://bucket/run") == told
    assert refusal(CheckpointError, find_model, "memory://bucket/run") == told


def test_places_are_told_apart(tmp_path):
    assert folder_at("runs/a") == folder_at("file://runs/a") == folder_at("local://runs/a")
    assert isinstance(folder_at(tmp_path), LocalFolder)
    assert folder_at("memory://a/b/") == ObjectFolder("memory://a/b")
    assert folder_at(ObjectFolder("memory://a")) / "b" == ObjectFolder("memory://a/b")


def test_url_of_an_unknown_kind_is_told():
    assert refusal(CheckpointError, folder_at, "ftpx://somewhere/run").startswith(
        "`checkpoint.folder` must be a path or a URL that fsspec can open, but is `ftpx://somewhere/run`: "
    )


def test_url_that_needs_a_package_says_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    importlib.import_module("fsspec.registry")  # whose name in the package is a dictionary
    monkeypatch.setattr(sys.modules["fsspec.registry"], "_registry", {})
    with pytest.raises(CheckpointError, match=r"Run `.* -m pip install -e .*\[s3\]'`\."):
        folder_at("s3://bucket/run")


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    """A server that speaks the S3 protocol over HTTP on loopback, in a process of its own."""
    pytest.importorskip("s3fs", reason="needs crosscut[s3]")
    pytest.importorskip("moto.server", reason="the S3 server comes with crosscut[dev]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        else:
            raise TimeoutError("the S3 server did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


def s3_environment(endpoint: str) -> dict[str, str]:
    """Environment of a program that finds the endpoint and the credentials as a user's run does."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "FSSPEC_S3_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


S3_PROGRAM = """
import sys, torch
from crosscut.launch import process_group
from tests.checkpoint import test_storage as t
import fsspec
with process_group(torch.device("cpu")):
    t.on_s3()
"""


def on_s3() -> None:
    """Save, load, damage, keep and drop, on the store that the environment names."""
    fsspec.filesystem("s3").mkdir("bucket")
    root = "s3://bucket/team/run"
    save_and_load(root)
    assert names(root) == ["step-00000002", "step-00000003"], "older ones are dropped"
    store = fsspec.filesystem("s3")
    name = "bucket/team/run/step-00000003/rank-0.safetensors"
    content = bytearray(store.cat_file(name))
    content[1000] ^= 1
    store.pipe_file(name, bytes(content))
    found = find_damage(checkpoint_folder(root, 3))
    assert len(found) == 1
    assert "step-00000003/rank-0.safetensors` must have the SHA-256" in found[0]
    assert latest_good_checkpoint(root).folder.name == "step-00000002"
    store.rm_file(f"bucket/team/run/step-00000002/{MANIFEST_FILE}")
    assert names(root) == ["step-00000003"]
    save_steps(root, [2])
    assert find_damage(checkpoint_folder(root, 2)) == []
    assert remove_checkpoint(checkpoint_folder(root, 2)) == ""
    assert names(root) == ["step-00000003"]
    with pytest.raises(CheckpointError, match=r"must be writable, but is not: The specified bucket does not exist"):
        save_steps("s3://no-such-bucket/run", [1])
    print("all done")


def run_on_s3(endpoint: str, *command: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, *command],
        env=s3_environment(endpoint),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == status, result.stderr
    return result


@pytest.mark.slow  # imports s3fs, a server, and torch once more; the tests above use a store in memory
def test_s3_server_holds_checkpoints(s3_endpoint):
    assert run_on_s3(s3_endpoint, "-c", S3_PROGRAM).stdout.endswith("all done\n")


@pytest.mark.slow
def test_run_of_two_ranks_keeps_its_checkpoints_on_s3(s3_endpoint, tmp_path):
    """The whole path, by the command: two ranks write, the newest is damaged, one rank goes on from the older one."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(6):
        (text / f"{number}.txt").write_text(" ".join(f"word{i % 97} and {i * number % 31}" for i in range(4000)))
    settings = (
        "model.num_layers=1", "model.hidden_size=32", "model.num_heads=4", "model.max_sequence_length=32",
        "data.vocab_size=300", f"data.text={text}", "data.num_shards=1", "data.train_to_validation=3",
        "training.steps=4", "training.batch_size=4", "training.sequence_length=32", "training.validation_sequences=4",
        "optimizer.warmup_steps=1", "output.sample_tokens=3", f"output.folder={tmp_path}/run",
        "checkpoint.every=2", "checkpoint.folder=s3://two-ranks/run",
    )  # fmt: skip
    run, crosscut = partial(run_on_s3, s3_endpoint), ("-m", "crosscut")
    run("-c", "import fsspec; fsspec.filesystem('s3').mkdir('two-ranks')")
    run(*crosscut, "train", *settings, "layout.tensor=2")
    assert run(*crosscut, "checkpoint", "verify", "s3://two-ranks/run").stdout.count("good") == 2
    run("-c", "import fsspec; fsspec.filesystem('s3').rm_file('two-ranks/run/step-00000004/rank-1.safetensors')")
    damaged = run(*crosscut, "checkpoint", "verify", f"{tmp_path}/run", status=1)
    assert "step-00000004/rank-1.safetensors` must exist, but is missing." in damaged.stdout
    resumed = run(
        *crosscut, "train", str(tmp_path / "run" / "config.toml"), "--resume", "training.steps=6", "layout.tensor=1"
    )
    assert "Continuing from `s3://two-ranks/run/step-00000002`" in resumed.stderr
    assert run(*crosscut, "checkpoint", "verify", f"{tmp_path}/run").stdout.count("good") == 2
    assert run(*crosscut, "generate", str(tmp_path / "run"), "--tokens", "3").stdout


@pytest.mark.parametrize("kind", ["pipe", "link", "dangling link", "socket"])
def test_nothing_is_written_through_a_pipe_or_a_link(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)  # a socket's name must be short
    (tmp_path / "outside").write_bytes(b"kept")
    if kind == "pipe":
        os.mkfifo("manifest.json")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("manifest.json")
    else:
        Path("manifest.json").symlink_to("outside" if kind == "link" else "nowhere")
    LocalFolder(tmp_path).write("manifest.json", b"{}")
    assert (tmp_path / "manifest.json").read_bytes() == b"{}"
    assert not (tmp_path / "manifest.json").is_symlink()
    assert (tmp_path / "outside").read_bytes() == b"kept"
    assert not (tmp_path / "nowhere").exists()
