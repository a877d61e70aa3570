"""Benchmarks run as programs, on tiny models, and their figures are plausible."""

import json
import sys
from functools import partial
from typing import Any

import pytest

from tests.benchmarks.conftest import run_program

pytestmark = pytest.mark.slow  # each starts processes that import torch
run = partial(run_program, timeout=590)


def figures(program: str, *arguments: object) -> dict[str, Any]:
    """The JSON that a benchmark prints."""
    return json.loads(run(program, *arguments, "--json").stdout)  # type: ignore[no-any-return]


def test_a_training_step_has_the_same_loss_on_two_layouts():
    rounds = ("--rounds", 2, "--warmup", 1, "--only", "crosscut", "crosscut tensor=2")
    found = figures("training/train_step.py", "--tiny", *rounds)["figures"]
    assert found["crosscut"]["peak_bytes"] > 0
    assert abs(found["crosscut"]["first_loss"] - found["crosscut tensor=2"]["first_loss"]) < 1e-4


@pytest.mark.parametrize("model", ["mamba2-4096", "mixtral-1024", "qwen3-moe-1024"])
def test_one_sublayer_is_measured_beside_that_of_transformers(model):
    found = figures("training/train_step.py", "--tiny", "--model", model, "--rounds", 1)["figures"]
    assert {*found} == {"crosscut", "transformers"}
    for name, sublayer in found.items():
        assert sublayer["first_loss"] > 0, name
        assert sublayer["processor_seconds"] > 0, name
        assert 0 < sublayer["peak_bytes"] < 2**28, name  # without Python and PyTorch


def test_a_network_on_shared_images_has_the_loss_of_one_process():
    found = figures("training/images.py", "--tiny", "--rounds", 2, "--warmup", 1)
    for name in ("loss", "gradient"):
        assert found["ranks"][name] == pytest.approx(found["one process"][name], rel=1e-11), name
    assert found["speed"] > 0.0


def test_a_small_mixture_is_trained_beside_transformers():
    found = figures("training/train_step.py", "--tiny", "--model", "mixture", "--rounds", 1)["figures"]
    assert found["crosscut"]["first_loss"] == pytest.approx(found["transformers"]["first_loss"], rel=0.1)


def test_all_parts_of_a_step_are_timed_in_both_programs():
    ((_, programs),) = figures("training/step_parts.py", "--tiny", "--turns", 1)["milliseconds"].items()
    for name, parts in programs.items():
        assert all(parts[part] > 0.0 for part in ("batch", "forward", "backward", "clip", "optimizer")), name
        assert parts["forward"] + parts["backward"] < parts["step"]


def test_activations_and_messages_of_grids_are_the_planned_ones():
    rows = [line.split()[-6:] for line in run("planner/grids.py", "--tiny").stdout.splitlines()[2:]]
    assert len(rows) == 2 * 2
    for kept, planned, _, excess, recorded, expected in rows:
        assert (kept, recorded) == (planned, expected)
        assert float(excess.rstrip("%")) < 2


def test_activations_of_layers_are_equal_to_the_formulas(tmp_path):
    file = tmp_path / "figures.json"
    assert "The published formulas assume" in run("training/memory.py", "--tiny", "--json", file).stdout
    rows = json.loads(file.read_text())["activations"]
    assert len(rows) == 2 * 2 * 5  # layouts, dropout, recomputation
    for row in rows:
        assert row["held"] == pytest.approx(row["planned"], rel=0.001), row
        if row["recompute"] == "selective":
            assert row["held"] - row["weights"] == pytest.approx(row["published"], rel=0.1), row
        if row["recompute"].startswith("full"):
            assert row["held"] == row["published"]
    without_dropout = [row["held"] for row in rows if not row["dropout"]]
    for none, selective, operators, full, offloaded in (without_dropout[:5], without_dropout[5:]):
        assert none > selective > operators > full
        assert offloaded == full  # on the CPU


