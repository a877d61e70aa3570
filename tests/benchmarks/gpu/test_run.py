"""The benchmark of one GPU runs on a CPU, on tiny models, and holds its goals against the figures."""

import json
import math
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.contenders.programs import PEERS_OF, crosscut_run
from benchmarks.contenders.task import Shape, Way
from benchmarks.gpu import run as gpu
from benchmarks.gpu.plan import GOALS, LLAMAS, full_plan, tiny_plan
from benchmarks.gpu.run import Budget, Row, in_process, judged, run_plan
from benchmarks.gpu.worker import attention_kernel, is_out_of_memory
from crosscut.planner import count_parameters
from tests.benchmarks.conftest import run_program, run_python
from tests.nursery import forked


@pytest.fixture
def run_tiny(tmp_path, monkeypatch):
    """Function that runs the benchmark on the CPU, in forks of the tests' server; its figures after each write."""
    written = []
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # which the benchmark changes
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    of_tests = SimpleNamespace(get_context=forked, set_start_method=print, set_forkserver_preload=print)
    monkeypatch.setattr(gpu, "mp", of_tests)

    def run(*options: str) -> list[dict[str, Any]]:
        file = tmp_path / "figures.json"
        monkeypatch.setattr(gpu, "write_whole", lambda *it: (write(*it), written.append(json.loads(file.read_text()))))
        gpu.main(["--device", "cpu", "--tiny", "--json", str(file), *options])
        return written

    write = gpu.write_whole
    return run


@pytest.mark.slow  # test_gpu_benchmark_writes_after_every_measurement runs two of its kinds
def test_gpu_benchmark_runs_on_the_cpu(run_tiny, capsys):
    told, printed = run_tiny()[-1], capsys.readouterr().out
    rows = {row["name"]: row for row in told["measurements"]}
    assert {row["group"] for row in rows.values()} == {"models", "precision", "layouts", "recomputation"}
    for name, row in rows.items():
        assert name in printed
        if name.startswith("float8") and not row["turns"]:
            assert row["remarks"][0].startswith("failed: "), "this processor has no such products, and says so"
            continue
        assert row["remarks"] == []
        figures = row["figures"]
        assert figures["tokens_per_second"] == pytest.approx(4 * 32 / figures["seconds_per_step"])
        assert 0 < figures["of_measured_rate"] < 1
    assert len(rows["crosscut, tiny"]["turns"]) == 2
    # What a rank of eight computes is an eighth of the model.
    assert rows["rank 0 of 8 ranks, 2 layers of 64"]["tensor"] == 8
    assert rows["crosscut, tiny"]["turns"][0]["first_loss"] == pytest.approx(math.log(512), abs=0.1)
    for name in ("plain, tiny", "crosscut, Llama tiny"):
        assert rows[name]["turns"][0]["first_loss"] == pytest.approx(math.log(512), abs=0.1)
    assert {goal["met"] for goal in told["goals"]} == {None}, "the goals are about models that a CPU does not measure"
    assert set(told["machine"]) >= {"date", "device", "driver", "torch", "transformers", "commit", "source_sha256"}


def test_gpu_benchmark_writes_after_every_measurement(run_tiny):
    told, last = run_tiny("--only", "layouts")
    assert [row["name"] for row in told["measurements"]] == ["rank 0 of 8 ranks, 2 layers of 64"]
    assert len(last["measurements"]) == 2
    assert told["measurements"][0]["figures"]["tokens_per_second"] > 0
    assert len(told["goals"]) == 10


def test_gpu_plan_has_llamas_only_beside_a_peer_that_trains_them():
    alone = full_plan(141 * 10**9, installed=lambda program: program not in PEERS_OF["Llama"])
    assert not [m for m in alone if m.shape.family == "Llama"]
    beside = full_plan(141 * 10**9, installed=lambda program: True)
    assert {m.name for m in beside} - {m.name for m in alone} == {
        f"{program}, {model}" for model in LLAMAS for program in ("crosscut", "torchtitan", "torchtitan eager")
    }
    for model, llama in LLAMAS.items():
        gpt2 = next(m.shape for m in alone if m.name == f"crosscut, {model.removeprefix('Llama ')}")
        sizes = [count_parameters(crosscut_run(shape, Way()).model) for shape in (llama, gpt2)]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    assert crosscut_run(Shape(family="Llama"), Way()).model.family == "Llama"


