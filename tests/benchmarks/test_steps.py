"""The benchmarks run, on models of seconds."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gpu_benchmark_runs_on_the_cpu(tmp_path):
    file = tmp_path / "figures.json"
    printed = run("gpu.py", "--device", "cpu", "--tiny", "--precision", "float32", "--json", str(file))
    assert "laptop-tiny" in printed
    figures = json.loads(file.read_text())
    row = figures["presets"]["laptop-tiny"]
    assert row["tokens_per_second"] > 0
    assert 0 < row["model_flops_per_second"] < figures["measured_peak"]
    assert set(figures["machine"]) == {"date", "device", "python", "torch", "cuda"}


def test_gpu_benchmark_without_a_gpu_says_what_to_do(monkeypatch):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), "--presets", "laptop-tiny"],
        capture_output=True, text=True, timeout=120, check=False, env={"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 2
    assert "Try --device cpu --tiny" in done.stderr


def test_training_step_benchmark_compares_layouts_of_the_same_loss():
    figures = json.loads(
        run(
            "train_step.py",
            "--tiny",
            "--rounds",
            "2",
            "--warmup",
            "1",
            "--json",
            "--only",
            "crosscut",
            "crosscut tensor=2",
        )
    )["figures"]
    assert figures["crosscut"]["peak_bytes"] > 0
    assert abs(figures["crosscut"]["first_loss"] - figures["crosscut tensor=2"]["first_loss"]) < 1e-4


def test_checkpoint_benchmark_runs(tmp_path):
    figures = json.loads(run("checkpoint.py", "--tiny", "--rounds", "1", "--json", "--folder", str(tmp_path)))
    saving = figures["saving"]["rounds"]
    assert {"held", "copy", "torch.save", "until written"} <= set(saving)
    assert 0 < saving["held"][0] < saving["until written"][0]
    reading = figures["reading"]
    assert [len(reading[layout]) for layout in ("tensor 4 x data 1", "tensor 1 x data 1")] == [4, 1]
    shares = [rank["share"] for rank in reading["tensor 4 x data 1"]]
    assert max(shares) < reading["tensor 1 x data 1"][0]["share"] / 2
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"
