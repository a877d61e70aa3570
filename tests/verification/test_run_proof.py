"""A run's model verified, without a fault: every layout, every precision, and what is refused."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from crosscut.config import IGNORED, ConfigError, Layout, LayoutError, TrainingError, load_run
from crosscut.kernels import ORDINARY, Products
from crosscut.model.heads import projection
from crosscut.planner import step_traffic
from crosscut.training.loss_scale import LossScale
from crosscut.training.precision import resolve_on
from crosscut.training.requirements import require_capabilities
from crosscut.verification import LayoutReport, for_verification, scale_down, verify_runs
from crosscut.verification.batches.made_up import made_up_batch
from tests.ranks import RankPool
from tests.verification.mutations import MIXED, Patch, g_missing, instead_of, verify_planted
from tests.verification.runs import BERT, CPU, LLAMA, MASKED, MODERN, proven, tiny_run, verify_run

QUICK = Layout(data=2, sharding="zero3")
"""Other quick tests verify one rank, tensor ranks, context ranks and stages of a pipeline."""
SLOW = [
    Layout(),
    Layout(tensor=2),
    Layout(tensor=2, data=2, sequence_parallel=True),
    Layout(tensor=4),
    Layout(data=4, sharding="zero3", shard_group=2),
    Layout(data=2),
    Layout(tensor=2, sequence_parallel=True),
    Layout(tensor=2, data=2),
    Layout(tensor=4, sequence_parallel=True),
    Layout(data=2, sharding="zero2"),
    Layout(tensor=2, data=2, sharding="zero2"),
    Layout(tensor=2, data=2, sharding="zero2", sequence_parallel=True),
    Layout(tensor=2, data=2, sharding="zero3"),
    Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True),
    Layout(data=4, sharding="zero2", shard_group=2),
]
LAYOUTS = [QUICK, *(pytest.param(layout, marks=pytest.mark.slow) for layout in SLOW)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_is_the_uncut_model(ranks: RankPool, layout: Layout) -> None:
    reports = ranks.run(layout.world_size, verify_run, for_verification(tiny_run(), layout, "float64"))
    assert reports.count(reports[0]) == len(reports), "every rank gets the same report"
    report = reports[0]
    assert report.same, report.first
    assert report.first is None
    modules = [row.module for row in report.rows]
    assert modules[:3] == ["tokens", "positions", "dropout"]
    assert modules[-3:] == ["final_norm", "GPT", "loss"]
    assert {row.module for row in report.rows if row.forward is None} == set()
    names = ["loss", "gradient norm", "clipped gradients", "parameters after a step", "copies on all ranks"]
    assert [check.name for check in report.checks] == [*names, "random numbers", "collectives"]
    assert "7 draws on each rank" in report.checks[5].told


RATES = {"embedding_learning_rate": 3e-3, "matrix_learning_rate": 1e-4, "scalar_learning_rate": 1e-3}
MUON = {"matrices": "muon", "matrix_learning_rate": 0.02}
RECIPES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "rates": (Layout(tensor=2, data=2, sharding="zero3"), {"optimizer": RATES}),
    "rates, untied": (Layout(tensor=2), {"tied": False, "optimizer": {**RATES, "head_learning_rate": 1e-5}}),
    "Muon": (Layout(tensor=2), {"optimizer": MUON}),
    "Muon, tensor 4": (Layout(tensor=4), {"optimizer": MUON}),
    "Muon, data 2": (Layout(data=2), {"optimizer": MUON}),
    "Muon, zero3": (Layout(data=2, sharding="zero3"), {"optimizer": MUON}),
    "average": (Layout(tensor=4), {"optimizer": {"ema_decay": 0.999}}),
    "average, Muon, sharded": (
        Layout(tensor=2, data=2, sharding="zero3"),
        {**LLAMA, "num_kv_heads": 2, "optimizer": {**MUON, "ema_decay": 0.999}},
    ),
    "linear": (Layout(data=2), {"optimizer": {"schedule": "linear", "warmup_steps": 3}}),
    "wsd": (Layout(tensor=2), {"optimizer": {"schedule": "wsd", "decay_steps": 8}}),
    "growing batch": (Layout(data=2), {"training": {"initial_batch_size": 4, "ramp_steps": 2}}),
    "fan-in, zero outputs": (
        Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True),
        {"tied": False, "training": {"initial_spread": "fan_in", "zero_initial_outputs": True}},
    ),
    "z-loss": (Layout(tensor=4), {"training": {"z_loss": 0.01}}),
    "padded vocabulary, masked": (Layout(tensor=2, data=2), {**BERT, **MASKED, "vocab_multiple": 384}),
    "z-loss, accumulated": (Layout(data=2), {"training": {"z_loss": 0.01, "micro_batch_size": 1}}),
    "soft cap": (Layout(tensor=2, sequence_parallel=True), {"logit_softcap": 0.3, "training": {"recompute": "full"}}),
    "soft cap, z-loss": (Layout(tensor=2, data=2, sharding="zero3"), {"logit_softcap": 0.3, "training": {"z_loss": 1}}),
}
"""A layout and options of the modern recipe (docs/recipe.md), by name."""


@pytest.mark.slow  # all of them together are another, quick test
@pytest.mark.parametrize("name", RECIPES)
def test_a_modern_recipe_is_the_uncut_model(ranks: RankPool, name: str) -> None:
    layout, options = RECIPES[name]
    proven(ranks, layout, **options)


EVERYTHING: dict[str, Any] = {
    **MODERN,
    "vocab_multiple": 384,
    "training": {
        "document_mask": True, "z_loss": 0.01, "initial_spread": "fan_in", "zero_initial_outputs": True,
        "initial_batch_size": 4, "ramp_steps": 2
    },
    "optimizer": {
        **MUON, "embedding_learning_rate": 3e-3, "head_learning_rate": 1e-3, "schedule": "wsd", "decay_steps": 8,
        "ema_decay": 0.999
    },
    "data": MIXED
}  # fmt: skip
"""All options of docs/recipe.md and docs/data.md at once."""


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2, sequence_parallel=True),
        # repeat the first on other layouts
        pytest.param(Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True), marks=pytest.mark.slow),
        pytest.param(Layout(tensor=4), marks=pytest.mark.slow),
        pytest.param(Layout(data=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_options_together_are_the_uncut_model(ranks: RankPool, layout: Layout) -> None:
    report = proven(ranks, layout, **EVERYTHING)
    assert {"documents", "mixture", "averaged weights"} <= {check.name for check in report.checks}


def test_verification_keeps_the_ratios_of_learning_rates() -> None:
    tied, untied = (
        for_verification(tiny_run(**RECIPES[name][1]), Layout(), "float64").optimizer
        for name in ("rates", "rates, untied")
    )
    assert tied.head_learning_rate == 0.0
    assert untied.embedding_learning_rate / untied.head_learning_rate == pytest.approx(300.0)
    assert untied.learning_rate / untied.matrix_learning_rate == pytest.approx(10.0)


RECOMPUTING = [
    {"recompute": "none"},
    {"recompute": "full"},
    {"recompute": "full", "recompute_every": 2, "offload": ("activations",)},
    {"recompute": "selective"},
    {"recompute": "operators"},
]


@pytest.mark.parametrize(
    ("layout", "kinds"),
    [
        pytest.param(Layout(tensor=2), RECOMPUTING, marks=pytest.mark.slow),  # sends less again than split sequences
        # Other quick tests verify the kinds "full", "selective" and "operators".
        (Layout(tensor=2, sequence_parallel=True), [RECOMPUTING[0], RECOMPUTING[2]]),
        pytest.param(Layout(tensor=2, sequence_parallel=True), RECOMPUTING, marks=pytest.mark.slow),
    ],
    ids=["tensor", "split sequences", "split sequences, all kinds"],
)
def test_recomputing_is_verified_and_what_it_sends_again_is_planned(
    ranks: RankPool, layout: Layout, kinds: list[dict[str, Any]]
) -> None:
    reports = [proven(ranks, layout, training=options) for options in kinds]
    calls = [row.module for row in reports[0].rows]
    for report in reports:
        assert [row.module for row in report.rows] == calls, "a repetition is no call"
        assert "7 draws on each rank" in report.checks[5].told
        assert report.checks[6].name == "collectives"


def test_verification_keeps_how_a_run_recomputes() -> None:
    training = {"recompute": "full", "recompute_every": 2, "offload": ("activations",)}
    run = replace(tiny_run(), training=replace(tiny_run().training, **training))
    kept = for_verification(run, Layout(tensor=2), "float64").training
    assert {name: getattr(kept, name) for name in training} == training


def test_verification_leaves_the_runs_evaluation_out() -> None:
    run = load_run({
        "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 4, "vocab_size": 300, "max_sequence_length": 1024},
        "training": {"sequence_length": 1024, "steps": 10},
        "evaluation": {"lambada": "lambada.jsonl", "window": 512, "overlap": 256},
        "optimizer": {"warmup_steps": 0}
    })  # fmt: skip
    verified = for_verification(run, Layout(tensor=2), "float64")
    assert verified.training.sequence_length == 128, "its windows would not fit into this"
    assert not verified.evaluation.lambada


def test_verification_takes_two_tokens_at_least() -> None:
    for length, most, expected in ((1, 16, 2), (1, 1, 1), (16, 16, 16)):
        run = tiny_run(training={"sequence_length": length}, max_sequence_length=most)
        assert for_verification(run, Layout(tensor=2), "float64").training.sequence_length == expected


def test_both_the_runs_own_and_the_verified_precision_have_to_allow_the_layout() -> None:
    own = replace(tiny_run(), training=replace(tiny_run().training, precision="float8"))
    assert for_verification(own, Layout(tensor=2), "float64").training.precision == "float64"
    for run, precision, end in (
        (own, "float64", ""),
        (tiny_run(), "float8", "takes the precision from `--precision`."),
    ):
        with pytest.raises(ConfigError, match="must be a multiple of 16 for float8 products, but is 8") as error:
            for_verification(run, Layout(tensor=4), precision)
        assert str(error.value).endswith(end)


def test_float8_is_verified_where_training_in_it_is_refused() -> None:
    run = for_verification(tiny_run(hidden_size=64), Layout(), "float8")
    with pytest.raises(ConfigError, match="must be a precision that the device supports"):
        require_capabilities(resolve_on(run, CPU))
    with mock.patch("crosscut.launch.door.launch", return_value="a report"):
        assert verify_runs([run]) == ["a report"]


LOWER = [("float32", 1e-3), ("float16", 0.05), ("bfloat16", 0.3), ("float8", 0.3)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("precision", "largest"), LOWER)
def test_lower_precisions_pass_within_their_tolerance(ranks: RankPool, precision: str, largest: float) -> None:
    report = proven(ranks, Layout(tensor=2), precision, dropout=0.0)
    assert report.precision == precision
    assert 1e-6 < report.tolerance < largest
    assert report.tolerance <= report.largest_tolerance
    assert ("rounding of outputs" in {check.name for check in report.checks}) == (precision != "float32")


WIDE: dict[str, Any] = {
    "hidden_size": 256, "vocab_size": 512, "max_sequence_length": 128, "dropout": 0.0,
    "training": {"sequence_length": 128}
}  # fmt: skip
"""Layers of 256, whose sums over 256 tokens nearly cancel in the gradients of the norms' biases."""