def test_both_recipes_have_the_same_flops_and_a_figure(tmp_path):
    file, picture = tmp_path / "figures.json", tmp_path / "recipes.png"
    study = ("recipes", "--tflop", 0.1, "--seeds", 1, "--points", 1)
    run("training/small_models.py", *study, "--json", file, "--figure", picture)
    runs = json.loads(file.read_text())["runs"]
    (paper,), (modern,) = runs["paper"], runs["modern"]
    spent = {one["steps"] * one["flops_per_step"] for one in (paper, modern)}
    assert 0.08e12 <= min(spent) <= max(spent) <= 0.1e12
    assert paper["bits_per_byte"] == min(one["bits_per_byte"] for one in runs["rates"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(600)
def test_combinations_agree_with_the_plain_run(tmp_path):
    file = tmp_path / "figures.json"
    printed = run("training/parity.py", "--steps", 3, "--tensor", 1, 2, "--json", file).stdout
    found = json.loads(file.read_text())
    assert len(found["plain"]) == 3
    runs = [row for row in found["runs"] if row["limit"] == 1e-5]
    assert len(runs) == len({tuple(row["run"]) for row in runs}) == 36
    assert all(row["difference"] <= row["limit"] for row in found["runs"])
    assert "tensor 2 x data 2, sequence parallel, zero3" in printed


def test_rounding_grows_as_precisions_get_narrower(tmp_path):
    file = tmp_path / "figures.json"
    printed = run("training/rounding.py", "--models", 1, "--seeds", 1, "--json", file).stdout
    rows = json.loads(file.read_text())
    assert [row["precision"] for row in rows] == ["float16", "bfloat16", "float8"]
    of_outputs, of_gradients = ([row[kind] for row in rows] for kind in ("outputs", "gradients"))
    assert 1e-4 < of_outputs[0] < of_outputs[1] < of_outputs[2] < 0.5
    assert 1e-4 < of_gradients[0] < of_gradients[1] < of_gradients[2] < 0.5
    assert f"{of_gradients[2]:.4f}" in printed


def test_block_attention_is_measured_beside_the_dense_mask(tmp_path):
    file = tmp_path / "figures.json"
    printed = run("training/sparse_attention.py", "--tiny", "--block-size", 16, "--json", file).stdout
    rows = json.loads(file.read_text())
    assert [row["contender"] for row in rows] == ["dense", "dense with the mask", "blocks", "rows"]
    assert "55.1% of the" in printed


def test_the_first_minutes_train_the_same_model_in_both_programs():
    programs = figures("first_minutes.py", "--tiny", "--turns", 1)["programs"]
    crosscut, plain = (programs[name]["losses"][0] for name in ("crosscut", "plain"))
    assert crosscut == pytest.approx(plain, rel=0.05)  # near the loss of a uniform guess, of other weights and windows


def test_all_contenders_score_the_same_windows():
    answer = figures("models/evaluate.py", "--tiny", "--rounds", 1, "--warmup", 0)
    assert set(answer["figures"]) == {"crosscut", "transformers labels", "transformers kept"}
    for row in answer["figures"].values():
        assert row["tokens_per_second"] > 0
        assert row["peak_bytes"] > 0
    assert set(answer["ratios"]) == {"speed", "memory"}


@pytest.mark.parametrize("model", [(), ("--hybrid",)], ids=["Llama", "hybrid"])
def test_both_programs_write_the_same_texts(model):
    answer = figures("models/generate.py", *model, "--tiny", "--rounds", 1, "--prompt", 8, "--new", 12)
    rows = {(row["program"], row["batch_size"]): row for row in answer["rows"]}
    assert set(rows) == {(program, size) for program in ("crosscut", "transformers") for size in (1, 8)}
    for size in (1, 8):
        assert rows["crosscut", size]["texts"] == rows["transformers", size]["texts"]
        assert [len(text) for text in rows["crosscut", size]["texts"]] == [12] * size
    for row in rows.values():
        assert row["tokens_per_second"] > 0
        assert row["peak_bytes"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads its memory from /proc")
def test_each_rank_has_its_share_of_a_published_model():
    ranks = figures("models/pretrained.py", "--tiny", "--tensor", 2)["ranks"]
    whole = 2 * 512 * 64 + 2 * (8 + 8 + 2 * 4) * 8 * 64 + 2 * 3 * 128 * 64
    norms = 5 * 64
    assert [rank["share"] for rank in ranks] == [4 * (whole // 2 + norms)] * 2
    assert [rank["slice"] for rank in ranks] == [4 * 256 * 64] * 2


def test_saving_holds_training_for_less_than_writing_takes(tmp_path):
    found = figures("recovery/checkpoint.py", "--tiny", "--rounds", 1, "--folder", tmp_path)
    saving, reading = found["saving"]["rounds"], found["reading"]
    assert {"held", "copy", "torch.save", "until written"} <= set(saving)
    assert 0 < saving["held"][0] < saving["until written"][0]
    assert [len(reading[layout]) for layout in ("tensor 4 x data 1", "tensor 1 x data 1")] == [4, 1]
    shares = [rank["share"] for rank in reading["tensor 4 x data 1"]]
    assert max(shares) < reading["tensor 1 x data 1"][0]["share"] / 2
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_comparing_replicas_costs_less_than_half_a_percent(tmp_path):
    file = tmp_path / "figures.json"
    assert "comparison ms" in run("recovery/guard.py", "--repeats", 5, "--json", file).stdout
    rows = json.loads(file.read_text())["layouts"]
    assert set(rows) == {"tensor 2", "data 2"}
    for row in rows.values():
        assert row["every"] == 100
        assert row["cost"] == pytest.approx(row["comparison"] / (100 * row["step"]))
        assert row["cost"] < 0.005


def test_a_missing_device_is_told():
    told = run("recovery/guard.py", "--device", "cuda", status=2).stderr  # the tests hide all GPUs
    assert "`--device` must be available on this machine" in told
    assert "Try --device cpu --tiny" in run("gpu/run.py", "--only", "models", status=2).stderr