@pytest.mark.slow
def test_gpu_benchmark_runs_uncompiled_what_cannot_be_compiled():
    program = """
import json
from dataclasses import asdict, replace
from benchmarks.gpu.run import Budget, run_plan
from benchmarks.gpu.plan import tiny_plan
switching = ("model.dropout=0.1", "layout.tensor=2")  # between two random streams: no compiler follows it
plan = [replace(tiny_plan()[0], name="a", compiled=True, overrides=switching, tensor=2)]
rows = run_plan(plan, Budget(100.0), "cpu", lambda row: None)
print(json.dumps({name: [len(row.turns), row.remarks] for name, row in rows.items()}))
"""
    rows = json.loads(run_python(program).splitlines()[-1])
    assert rows["a"][0] == 0
    assert rows["a"][1][0].startswith("failed: ConfigError: `training.compile` must be")
    assert rows["uncompiled: a"] == [1, []]


MISCOMPILED = """
import torch
import torch.nn.functional as F
from dataclasses import replace
from functools import partial
from unittest.mock import patch
from benchmarks.contenders.programs import CrosscutStep
from benchmarks.gpu.plan import tiny_plan
from benchmarks.gpu.worker import measure
from crosscut.training.speed import compilation
from crosscut.training.step import Trainer

def compile_otherwise(graph, inputs, activation=None):
    for node in graph.graph.nodes:
        if activation and node.target is F.gelu:
            node.target, node.kwargs = activation, {}
    graph.recompile()
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

accumulate, compiled_gradients_off = Trainer.accumulate, CrosscutStep.compiled_gradients_off

def spoil_one(self, *arguments):
    loss = accumulate(self, *arguments)
    dict(self.model.named_parameters())["blocks.0.mlp.contract.weight"].grad.mul_(float("nan"))
    return loss

def with_a_gradient_that_is_none(*arguments):
    with patch.object(Trainer, "accumulate", spoil_one):
        return compiled_gradients_off(*arguments)

def without_memory(*arguments):
    raise torch.OutOfMemoryError("no more")

def tell(backend=compile_otherwise, comparison=compiled_gradients_off):
    compilation.BACKEND, CrosscutStep.compiled_gradients_off = backend, comparison
    try:
        print(measure(replace(tiny_plan()[0], compiled=True), "cpu")["compiled_gradients_off"])
    except ArithmeticError as error:
        print(error)

tell()
tell(partial(compile_otherwise, activation=F.relu))
tell(comparison=without_memory)
tell(comparison=with_a_gradient_that_is_none)
"""


@pytest.mark.slow
def test_gpu_benchmark_takes_no_figure_of_wrong_gradients():
    off, error, unknown, of_nan = run_python(MISCOMPILED).splitlines()[-4:]
    assert float(off) < 0.05
    assert error.startswith("the compiled gradient of blocks.")
    assert unknown == "None", "what memory does not suffice for is left out, and its figures stand"
    assert (
        of_nan
        == "the compiled gradient of blocks.0.mlp.contract.weight differs from the uncompiled one by inf of its norm"
    )


@pytest.mark.slow
def test_gpu_benchmark_ends_what_takes_too_long():
    start = time.monotonic()
    assert in_process(time.sleep, (60.0,), limit=0.5).reason == "did not end within 0 s"
    assert time.monotonic() - start < 30


def test_gpu_benchmark_knows_every_way_to_run_out_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    inside = RuntimeError("backend='inductor' raised:")
    inside.__cause__ = torch.OutOfMemoryError("no more")
    assert is_out_of_memory(inside)
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_gpu_plan_has_something_to_compare_with_before_anything_that_takes_minutes():
    plan = full_plan(150 * 10**9)
    first = {m.name: place for place, m in reversed(list(enumerate(plan))) if m.shape.family == "GPT-2"}
    whole = min(place for place, m in enumerate(plan) if m.compiled and m.program != "crosscut")
    assert max(first[f"plain eager, {model}"] for model in ("1.2B at 1024", "1.2B at 4096", "1.7B at 4096")) < whole
    assert all(place < whole for name, place in first.items() if name.startswith(("crosscut", "float8", "rank 0")))
    budget = Budget(100.0)
    budget.learn(plan[whole], 90.0)
    assert budget.fits(plan[0]), "a peer that takes long says nothing about Crosscut"
    budget.learn(plan[0], 101.0)
    assert not budget.fits(plan[0])
    budget.learn(plan[1], 10.0)
    assert budget.fits(plan[2]), "nor does the first, which fills the compiler's caches, about later ones"
    assert Budget(100.0).most == Budget(525.0).most == 110
    assert Budget(900.0).most == 180, "who has more time waits longer for peers to be compiled"