@pytest.mark.slow  # a wide model
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_what_rounds_the_uncut_model_badly_may_differ_by_more(ranks: RankPool, precision: str) -> None:
    report = proven(ranks, Layout(tensor=2, sequence_parallel=True), precision, **WIDE)
    assert 1.5 * report.tolerance < report.largest_tolerance < 20 * report.tolerance, (
        "as a loss scale would not leave it"
    )


@instead_of(type(ORDINARY), "output")
def wrong_products(output: Any, self: Products, x: Tensor, *others: Tensor | None) -> Tensor:
    """A quarter too large."""
    y = output(self, x, *others)
    return y * 1.25 if x.element_size() == 2 else y


@instead_of(type(ORDINARY), "weight_gradient")
def wrong_weight_gradients(weight_gradient: Any, self: Products, grad: Tensor, x: Tensor, **how: object) -> Tensor:
    """Little more than half."""
    product = weight_gradient(self, grad, x, **how)
    return product * 0.55 if x.element_size() == 2 else product


@instead_of(projection, "vocab_parallel_cross_entropy")
def wrong_loss(loss: Any, hidden: Tensor, *arguments: object, **more: object) -> Tensor:
    """Half as large again, and its gradients are not."""
    y = loss(hidden, *arguments, **more)
    return y + 0.5 * y.detach() if hidden.element_size() == 2 else y


