"""Runs that make the MLPs of a published model into experts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from crosscut.config import ConfigError, Layout, RunConfig, load_run
from crosscut.parallel import make_mesh
from crosscut.pretrained import find_model
from crosscut.training import run_training
from crosscut.training.driving.driver import load_initial_weights
from crosscut.training.precision import resolve_on
from crosscut.training.step import Trainer
from tests.pretrained.jobs import CPU, logits, logits_at_all_positions
from tests.pretrained.models import TOKENS, make
from tests.pretrained.test_runs import make_run
from tests.pretrained.test_runs import text as text
from tests.ranks import RankPool
from tests.refusals import refusal
from tests.training.jobs import whole_run

EXPERTS = (
    "model.layers=attention experts", "model.experts.number=4", "training.precision=float64", "training.batch_size=4"
)  # fmt: skip
SOME = ("model.layers=attention swiglu,attention experts", *EXPERTS[1:])


def start(run: RunConfig) -> Trainer:
    """A trainer with the weights of the run's folder."""
    trainer = Trainer(resolve_on(run, CPU), make_mesh(run.layout, CPU))
    load_initial_weights(trainer)
    return trainer


def first_logits(runs: list[RunConfig]) -> list[Tensor]:
    return [logits_at_all_positions(start(run).model.eval(), TOKENS) for run in runs]


def first_weights(run: RunConfig) -> dict[str, Tensor]:
    """Whole parameters of the stages of this rank."""
    return {name: p.detach().full_tensor().clone() for name, p in start(run).model.named_parameters()}


@pytest.fixture
def run_of(text: Path, tmp_path: Path, published: Callable[[str], Path]) -> Callable[..., RunConfig]:
    return lambda name, *overrides: make_run(published(name), text, tmp_path / "run", *overrides)


LAYOUTS = {"one rank": (), "tensor 2 x expert 2": ("layout.tensor=2", "layout.data=2", "layout.expert=2")}


@pytest.mark.parametrize(
    "layout",
    [pytest.param("one rank", marks=pytest.mark.slow), "tensor 2 x expert 2"],  # cuts find the same faults, and more
)
def test_the_first_forward_pass_is_that_of_the_folder(
    ranks: RankPool, published: Callable[[str], Path], run_of: Callable[..., RunConfig], layout: str
) -> None:
    """With gated MLPs and plain ones, in all layers and in some, with softmax and sigmoid."""
    cases = [("llama", EXPERTS), ("llama", SOME), ("arcee", (*EXPERTS, "model.experts.scores=sigmoid"))]
    runs = [run_of(name, *overrides, *LAYOUTS[layout]) for name, overrides in cases]
    found = ranks.run(runs[0].layout.world_size, first_logits, runs)[0]
    for (name, _), ours in zip(cases, found, strict=True):
        theirs = ranks.run(1, logits, find_model(published(name)), Layout(), ["float64"])[0][0]
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


WHERE = {
    "expert, ZeRO-3": ("layout.data=4", "layout.expert=2", "layout.sharding=zero3"),
    "more ranks than experts": ("layout.data=4", "layout.sharding=zero3", "model.experts.number=2"),
    "pipeline, expert": ("layout.pipeline=2", "layout.data=2", "layout.expert=2"),
}


@pytest.mark.one_in(len(WHERE))
@pytest.mark.parametrize("name", WHERE)
def test_every_layout_starts_with_copies_and_new_routers(
    ranks: RankPool, published: Callable[[str], Path], run_of: Callable[..., RunConfig], name: str
) -> None:
    run = run_of("llama", *SOME, *WHERE[name])
    dense = ranks.run(1, first_weights, run_of("llama", "training.precision=float64"))[0]
    plain = ranks.run(1, first_weights, run_of("llama", *SOME, f"model.experts.number={run.model.experts.number}"))[0]
    found: set[str] = set()
    for own in ranks.run(4, first_weights, run):
        found |= own.keys()
        for name_of, whole in own.items():
            assert torch.equal(whole, plain[name_of]), name_of
    assert found == plain.keys()
    for of, matrix in {"gate": "expand.gate", "up": "expand.up", "contract": "contract"}.items():
        theirs = [dense[f"blocks.{i}.mlp.{matrix}.weight"] for i in range(2)]
        assert torch.equal(plain[f"blocks.1.mlp.{of}"], torch.stack([theirs[1]] * run.model.experts.number))
        assert torch.equal(plain[f"blocks.0.mlp.{matrix}.weight"], theirs[0])
    assert plain["blocks.1.mlp.router.weight"].std() == pytest.approx(0.02, rel=0.3)