def test_gpu_benchmark_skips_what_no_longer_fits_and_says_so():
    told = []
    rows = run_plan(tiny_plan(), Budget(1.0), "cpu", told.append)
    assert set(rows) == {row.measurement.name for row in told}
    for row in rows.values():
        assert row.turns == []
        assert row.remarks == ["skipped: 1 of 1 s were left"]


def test_gpu_benchmark_refuses_to_measure_nothing(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "start_server", None)
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--device", "cpu", "--tiny", "--only", "models", "compile"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(
        "`--only` must name kinds that --tiny supports (models, precision, layouts, recomputation), but compile is not "
        "among them. Remove it, or remove --tiny.\n"
    )


@pytest.mark.slow
def test_gpu_benchmark_says_what_cannot_be_imported(tmp_path):
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("raise ImportError('no rich here')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run_program("gpu/run.py", "--device", "cpu", "--tiny", status=2, cwd=tmp_path, env=environment)
    assert "Python must find the packages that Crosscut trains with, but ImportError: no rich here" in done.stderr


def test_gpu_benchmark_names_the_kernel_of_attention():
    assert attention_kernel(96, "cpu") == "flash attention"


def test_gpu_goals_are_held_against_the_figures():
    plan = {m.name: m for m in full_plan(141 * 10**9, installed=lambda program: True)}
    assert {goal.of for goal in GOALS} <= set(plan)
    assert plan["plain, 1.2B at 1024"].shape == plan["crosscut, 1.2B at 1024"].shape
    assert plan["torchtitan, Llama 1.7B at 4096"].shape == plan["crosscut, Llama 1.7B at 4096"].shape

    def turned(name: str, seconds: float) -> Row:
        turn = {"seconds_per_step": seconds, "measured_matrix_rate": 7e14, "peak_bytes": 1}
        return Row(plan[name], [turn])

    def held(rows: dict[str, Row]) -> dict[str, tuple[float | None, bool | None]]:
        goals = judged(GOALS, rows, 989e12)
        return {goal["goal"].removeprefix("crosscut, "): (goal["measured"], goal["met"]) for goal in goals}

    # 4 x 4096 tokens of 11.27 GFLOP in 0.3 s are 616 TFLOP/s.
    seconds = {"crosscut, 1.7B at 4096": 0.30, "plain, 1.7B at 4096": 0.32, "plain eager, 1.7B at 4096": 0.60,
               "float8, 1.7B at 4096": 0.20}  # fmt: skip
    rows = {name: turned(name, value) for name, value in seconds.items()}
    found, faster = held(rows), "tokens/s over the fastest peer's"
    assert found["1.7B at 4096: utilisation of the dense peak"] == (pytest.approx(0.622, abs=2e-3), True)
    assert found[f"1.7B at 4096: {faster}"] == (pytest.approx(0.32 / 0.30), False)
    assert found[f"Llama 1.7B at 4096: {faster}"][0] is None
    assert found["float8, 1.7B at 4096: tokens/s over bfloat16's"][1] is True
    assert found["1.2B at 1024: utilisation of the dense peak"][1] is None
    llamas = {"crosscut, Llama 1.7B at 4096": 0.25, "torchtitan, Llama 1.7B at 4096": 0.30}
    with_llamas = held(rows | {name: turned(name, value) for name, value in llamas.items()})
    assert with_llamas.pop(f"Llama 1.7B at 4096: {faster}") == (pytest.approx(1.2), True)
    assert all(found[name] == goal for name, goal in with_llamas.items()), "a Llama is no peer of a GPT-2"
    del rows["plain, 1.7B at 4096"]
    alone = held(rows)[f"1.7B at 4096: {faster}"]
    assert alone == (pytest.approx(2.0), None), "a compiled peer might be faster"