WRONG_IN_NARROW_NUMBERS = [
    (wrong_products, "rounding of outputs", "largest at output of "),
    (wrong_weight_gradients, "rounding of gradients", "largest at gradient of "),
    (wrong_loss, "rounding of outputs", "largest at loss"),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("fault", "name", "told"), WRONG_IN_NARROW_NUMBERS, ids=["products", "weight gradients", "loss"]
)
def test_what_is_wrong_in_narrow_numbers_alone_is_not_rounding(
    ranks: RankPool, fault: Callable[[Patch], None], name: str, told: str
) -> None:
    run = for_verification(tiny_run(dropout=0.0, training={"recompute": "full"}), Layout(), "bfloat16")
    report = ranks.run(1, verify_planted, fault, run)[0]
    check = next(check for check in report.checks if not check.same)
    assert check.name == name
    assert told in check.told
    assert report.first.module == name
    assert report.first.cause.startswith(
        "The cut and the uncut model agree, but the uncut model differs by more than rounding from the same model in a "
        "wider type"
    )
    assert "recompute" not in report.first.cause, "neither of the two that were compared recomputes"


def _verify_one_more_message_and_wrong_loss() -> LayoutReport:
    run = for_verification(tiny_run(dropout=0.0), Layout(tensor=2), "bfloat16")
    planned = step_traffic(run)
    with mock.patch("crosscut.verification.run_proof.step_traffic", return_value=planned[1:]):
        return verify_planted(wrong_loss, run)