def test_a_run_records_its_experts_and_goes_on_without_the_folder(
    ranks: RankPool, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "dense", "llama")
    run = make_run(tmp_path / "dense", text, tmp_path / "run", *EXPERTS, "model.experts.renormalise=false")
    run_training(run)
    told = capfd.readouterr().err
    assert (
        f"Each of the 4 experts of a layer starts as a copy of the layer's MLP in `{tmp_path}/dense`, and the routers "
        "start from random weights.\n"
    ) in told
    assert "To start with them, set model.experts.renormalise=true model.experts.scaling=1.\n" in told
    again = load_run(tmp_path / "run" / "config.toml", ["training.steps=2"])
    assert again.model == run.model
    assert (again.model.experts.size, again.model.experts.mlp) == (48, "swiglu")
    assert again.training.initialize_from == str(tmp_path / "dense")
    (tmp_path / "dense").rename(tmp_path / "gone")
    ranks.run(1, whole_run, load_run(tmp_path / "run" / "config.toml", ["training.steps=2"]), True)
    assert (tmp_path / "run" / "checkpoints" / "step-00000002").exists()


HERE = "the model in `{0}` (`training.initialize_from`)"
LAYERS = f"`model.layers` must be the layers of {HERE} with `experts` in the place of MLPs, but layer"
WRITE = "Write `experts` instead of an MLP, and leave all other parts as they are."
OF_EXPERTS = "model.layers=attention experts"
MISTAKES = {
    "another width": (
        ("llama", OF_EXPERTS, "model.experts.size=24"),
        f"`model.experts.size` must be 48, but is 24. The run starts from {HERE}. Remove `model.experts.size`.",
    ),
    "a shared MLP": (
        ("llama", OF_EXPERTS, "model.experts.shared_size=48"),
        ("`model.experts.shared_size` must be 0, but is 48. The run starts from "
        f"{HERE}. Remove `model.experts.shared_size`."),
    ),
    "another mixer": (
        ("llama", "model.layers=attention experts,mamba2 experts"),
        f'{LAYERS} 1 is "mamba2 experts" instead of "attention swiglu". {WRITE}',
    ),
    "a part too few": (
        ("llama", "model.layers=experts"),
        f'{LAYERS} 0 is "experts" instead of "attention swiglu". {WRITE}',
    ),
    "biases": (
        ("gpt2", OF_EXPERTS),
        (f"`experts` in `model.layers` must take the place of MLPs without biases, but those of {HERE} have biases, "
        "and experts have none. Choose a model such as a Llama."),
    ),
    "adapters": (
        ("llama", OF_EXPERTS, "model.lora_rank=4"),
        ("`model.lora_rank` must be 0 for a run whose experts start as copies of the MLPs in "
        "`training.initialize_from`, but is 4. Adapters leave experts as they are, so that all would stay equal. "
        "Remove `model.lora_rank`."),
    ),
    "a wrong kind": (
        ("llama", "model.layers=attention expert"),
        ("`model.layers` must be ['attention swiglu'], but is 'attention expert'. The run starts from "
        f"{HERE}. Remove `model.layers`."),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_model_whose_mlps_cannot_be_the_experts_is_refused(
    published: Callable[[str], Path], text: Path, tmp_path: Path, name: str
) -> None:
    (family, *overrides), message = MISTAKES[name]
    folder = published(family)
    assert refusal(ConfigError, make_run, folder, text, tmp_path / "run", *overrides) == message.format(folder)
