import dataclasses
import tomllib
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from crosscut.cli.arguments import run_from
from crosscut.config import (
    PRESETS,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainingConfig,
    dump_toml,
    load_run,
)
from crosscut.config.parts.kinds import Mixer
from crosscut.config.published.presets import DEMO_PRESET, LAPTOP_PRESETS
from crosscut.config.recipes import RECIPES, describe_recipe, num_parameters
from crosscut.planner import count_parameters
from tests.config.published.test_folders import GPT2, LLAMA, write

MODEL = {"num_layers": 2, "hidden_size": 48, "num_heads": 6}


def load(*overrides: str, **sections: Any) -> RunConfig:
    return load_run({"model": MODEL, **sections}, overrides)


def test_the_papers_recipe_is_the_papers_settings() -> None:
    paper = RunConfig(model=ModelConfig(**MODEL))
    assert load("recipe=paper") == paper
    assert (paper.training.steps, paper.training.batch_size, paper.training.sequence_length) == (300_000, 512, 1024)
    assert (paper.optimizer.learning_rate, paper.optimizer.min_learning_rate) == (1.5e-4, 1e-5)
    assert paper.optimizer.warmup_steps == 3000


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_named_in_the_file_or_on_the_command_line(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'recipe = "{name}"\n[model]\nnum_layers = 2\nhidden_size = 48\nnum_heads = 6\n')
    assert load_run(file) == load(f"recipe={name}")
    assert load_run(file, ["recipe=paper"]) == load("recipe=paper")