def test_what_is_known_to_differ_comes_before_what_may_be_rounding(ranks: RankPool) -> None:
    report = ranks.run(2, _verify_one_more_message_and_wrong_loss)[0]
    assert [check.name for check in report.checks if not check.same] == ["collectives", "rounding of outputs"]
    assert report.first.module == "collectives"


def _verify_overflowing() -> LayoutReport:
    with mock.patch.object(LossScale.__init__, "__defaults__", (2.0**40,)):
        return verify_run(for_verification(tiny_run(dropout=0.0), Layout(), "float16"))


def test_a_step_that_overflows_proves_nothing(ranks: RankPool) -> None:
    with pytest.raises(TrainingError, match=r"must be finite for a comparison, but are 5\.\d+ and nan"):
        ranks.run(1, _verify_overflowing)


UNSUMMED = [("bfloat16", 32), ("float8", 64)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("precision", "hidden_size"), UNSUMMED)
def test_a_missing_sum_is_found_in_narrow_numbers_too(ranks: RankPool, precision: str, hidden_size: int) -> None:
    run = for_verification(tiny_run(dropout=0.0, hidden_size=hidden_size), Layout(tensor=2), precision)
    report = ranks.run(2, verify_planted, g_missing, run)[0]
    assert report.first.module == "blocks.0.attention.output"
    assert "a sum over the ranks is missing" in report.first.cause


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_the_batch_holds_both_edges_of_every_part_of_the_vocabulary(tensor: int) -> None:
    run = for_verification(tiny_run(), Layout(tensor=tensor, data=2), "float64")
    batch = made_up_batch(run)
    tokens, targets = batch.tokens, batch.targets
    part = {1: 384, 2: 256, 4: 128}[tensor]
    edges = {0, 299} | {edge for first in range(part, 300, part) for edge in (first - 1, first)}
    assert edges <= set(targets[targets != IGNORED].tolist())
    assert edges <= set(tokens.flatten().tolist())
    counts = (targets != IGNORED).sum(1)
    first, second = counts.chunk(2)
    assert first.sum() != second.sum(), "data ranks must have unequally many targets"
    assert torch.equal(tokens[:, 1:][targets[:, :-1] != IGNORED], targets[:, :-1][targets[:, :-1] != IGNORED])


def _parameters_left() -> int:
    """On a rank: number of new parameters that are left when a proof is over."""
    before = _parameters()
    assert verify_run(for_verification(tiny_run(), Layout(), "float64")).same
    return len(_parameters() - before)


def _parameters() -> set[int]:
    gc.collect()
    return {id(one) for one in gc.get_objects() if issubclass(type(one), DTensor)}


def test_both_models_are_gone_when_the_proof_is_over(ranks: RankPool) -> None:
    assert ranks.run(1, _parameters_left) == [0]


def test_layout_that_the_model_does_not_allow_is_refused_before_a_rank_starts():
    with pytest.raises(LayoutError, match=r"`layout\.tensor` must divide `model\.num_heads` \(4\), but is 3"):
        for_verification(tiny_run(), Layout(tensor=3), "float64")


def test_scaled_down_model_has_the_same_structure():
    run = scale_down(tiny_run(), num_layers=1, hidden_size=16)
    assert run.model == replace(tiny_run().model, num_layers=1, hidden_size=16, head_size=4, mlp_size=64)
    assert scale_down(tiny_run(), num_layers=None, hidden_size=None) == tiny_run()
    with pytest.raises(ConfigError, match=r"`model\.num_heads` must divide `model\.hidden_size` \(18\), but is 4"):
        scale_down(tiny_run(), num_layers=None, hidden_size=18)


def test_model_without_a_vocabulary_takes_that_of_the_tokenizer_to_come():
    run = tiny_run(vocab_size=0)
    assert for_verification(run, Layout(), "float64").model.vocab_size == run.data.vocab_size
