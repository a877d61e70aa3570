"""Scope of a report: the options of the run that the verified step covered, and the options that it did not cover."""

from dataclasses import replace
from typing import Any

from crosscut.config import DataConfig, Layout, OptimizerConfig, RunConfig, load_run
from crosscut.config.data import MixedFolder
from crosscut.verification import LayoutReport, ReportCheck, for_verification, scale_down, with_scope

REPORT = LayoutReport(
    layout="",
    model="",
    precision="float64",
    tolerance=1e-13,
    largest_tolerance=1e-13,
    rows=(),
    checks=(),
    first=None,
    seconds=1.0,
)
COMPILED = replace(REPORT, checks=(ReportCheck("compiled layers", None, True, "2"),))


def run_of(*, layout: dict[str, Any] | None = None, **training: Any) -> RunConfig:
    shape = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 300, "dropout": 0.0}
    training = {"compile": "off", "precision": "float64", "batch_size": 4, "sequence_length": 128, **training}
    return load_run({"model": shape, "layout": layout or {}, "training": training})


def scope(run: RunConfig, precision: str = "float64", report: LayoutReport = REPORT) -> tuple[tuple[str, ...], ...]:
    told = with_scope(report, asked=run, verified=for_verification(run, run.layout, precision))
    return told.included, told.left_out


def test_a_run_that_is_verified_whole_leaves_nothing_out() -> None:
    assert scope(run_of()) == ((), ())


def test_what_the_step_had_of_the_runs_options_is_told() -> None:
    recomputing = run_of(recompute="full", recompute_every=3, offload=("activations", "optimizer"))
    told = ("recompute full in 2 of 4 layers", "offload of activations", "offload of optimizer")
    assert scope(recomputing) == (told, ())
    assert scope(run_of(compile="on"), report=COMPILED) == (("compiled layers",), ())
    assert scope(run_of(precision="float16"), "float16") == (("a loss scale",), ())
    split = run_of(layout={"tensor": 2, "sequence_parallel": True, "symmetric_memory": True})
    assert scope(split) == (("symmetric memory",), ())
    assert scope(run_of(micro_batch_size=1)) == (("accumulation over 2 micro-batches",), ())
    assert scope(run_of(micro_batch_size=4)) == ((), ())
    assert scope(run_of(document_mask=True)) == (("documents that do not see each other",), ())
    mixture = tuple(MixedFolder(folder=name, weight=1.0) for name in ("books", "mail"))
    mixed = replace(run_of(), data=DataConfig(mixture=mixture))
    assert scope(mixed) == (("the weights of 2 token folders",), ())
    rates = OptimizerConfig(warmup_steps=0, matrix_learning_rate=0.01, embedding_learning_rate=0.1)
    assert scope(replace(run_of(), optimizer=rates)) == (("learning rates by role (embedding, matrix)",), ())
    muon = OptimizerConfig(warmup_steps=0, matrices="muon", matrix_learning_rate=0.02)
    assert scope(replace(run_of(), optimizer=muon))[0] == ("Muon", "learning rates by role (matrix)")
    averaged = OptimizerConfig(warmup_steps=0, ema_decay=0.999)
    assert scope(replace(run_of(), optimizer=averaged))[0] == ("the moving average of the weights",)


def test_a_precision_that_is_not_the_runs_is_told_with_the_option_that_has_it() -> None:
    for precision in ("float8", "bfloat16", "float16", "float32"):
        told = f"the run's precision {precision} (verify it with --precision {precision}, up to the type's rounding)"
        assert scope(run_of(precision=precision)) == ((), (told,))
        assert scope(run_of(precision=precision), precision)[1] == ()
    (told,) = scope(run_of(precision="auto"))[1]
    assert told.startswith("the run's precision on its device (bfloat16 or float32; verify each with --precision")
    assert scope(run_of(precision="auto"), "bfloat16")[1] == ()
    (told,) = scope(run_of(precision="auto", device="cpu"), "bfloat16")[1]
    assert told.startswith("the run's precision float32 (verify it with --precision float32")


def test_what_is_smaller_or_other_than_in_the_run_is_told() -> None:
    assert scope(run_of(compile="auto")) == ((), ("compiled layers (which the run uses on GPUs)",))
    assert scope(run_of(compile="auto", device="cpu"))[1] == (), "which is on no GPU"
    asked = run_of(compile="auto")
    there = for_verification(asked, asked.layout, asked.training.precision)
    there = replace(there, training=replace(there.training, device="cpu"))  # as where there are too few GPUs
    assert with_scope(REPORT, asked=asked, verified=there).left_out == ("compiled layers (which the run uses on GPUs)",)
    assert scope(run_of(sequence_length=1024))[1] == ("sequences of 1,024 tokens (128 verified)",)
    (told,) = scope(run_of(zero_initial_outputs=True))[1]
    assert told == "output projections that are zero (verified with random ones)"
    growing = run_of(initial_batch_size=2, ramp_steps=5, steps=10_000)
    told = (("accumulation over 2 micro-batches",), ("the growth of the batch from 2 to 4 sequences",))
    assert scope(growing) == told
    assert scope(run_of(initialize_from="here"))[1] == ("the weights of here (verified with random weights)",)
    run = run_of(layout={"tensor": 2, "sequence_parallel": True, "symmetric_memory": True})
    small = for_verification(scale_down(run, num_layers=1, hidden_size=32), Layout(tensor=2), "float64")
    assert with_scope(REPORT, asked=run, verified=small).left_out == (
        "symmetric memory",
        "4 layers (1 verified)",
        "hidden size 64 (32 verified)",
    )


def test_layers_whose_norms_are_at_other_places_are_not_verified() -> None:
    model = replace(run_of().model, norm_places=("before", "output"))
    run = replace(run_of(), model=model)
    for number, left_out in (
        (1, ("4 layers (1 verified)", "layers with other places of their norms (take more layers with --layers)")),
        (2, ("4 layers (2 verified)",)),
    ):
        small = for_verification(scale_down(run, num_layers=number, hidden_size=None), run.layout, "float64")
        assert with_scope(REPORT, asked=run, verified=small).left_out == left_out


def test_shorter_blocks_are_told() -> None:
    model = replace(run_of().model, layers=("sparse_attention gelu",))
    assert scope(replace(run_of(), model=model)) == ((), ("blocks of 64 tokens (16 verified)",))