@pytest.mark.parametrize("preset", PRESETS)
def test_published_models_have_the_recipe_of_their_family_and_others_are_small(preset: str) -> None:
    run = load_run({"model": {"preset": preset}})
    of_family = "paper" if preset.startswith(("megatron", "gpt", "bert", "turing", "mt-nlg")) else "llama"
    if preset in ("llama3-70b", "codellama-34b", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b"):
        of_family = "llama-large"
    name = "modern" if preset == DEMO_PRESET else "small" if preset in LAPTOP_PRESETS else of_family
    assert run == load_run({"model": {"preset": preset}, "recipe": name})
    assert (run.training.batch_size == 512) == (name == of_family)


@pytest.mark.parametrize(("preset", "rate"), [("llama2-7b", 3e-4), ("llama2-13b", 3e-4), ("llama3-70b", 1.5e-4)])
def test_llamas_have_the_optimizer_of_llama_2(preset: str, rate: float) -> None:
    run = load_run({"model": {"preset": preset}})
    one = run.optimizer
    assert (one.learning_rate, one.min_learning_rate, one.schedule) == (rate, pytest.approx(rate / 10), "cosine")
    assert (one.beta1, one.beta2, one.epsilon, one.weight_decay, one.clip_norm) == (0.9, 0.95, 1e-5, 0.1, 1.0)
    assert one.warmup_steps == 2000
    assert describe_recipe(run).startswith(f"{run.recipe} (the default with RMS norms from ")
    assert load_run({"model": {"preset": preset}}, ["recipe=paper"]).optimizer.learning_rate == 1.5e-4
    assert load_run({"model": {"preset": preset}}, ["optimizer.learning_rate=1e-3"]).optimizer.beta2 == 0.95


SHAPES = {
    "GPT-2 of 99M": ("hidden_size=768", "num_heads=12", "num_layers=13", "vocab_size=8000"),
    "GPT-2 of 106M": ("hidden_size=768", "num_heads=12", "num_layers=14", "vocab_size=8000"),
    "vocabulary of 120M": ("hidden_size=768", "num_heads=12", "num_layers=1", "vocab_size=150000"),
    "untied": ("hidden_size=768", "num_heads=12", "num_layers=1", "vocab_size=64000", "tied=false"),
    "Llama of 82M": ("hidden_size=1024", "num_heads=16", "num_layers=6", "vocab_size=7000", "layers=attention swiglu"),
    "Llama of 104M": ("hidden_size=1024", "num_heads=16", "num_layers=6", "vocab_size=7000", "layers=attention swiglu"),
    "13B": ("hidden_size=5120", "num_heads=40", "num_layers=40", "vocab_size=50257"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_large_model_of_ones_own_has_the_papers_recipe(name: str) -> None:
    shape = [f"model.{value}" for value in SHAPES[name]] + ["model.max_sequence_length=256"]
    shape += ["model.mlp_size=2048"] if name == "Llama of 82M" else []
    run = load_run({}, shape)
    large = count_parameters(run.model) >= 100_000_000
    assert large == (name not in ("GPT-2 of 99M", "Llama of 82M"))
    assert run.recipe == ("paper" if large else "small")
    assert run == load_run({}, [*shape, f"recipe={run.recipe}"])
    assert run.optimizer.learning_rate == (1.5e-4 if large else 1e-3)


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_are_counted_as_the_planner_does(preset: str) -> None:
    model = (
        ModelConfig(**PRESETS[preset]).with_head("next_token") if "bert" in preset else ModelConfig(**PRESETS[preset])
    )
    counted = dataclasses.replace(model, vocab_size=model.vocab_size or DataConfig.vocab_size, attention="causal")
    assert num_parameters(model) == pytest.approx(count_parameters(counted), rel=0.005)


@pytest.mark.parametrize("kind", Mixer.values())
def test_matrices_of_mixers_are_counted_as_the_planner_does(kind: str) -> None:
    model = ModelConfig(
        hidden_size=768, num_heads=12, num_layers=6, layers=(kind,), positions="rotary", vocab_size=99, head_size=64
    )
    assert num_parameters(model) == pytest.approx(count_parameters(model), rel=0.005)


def test_a_resolved_run_keeps_its_numbers_and_the_name_of_its_recipe() -> None:
    for shape in (SHAPES["13B"], SHAPES["GPT-2 of 99M"]):
        run = load_run({}, [f"model.{value}" for value in shape])
        resolved = tomllib.loads(dump_toml(run))
        assert load_run(resolved) == run
        assert load_run(resolved).recipe == run.recipe


def test_a_run_folder_without_a_recipe_keeps_its_numbers() -> None:
    run = load_run({}, [*(f"model.{value}" for value in SHAPES["13B"]), "recipe=small"])
    resolved = tomllib.loads(dump_toml(run))
    del resolved["recipe"]
    assert load_run(resolved) == run
    assert load_run(resolved).recipe == ""
    assert describe_recipe(load_run(resolved)) == "learning rate 0.001"
    assert load_run(tomllib.loads(dump_toml(load_run(resolved)))).recipe == ""


def test_another_preset_for_the_file_of_a_finished_demo_is_that_preset() -> None:
    demo = tomllib.loads(dump_toml(run_from(())))
    other = ["model.preset=laptop-small", "optimizer.head_learning_rate=0"]
    assert load_run(demo, other).model == ModelConfig(**PRESETS["laptop-small"])
    mine = {"recipe": "modern", "model": MODEL}
    assert load_run(mine, ["model.preset=laptop-small"]).model.layers == ("attention relu2",)


def test_what_the_run_gives_replaces_the_recipe() -> None:
    run = load("training.batch_size=4", recipe="small", training={"seed": 7}, optimizer={"beta2": 0.9})
    assert (run.training.batch_size, run.training.seed, run.optimizer.beta2) == (4, 7, 0.9)
    assert run.optimizer.learning_rate == 1e-3


RESULTS: dict[str, dict[str, object]] = {
    "": {"training.batch_size": 8, "training.sequence_length": 256, "training.steps": 500},
    "optimizer.learning_rate=5e-5": {"optimizer.min_learning_rate": 5e-6},
    "optimizer.learning_rate=0.01": {"optimizer.min_learning_rate": 1e-4},
    "optimizer.learning_rate=1e-3 optimizer.min_learning_rate=0": {"optimizer.min_learning_rate": 0},
    "model.max_sequence_length=100": {"training.sequence_length": 100},
    "model.max_sequence_length=100 recipe=paper": {"training.sequence_length": 100},
    "model.max_sequence_length=5000 recipe=paper": {"training.sequence_length": 1024},
    "recipe=modern": {
        "model.norm_affine": False, "model.tied": False, "model.layers": ("attention relu2",),
        "optimizer.schedule": "linear",
        "optimizer.embedding_learning_rate": 0.05, "optimizer.matrices": "muon",
        "optimizer.matrix_learning_rate": 0.012, "training.initial_spread": "fan_in",
    },
    "recipe=modern model.tied=true model.norm=layer model.norm_affine=true": {
        "model.tied": True, "optimizer.head_learning_rate": 0.0,
    },
    "recipe=modern optimizer.matrices=adamw": {
        "optimizer.matrices": "adamw", "optimizer.matrix_learning_rate": 0.0, "optimizer.embedding_learning_rate": 0.05,
    },
    "recipe=modern optimizer.matrices=adamw optimizer.matrix_learning_rate=0.003": {
        "optimizer.matrix_learning_rate": 0.003,
    },
    "recipe=modern optimizer.learning_rate=1e-3": {
        "optimizer.learning_rate": 1e-3, "optimizer.matrix_learning_rate": 0.012,
        "optimizer.embedding_learning_rate": 0.05, "optimizer.head_learning_rate": 5e-3,
    },
    **{f"layout.data={data}": {"training.batch_size": batch} for data, batch in {1: 8, 3: 9, 16: 16}.items()},
    **{
        f"training.steps={steps}": {"optimizer.warmup_steps": warm_up, "training.validate_every": every}
        for steps, warm_up, every in (
            (1, 0, 1), (4, 0, 1), (8, 0, 2), (10, 0, 3), (39, 1, 10), (100, 5, 10), (200, 10, 20),
            (300_000, 3000, 1000),
        )
    },
    "training.steps=100 optimizer.warmup_steps=0": {"optimizer.warmup_steps": 0},
}  # fmt: skip
"""Values that the settings of a run and its recipe give, by default the recipe "small"."""


@pytest.mark.parametrize("settings", RESULTS)
def test_what_a_run_leaves_out_suits_what_it_gives(settings: str) -> None:
    run = load(*settings.split())
    for name, value in RESULTS[settings].items():
        found = attrgetter(name)(run)
        assert found == (pytest.approx(value) if isinstance(value, float) else value), name
    assert run.recipe == (settings.partition("recipe=")[2].partition(" ")[0] or "small")


def test_a_batch_that_is_given_is_not_rounded() -> None:
    with pytest.raises(ConfigError):
        load("layout.data=3", "training.batch_size=8")


def test_published_weights_are_trained_further(tmp_path: Path) -> None:
    initial = f"training.initialize_from={write(tmp_path, GPT2)}"
    run = load_run({}, [initial])
    assert run.optimizer.learning_rate == 5e-5
    assert run.training.sequence_length == run.model.max_sequence_length
    assert run == run_from((initial,))
    assert run_from((initial, "training.steps=3")).optimizer.warmup_steps == 0


def test_a_setting_of_a_section_leaves_the_rest_of_the_section_as_it_was(tmp_path: Path) -> None:
    preset = ["model.preset=nemotron-h-8b", "training.sequence_length=64"]
    model, chunks = load_run({}, preset).model, load_run({}, [*preset, "model.mamba2.chunk_size=32"]).model
    assert dataclasses.replace(chunks, mamba2=model.mamba2) == model
    assert dataclasses.replace(chunks.mamba2, chunk_size=model.mamba2.chunk_size) == model.mamba2
    assert (chunks.mamba2.num_groups, chunks.mamba2.chunk_size) == (8, 32)
    initial = f"training.initialize_from={write(tmp_path, {'model_type': 'mamba2', 'num_hidden_layers': 2})}"
    published = load_run({}, [initial]).model.mamba2
    run = load_run({}, [initial, "model.mamba2.chunk_size=32", f"model.mamba2.num_groups={published.num_groups}"])
    assert run.model.mamba2 == dataclasses.replace(published, chunk_size=32)

    with pytest.raises(ConfigError, match=r"`model\.mamba2\.num_groups` must be \d+, but is 3\."):
        load_run({}, [initial, "model.mamba2.num_groups=3"])


def test_the_balance_of_a_published_mixture_is_the_choice_of_the_run(tmp_path: Path) -> None:
    initial = f"training.initialize_from={write(tmp_path, {**LLAMA, 'model_type': 'mixtral'})}"
    own = ["model.experts.balance_loss=0.002", "model.experts.router_z_loss=0.001"]
    run = load_run({}, [initial, *own])
    assert (run.model.experts.balance_loss, run.model.experts.router_z_loss) == (0.002, 0.001)
    assert run.model.experts.size == LLAMA["intermediate_size"]
    with pytest.raises(ConfigError, match=r"^`model.experts.per_token` must be 2, but is 1. The run starts from the"):
        load_run({}, [initial, "model.experts.per_token=1"])


@pytest.mark.parametrize("published", [GPT2, LLAMA], ids=["tied", "not tied"])
@pytest.mark.parametrize("name", RECIPES)
def test_published_weights_are_trained_with_every_recipe(name: str, published: dict[str, Any], tmp_path: Path) -> None:
    initial = f"training.initialize_from={write(tmp_path, published)}"
    run = load_run({}, [initial, f"recipe={name}"])
    assert run.model == load_run({}, [initial]).model
    assert (run.training.initial_spread, run.training.zero_initial_outputs) == ("paper", False)
    for key, value in RECIPES[name].get("optimizer", {}).items():
        assert getattr(run.optimizer, key) == (0.0 if key == "head_learning_rate" and run.model.tied else value), key


def test_initial_weights_that_the_user_asks_for_contradict_published_ones(tmp_path: Path) -> None:
    initial = f"training.initialize_from={write(tmp_path, GPT2)}"
    with pytest.raises(ConfigError, match=r"`training\.initial_spread` must be 'paper' with"):
        load_run({}, [initial, "recipe=modern", "training.initial_spread=fan_in"])


def test_the_same_run_with_and_without_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        'recipe = "modern"\n'
        "[model]\nnum_layers = 4\nhidden_size = 128\nnum_heads = 4\nmax_sequence_length = 128\n"
        '[data]\ntext = ["book.txt"]\n'
    )
    assert run_from((str(file),)) == run_from(("data.text=book.txt",))
    demo = run_from(())
    assert demo.model == run_from(("data.text=book.txt",)).model
    assert (demo.training.steps, demo.layout.tensor, demo.output.folder) == (620, 2, "runs/demo")


@pytest.mark.parametrize(("steps", "warm_up"), [("2", 0), ("100", 5), ("1_000", 10)])
def test_a_short_demo_has_a_short_warm_up(steps: str, warm_up: int) -> None:
    assert run_from((f"training.steps={steps}",)).optimizer.warmup_steps == warm_up
    assert run_from((f"training.steps={steps}", "optimizer.warmup_steps=1")).optimizer.warmup_steps == 1


def test_the_demos_model_and_recipe_have_a_name() -> None:
    demo, named = run_from(()), load_run({"model": {"preset": "demo"}})
    assert named.model == demo.model
    assert named == load_run({"model": {"preset": "demo"}, "recipe": "modern"})
    assert run_from(("model.preset=demo",)) == demo
    assert run_from(("data.text=book.txt", "model.preset=demo")) == run_from(("data.text=book.txt",))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("smal", "`recipe` must name a recipe, but is 'smal'. The nearest is `small`."),
        (
            5,
            (
                "`recipe` must name a recipe, but is 5. Choose `paper`, `llama`, `llama-large`, `small`, `modern` or "
                "`continued`."
            ),
        ),
    ],
)
def test_another_recipe_is_refused(recipe: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load("model.max_sequence_length=128", recipe=recipe)  # shorter than the sequences of a run without a recipe
    assert str(error.value) == message


def test_mistakes_in_what_a_recipe_looks_at_are_told() -> None:
    for setting in (
        "training.steps=many",
        "optimizer.learning_rate=[]",
        "training=5",
        "optimizer=5",
        "training.steps=-1",
    ):
        with pytest.raises(ConfigError, match=setting.partition("=")[0]):
            load(setting)
    assert TrainingConfig().validate_every == 1000 and OptimizerConfig().warmup_steps == 3000
