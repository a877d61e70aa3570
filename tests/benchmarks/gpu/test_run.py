"""The calls of the benchmark of one GPU run on a CPU, on tiny models, and hold their goals against the figures."""

import json
import math
import shutil
import time
from typing import Any

import pytest
import torch

from benchmarks.gpu.calls import SECONDS, Call, Row, judged, main
from benchmarks.gpu.measuring.clocks import sampled, stated, summary
from benchmarks.gpu.measuring.products import shaped_products
from benchmarks.gpu.measuring.profiles import Kernel, kind_of, tables
from benchmarks.gpu.measuring.steps import is_out_of_memory
from benchmarks.gpu.plan import (
    BASE,
    CARD,
    CHANGED,
    GOALS,
    PLAIN,
    RANK,
    SHAPES,
    SHORT,
    WIDE,
    first_call,
    plain,
    second_call,
    step,
)
from benchmarks.gpu.process import ROOT
from tests.benchmarks.conftest import run_program, run_python


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_calls_run_on_the_cpu_with_base_and_changed_code(tmp_path):
    base, file = tmp_path / "before", tmp_path / "figures.json"
    shutil.copytree(ROOT / "crosscut", base / "crosscut", ignore=shutil.ignore_patterns("__pycache__"))
    with (base / "crosscut" / "__init__.py").open("a") as package:
        package.write("\nprint('this is the base', flush=True)\n")
    options = ("--device", "cpu", "--tiny", "--base", base, "--json", file)
    printed = run_program("gpu/run.py", *options, timeout=580, cwd=tmp_path).stdout
    told = json.loads(file.read_text())
    rows = {(row["name"], row["code"]): row for row in told["measurements"]}
    entries = [*first_call(), *second_call()]
    assert {*rows} == {(entry.title, entry.code) for entry in entries}
    assert printed.count("this is the base") == len({entry.title for entry in entries if entry.code == BASE})
    for (name, _), row in rows.items():
        if name.startswith("float8") and not row["turns"]:
            assert row["remarks"][0].startswith("failed: "), "this processor has no such products, and says so"
            continue
        assert row["remarks"] == []
        _require_whole(row)
    assert all(goal["measured"] > 0 for goal in told["goals"] if not goal["of"][0].startswith("float8"))
    assert {goal["met"] for goal in told["goals"]} == {None}, "the goals are about models that a CPU does not measure"
    assert f"{WIDE} ({CHANGED}) over {WIDE} ({BASE}): " in printed
    assert set(told["machine"]["source_sha256"]) == {CHANGED, BASE, "benchmarks"}


def _require_whole(row: dict[str, Any]) -> None:
    """Require the figures of an entry of this kind."""
    last = row["turns"][-1]
    if row["kind"] == "card":
        assert 0 < min(last["matrix_rates"]) <= last["matrix_rate"]
    elif row["kind"] == "products":
        assert all(product["bfloat16"] > 0 for product in last["products"])
    elif row["kind"] == "attention":
        assert all(kernel["forward"] for kernel in last["attention"])
    else:
        assert row["figures"]["tokens_per_second"] == pytest.approx(4 * 32 / row["figures"]["seconds_per_step"])
        if row["tensor"] == 1:  # of a rank of eight without messages, losses mean nothing
            assert last["first_loss"] == pytest.approx(math.log(512), abs=0.1)
        if row["profiled"]:
            assert set(row["turns"][0]["host_microseconds"]) == {
                "layer_forward", "between_layers", "layer_backward", "step"
            }  # fmt: skip
            assert row["turns"][0]["profile"]["kinds"]


def test_what_the_goals_compare_is_measured_in_the_time_of_one_call():
    first, second = first_call(), second_call()
    titles = [{(entry.name, entry.code) for entry in call} for call in (first, second)]
    for goal in GOALS:
        assert any({goal.of, goal.over} <= call for call in titles), goal
    assert sum(entry.expected for entry in first) < SECONDS
    needed = second.index(plain(WIDE)) + 1
    assert sum(entry.expected for entry in second[:needed]) < SECONDS
    assert first[0] == second[0] == CARD


