"""The real command, in real processes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.conftest import ON_LOOPBACK, TINY, ranks_of, run_python


@pytest.fixture(scope="module")
def finished() -> list[tuple[Path, subprocess.CompletedProcess[str]]]:
    """The run of `trained`, once a test has asked for it."""
    return []


@pytest.fixture
def trained(finished, crosscut_here, book, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run over two ranks: its folder, and what the command said."""
    if not finished:
        run = tmp_path_factory.mktemp("trained") / "run"
        small = "recipe=small"  # a GPT-2, which a high learning rate can make diverge
        command = ("train", *TINY, small, f"data.text={book}", "layout.tensor=2", f"output.folder={run}")
        finished.append((run, crosscut_here(*command)))
    return finished[0]


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of that run's folder, to go on with."""
    shutil.copytree(trained[0], tmp_path / "run")
    return tmp_path / "run"


def test_readers_own_text_trains(trained):
    run, done = trained
    assert done.returncode == 0, done.stderr
    assert "perplexity" in done.stdout
    for name in ("config.toml", "metrics.jsonl", "loss.png", "sample.txt", "summary.json"):
        assert (run / name).stat().st_size > 0, name
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert any((run / "tensorboard").iterdir())
    summary = json.loads((run / "summary.json").read_text())
    assert summary["validation_perplexity_after"] < summary["validation_perplexity_before"]
    assert summary["validation_bits_per_byte_after"] < summary["validation_bits_per_byte_before"]
    assert summary["validation_bytes"] > summary["validation_tokens"] > 0
    assert done.stdout.count("bits per byte") > 2, "in the lines of the validations and in the summary"
    assert summary["layout"] == "tensor 2 x data 1"


@pytest.mark.slow  # tests/training resumes on other layouts, and tests/generation writes on two ranks
def test_trained_model_resumes_elsewhere_and_writes(crosscut_here, run):
    config, folder = str(run / "config.toml"), f"output.folder={run}"
    crosscut_here("train", config, folder, "--resume", "training.steps=6", "layout.tensor=1", "layout.data=2", status=0)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert steps == [1, 2, 3, 4, 5, 6]

    written = crosscut_here(
        "generate", str(run), "--prompt", "Fellow citizens", "--tokens", "10", "--tensor", "2", status=0
    )
    assert written.stdout.startswith("Fellow citizens")


def test_prepare_makes_the_tokens_that_train_then_uses(crosscut_here, book, tmp_path):
    options = (*TINY, f"data.text={book}", "layout.tensor=1", f"output.folder={tmp_path / 'run'}")
    assert "training and" in crosscut_here("prepare", *options, status=0).stdout
    manifest = tmp_path / "run" / "tokens" / "manifest.json"
    made = manifest.stat().st_mtime_ns
    crosscut_here("train", *options, status=0)
    assert manifest.stat().st_mtime_ns == made


@pytest.mark.slow
@pytest.mark.alone  # torchrun takes the port that was free a moment ago
def test_two_torchrun_nodes_make_one_run(book, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, **ON_LOOPBACK, "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
                "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}", "-m", "crosscut", "train",
                *TINY, f"data.text={book}", "layout.tensor=2", f"output.folder={tmp_path / 'run'}",
            ],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=120) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert "perplexity" in outputs[0][0]
    assert outputs[1][0] == ""
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4


@pytest.mark.slow  # PyTorch's recorder reads its settings once in a process, so this needs a process of its own
def test_a_profile_lets_no_line_of_pytorchs_recorder_through(book, tmp_path):
    run = ("training.steps=10", "layout.tensor=1", f"data.text={book}", f"output.folder={tmp_path / 'run'}")
    done = run_python("-m", "crosscut", "train", *TINY, *run, "--profile")
    assert done.returncode == 0, done.stderr
    assert ".cpp:" not in done.stderr


@pytest.mark.slow  # tests/launch has ranks that are killed
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks through /proc")
def test_killed_rank_ends_the_run_in_seconds_and_leaves_the_last_checkpoint(book, tmp_path):
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "crosscut", "train", *TINY, f"data.text={book}", "layout.tensor=2",
         "training.steps=100000", "training.validate_every=0", f"output.folder={run}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not list((run / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2, "both ranks must be running"
    killed = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - killed < 30, "in seconds, on a busy machine"
    assert process.returncode == 1
    assert "was ended by SIGKILL" in errors
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    step = int(newest.name.removeprefix("step-"))
    assert f"The newest checkpoint is that of step {step:,}, `{newest}`." in errors
    assert f"Continue from it with `python -m crosscut train {run}/config.toml --resume auto`." in errors


def test_diverging_run_says_where_and_keeps_the_last_good_checkpoint(crosscut_here, run):
    command = ("train", str(run / "config.toml"), f"output.folder={run}", "--resume", "training.validate_every=0")
    failed = crosscut_here(*command, "training.steps=50", "optimizer.learning_rate=2e9", status=2)
    assert "Traceback" not in failed.stderr
    assert "The loss and its gradient must be finite, but at step" in failed.stderr
    assert "book.txt:" in failed.stderr
    assert "The first non-finite value appeared in the " in failed.stderr
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert "step-00000004" in names
    crosscut_here(*command, "training.steps=5", "layout.tensor=1", status=0)


FAILING_RUN = """
import torch
from crosscut.config import Layout
from crosscut.launch import process_group
from crosscut.parallel import make_mesh
from crosscut.parallel.collectives import all_reduce
from crosscut.launch.processes import joined_rank

with joined_rank(), process_group(torch.device("cpu")):
    mesh = make_mesh(Layout(tensor=2), torch.device("cpu"))
    for step in range(1000):
        if step == 5 and mesh.tensor.rank == 1:
            raise ValueError("this rank is at fault")
        all_reduce(torch.ones(10), mesh.tensor)
"""


@pytest.mark.slow
def test_under_torchrun_the_failed_ranks_traceback_comes_once_and_first(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING_RUN)
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        env={**os.environ, **ON_LOOPBACK, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert time.monotonic() - start < 60
    assert done.returncode != 0
    assert done.stderr.count("ValueError: this rank is at fault") == 1
    assert done.stderr.count("Traceback (most recent call last)") >= 1
    first = done.stderr.index("Traceback (most recent call last)")
    assert "this rank is at fault" in done.stderr[first : first + 800]
    assert "crosscut: rank 1 failed (traceback above)." in done.stderr