def test_base_and_changed_code_alternate_and_each_begins_once():
    steps = [entry.code for entry in second_call() if entry.name == WIDE]
    assert steps == [CHANGED, BASE, BASE, CHANGED]
    assert [entry.code for entry in second_call(["one", "two"]) if entry.name == WIDE][2:4] == ["one", "two"]


def test_products_have_the_shapes_of_the_models():
    found = {(p.model, p.name): (p.m, p.k, p.n) for p in shaped_products()}
    tokens = 4 * 4096
    assert found[WIDE, "mlp.expand.weight"] == (tokens, 2048, 8192)
    assert found[RANK, "mlp.contract.weight"] == (8 * 1024, 4 * 3072 // 8, 3072)
    assert found[WIDE, "head"] == (tokens, 2048, 131_072)
    assert {model for model, _ in found} == {*SHAPES}


def test_kernels_are_summed_by_kind_and_gaps_are_idle():
    kernels = [
        Kernel("nvjet_tst_128x256_64x4_h_bz_NNT", 0.0, 2000.0),
        Kernel("triton_red_fused_native_layer_norm_0", 3000.0, 4000.0),
        Kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 3500.0, 5000.0),
        Kernel("nvjet_tst_128x256_64x4_h_bz_NNT", 5000.0, 5500.0),
        Kernel("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", 7000.0, 7250.0),
    ]
    found = tables(reversed(kernels))
    assert found["kinds"] == [
        ("products", 2, 2.5), ("attention", 1, 1.5), ("compiled", 1, 1.0), ("optimizer and norm", 1, 0.25)
    ]  # fmt: skip
    assert found["longest"][0] == ("nvjet_tst_128x256_64x4_h_bz_NNT", 2, 2.5)
    assert found["idle_ms"] == pytest.approx(1.0 + 1.5)
    assert kind_of("triton_poi_fused__scaled_dot_product_flash_attention_3") == "compiled"
    assert kind_of("Memcpy DtoD (Device -> Device)") == "copies"


def test_clocks_are_sampled_while_something_runs(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$*" in *-lms*) echo 1980, 3201, 690.5, 61; echo 1755, 3201, [N/A], 62;'
        " echo 1755, 3201, 699.5, 63; exec sleep 60;; *) echo 580.1, 700.00, 1980, 3201;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with sampled() as samples:
        time.sleep(0.3)
    assert summary(samples)["SM MHz"] == [1755, 1867.5, 1980], "a line without a figure does not count"
    assert stated()["power.limit"] == "700.00"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with sampled() as samples:
        pass
    assert summary(samples) == {}
    assert stated()["power.limit"] == "unknown"


def test_what_does_not_fit_into_the_time_is_skipped_and_named():
    call = Call({CHANGED: ROOT}, "cpu", seconds=1.0)
    told: list[str] = []
    call.run([CARD, step(WIDE)], lambda row: told.append(row.entry.title))
    assert told == ["card", WIDE]
    assert [row.remarks for row in call.rows.values()] == [["skipped: 1 of 1 s were left"]] * 2


def test_goals_are_held_against_the_figures_of_the_call():
    def turned(name: str, code: str, *seconds: float) -> Row:
        entry = next(e for e in second_call() if (e.name, e.code) == (name, code))
        return Row(entry, [{"seconds_per_step": each, "peak_bytes": 1} for each in seconds])

    call = Call({}, "cuda", about={"dense_peak": 989e12})
    plain_one = turned(f"{PLAIN}, {WIDE}", CHANGED, 0.306)
    for row in (turned(WIDE, CHANGED, 0.31, 0.29), turned(WIDE, BASE, 0.315), plain_one):
        call.rows[row.entry.title] = row
    # 4 x 4096 tokens of 11.27 GFLOP in 0.3 s are 616 TFLOP/s.
    assert call.figures(call.rows[WIDE])["of_dense_peak"] == pytest.approx(0.622, abs=2e-3)
    found = {(goal["of"][0], goal["over"]): goal for goal in judged(call)}
    assert found[WIDE, (WIDE, BASE)]["measured"] == pytest.approx(1.05)
    assert found[WIDE, (WIDE, BASE)]["met"] is True
    assert found[WIDE, (f"{PLAIN}, {WIDE}", CHANGED)]["met"] is False
    assert found[SHORT, (SHORT, BASE)]["met"] is None


def test_forecasts_are_printed_before_a_gpu_is_seen(capsys):
    main("", ["--forecast"])
    printed = capsys.readouterr().out.splitlines()
    rows = {line.split("|")[1].strip(): line for line in printed[2:]}
    assert set(rows) == {
        e.name for e in (*first_call(), *second_call()) if e.program == "crosscut" and e.kind == "step"
    }
    assert all(line.endswith("| not measured |") for line in rows.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cpu"], "`--device` must be cuda for the large models, but is cpu. Add --tiny."),
        (["--base", "{tmp}"], "`--base` must name folders that hold `crosscut`, but {tmp} does not. See --help."),
        (
            ["--base", str(ROOT), "{tmp}/changed"],
            "`--base` must name folders with different names, but two are alike. Rename one.",
        ),
    ],
)
def test_calls_refuse_options_that_do_not_fit_together(options, message, tmp_path, capsys):
    (tmp_path / "changed" / "crosscut").mkdir(parents=True)
    (tmp_path / "changed" / "crosscut" / "__init__.py").touch()
    with pytest.raises(SystemExit) as ended:
        main("", [option.format(tmp=tmp_path) for option in options])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: {message.format(tmp=tmp_path)}\n")


MISCOMPILED = """
import torch
import torch.nn.functional as F
from functools import partial
from unittest.mock import patch
from benchmarks.contenders.programs import CrosscutStep
from benchmarks.gpu.plan import WIDE, step, tiny
from benchmarks.gpu.measuring.steps import measure_step
from crosscut.training.speed import compilation
from crosscut.training.step import Trainer

torch.set_num_threads(1)

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
        print(measure_step(tiny(step(WIDE)), torch.device("cpu"))["compiled_gradients_off"])
    except ArithmeticError as error:
        print(error)

tell()
tell(partial(compile_otherwise, activation=F.relu))
tell(comparison=without_memory)
tell(comparison=with_a_gradient_that_is_none)
"""


@pytest.mark.slow
def test_no_figure_of_wrong_gradients_counts():
    off, error, unknown, of_nan = run_python(MISCOMPILED).splitlines()[-4:]
    assert float(off) < 0.05
    assert error.startswith("the compiled gradient of blocks.")
    assert unknown == "None", "what memory does not suffice for is left out, and its figures stand"
    assert (
        of_nan
        == "the compiled gradient of blocks.0.mlp.contract.weight differs from the uncompiled one by inf of its norm"
    )


ENDED = """
import time
from pathlib import Path
from benchmarks.gpu import process
from benchmarks.gpu.plan import WIDE, step, tiny

if __name__ == "__main__":
    process.start_server()
    start = time.monotonic()
    print(process.in_process(tiny(step(WIDE)), process.ROOT, "cpu", limit=0.5).reason)
    print(process.in_process(tiny(step(WIDE)), Path("elsewhere"), "cpu", limit=60).reason)
    print(time.monotonic() - start)
"""


@pytest.mark.slow
def test_a_process_that_takes_too_long_or_finds_other_code_is_ended():
    late, elsewhere, seconds = run_python(ENDED).splitlines()[-3:]
    assert late == "did not end within 0 s"
    assert elsewhere.startswith("ImportError: `crosscut` must come from elsewhere, but comes from ")
    assert float(seconds) < 120


def test_every_way_to_run_out_of_memory_is_known():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    inside = RuntimeError("backend='inductor' raised:")
    inside.__cause__ = torch.OutOfMemoryError("no more")
    assert is_out_of_memory(inside)
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
