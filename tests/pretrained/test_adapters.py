"""Adapters in PEFT's format: read beside a model on any layout, and written by runs that have adapters."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor

from crosscut.cli.main import commands
from crosscut.config import CheckpointError, ConfigError, Layout, ModelConfig
from crosscut.config.published.generation import check_generation
from crosscut.pretrained import export_checkpoint, find_model, notices_of
from crosscut.pretrained.adapter_settings import read_settings
from crosscut.pretrained.adapters import PublishedAdapter
from crosscut.training import run_training
from tests.pretrained import jobs
from tests.pretrained.encoders import make_encoder
from tests.pretrained.models import TOKENS, InFloat64, their_model
from tests.pretrained.test_export import tensors_in
from tests.pretrained.test_loading import worst
from tests.pretrained.test_module_patterns import key_of_peft
from tests.pretrained.test_runs import make_run, text  # noqa: F401 - a fixture

RANK, ALPHA = 3, 6
LINEAR = {
    "gpt2": ("c_attn", "c_fc", "c_proj"),
    "llama multi-query": ("q_proj", "v_proj", "gate_proj", "down_proj"),
    "nanochat": ("q_proj", "k_proj", "o_proj", "fc1"),
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba", "q_proj", "out_proj"),
    "qwen2_moe": ("q_proj", "v_proj", "o_proj"),
}
"""Modules that the adapters of these tests change."""


def write_peft(folder: Path, published: Path, modules: tuple[str, ...], **settings: Any) -> dict[str, Tensor]:
    """Write an adapter with random matrices as PEFT writes it. Returns what it adds to each published weight."""
    generator, tensors, deltas = torch.Generator().manual_seed(7), {}, {}
    is_transposed = (json.loads((published / "config.json").read_text()))["model_type"] == "gpt2"
    for name, weight in tensors_in(published).items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or module.rpartition(".")[2] not in modules:
            continue
        outputs, inputs = reversed(weight.shape) if is_transposed else weight.shape
        rank = settings.get("rank_pattern", {}).get(key_of_peft(settings.get("rank_pattern", {}), module), RANK)
        down, up = (torch.randn(shape, generator=generator) * 0.2 for shape in ((rank, inputs), (outputs, rank)))
        tensors[f"base_model.model.{module}.lora_A.weight"] = down
        tensors[f"base_model.model.{module}.lora_B.weight"] = up
        alpha = settings.get("alpha_pattern", {}).get(key_of_peft(settings.get("alpha_pattern", {}), module), ALPHA)
        scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
        delta = scale * up.double() @ down.double()
        deltas[name] = delta.t() if is_transposed else delta
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return deltas


@torch.no_grad()
def logits_with(published: Path, deltas: Mapping[str, Tensor]) -> Tensor:
    """[B, S, V] by `transformers`, with the deltas added to its weights."""
    model = their_model(published, torch.float64)
    for name, delta in deltas.items():
        model.get_parameter(name).add_(delta)
    with InFloat64():
        return model(TOKENS).logits


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("layout", [Layout(tensor=4), Layout(tensor=2, data=2, sharding="zero3")], ids=str)
def test_an_adapter_beside_its_model_is_merged_on_any_layout(ranks, published, tmp_path, name, layout):
    deltas = write_peft(tmp_path / "adapter", published(name), LINEAR[name])
    source = find_model(published(name), adapter=tmp_path / "adapter")
    assert source.title.endswith(", adapter adapter")
    theirs = logits_with(published(name), deltas)
    for (ours,) in ranks.run(layout.world_size, jobs.logits, source, layout, ["float64"]):
        assert worst(ours, theirs) <= 1e-6
    assert worst(logits_with(published(name), {}), theirs) > 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"q_proj": 1, "down_proj": 2.5}},
        {"rank_pattern": {"^model.*(q|k)_proj": 5}, "alpha_pattern": {r".*\.self_attn\.q_proj": 1, "layers.1.*": 2}},
    ],
    ids=["rank-stabilized", "patterns", "regular expressions"],
)
def test_scales_and_ranks_may_differ_by_module(ranks, published, tmp_path, settings):
    name = "llama multi-query"
    deltas = write_peft(tmp_path / "adapter", published(name), LINEAR[name], **settings)
    source = find_model(published(name), adapter=tmp_path / "adapter")
    ((ours,),) = ranks.run(1, jobs.logits, source, Layout(), ["float64"])
    assert worst(ours, logits_with(published(name), deltas)) <= 1e-6


@pytest.mark.parametrize("name", ["gpt2", "nanochat"])
def test_export_merges_an_adapter_into_a_published_model(published, tmp_path, name):
    deltas = write_peft(tmp_path / "adapter", published(name), LINEAR[name])
    export_checkpoint(find_model(published(name), adapter=tmp_path / "adapter"), tmp_path / "merged")
    before, after = tensors_in(published(name)), tensors_in(tmp_path / "merged")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        torch.testing.assert_close(after[key].double(), tensor.double() + deltas.get(key, 0.0), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_export_merges_an_adapter_into_a_roberta(tmp_path):
    """The table of positions loses the rows that belong to no token."""
    from transformers import BertForMaskedLM, RobertaForMaskedLM

    base = make_encoder(tmp_path / "model", "roberta with a head")
    deltas = write_peft(tmp_path / "adapter", base, ("query", "value"))
    export_checkpoint(find_model(base, adapter=tmp_path / "adapter"), tmp_path / "merged")
    theirs = RobertaForMaskedLM.from_pretrained(base, dtype=torch.float64).eval()
    assert len(deltas) == 4
    for name, delta in deltas.items():
        theirs.get_parameter(name).add_(delta)
    merged = BertForMaskedLM.from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    assert worst(merged(TOKENS).logits, theirs(TOKENS).logits) <= 1e-6


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama tied", "qwen3_next")]


@pytest.fixture(scope="module", params=["gpt2", *SLOW])
def adapted(request, published, text, tmp_path_factory) -> tuple[Path, Path]:  # noqa: F811
    """A published model, and a run that has trained adapters of it."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    settings = ("model.lora_rank=2", "model.lora_alpha=6", "optimizer.learning_rate=0.05", "training.steps=2")
    run_training(make_run(published(request.param), text, folder, *settings))
    return published(request.param), folder


def test_a_run_trains_its_adapters_only_and_its_model_is_merged_in_the_export(ranks, adapted, tmp_path):
    initial, run = adapted
    export_checkpoint(find_model(run), tmp_path / "merged")
    before, after = tensors_in(initial), tensors_in(tmp_path / "merged")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name, tensor in before.items() if tensor.dim() == 2 and _is_of_layer(name)}
    ((ours,),) = ranks.run(1, jobs.logits, find_model(run), Layout(), ["float32"])
    ((merged,),) = ranks.run(1, jobs.logits, find_model(tmp_path / "merged"), Layout(), ["float32"])
    assert worst(ours, merged) <= 1e-5


def _is_of_layer(name: str) -> bool:
    return ".h." in name or ".layers." in name


def test_the_adapters_of_a_run_are_written_for_peft_and_read_again(ranks, adapted, tmp_path):
    initial, run = adapted
    out = tmp_path / "adapter"
    result = CliRunner().invoke(commands, ["checkpoint", "adapter", str(run), str(out), "--base", str(initial)])
    assert result.exit_code == 0, result.output
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 6)
    assert config["base_model_name_or_path"] == str(initial)
    tensors = load_file(out / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.") for name in tensors)
    ((ours,),) = ranks.run(1, jobs.logits, find_model(run), Layout(), ["float32"])
    for (beside,) in ranks.run(2, jobs.logits, find_model(initial, adapter=out), Layout(tensor=2), ["float32"]):
        assert worst(ours, beside) <= 1e-5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "`peft_type` in `.*` must be 'LORA', but is 'IA3'"),
        ({"use_dora": True}, "`use_dora` in `.*` must be false, but is true"),
        ({"lora_bias": True}, "`lora_bias` in `.*` must be false, but is true"),
        ({"alora_invocation_tokens": [1, 2]}, "`alora_invocation_tokens` in `.*` must be null, but is"),
        ({"layer_replication": [[0, 2]]}, "`layer_replication` in `.*` must be null, but is"),
        ({"init_lora_weights": "pissa"}, "`init_lora_weights` in `.*` must be true, .* or 'mica', but is 'pissa'"),
        ({"bias": 0}, "`bias` in `.*` must be 'none', but is 0"),
        ({"lora_alpha": "much"}, "`lora_alpha` in `.*` must be a number below 1e30, but is 'much'"),
        ({"lora_alpha": 10**400}, "`lora_alpha` in `.*` must be a number below 1e30, but is 10000"),
        ({"lora_alpha": float("nan")}, "`lora_alpha` in `.*` must be a number below 1e30, but is nan"),
        ({"use_rslora": "false"}, "`use_rslora` in `.*` must be true or false, but is 'false'"),
        ({"use_rslora": 1}, "`use_rslora` in `.*` must be true or false, but is 1"),
        ({"r": 0}, "`r` in `.*` must be at least 1 and below 2.31, but is 0"),
        ({"r": 3.0}, "`r` in `.*` must be a whole number, but is 3.0"),
        ({"alpha_pattern": ["q"]}, "`alpha_pattern` in `.*` must be a table, but is"),
        ({"alpha_pattern": 3}, "`alpha_pattern` in `.*` must be a table, but is 3"),
        ({"alpha_pattern": {"q": True}}, "`alpha_pattern.q` in `.*` must be a number below 1e30, but is true"),
        ({"alpha_pattern": {"(": 1}}, "`alpha_pattern` in `.*` must have ends of module names, or simple regular"),
        ({"rank_pattern": {"q": "2"}}, "`rank_pattern.q` in `.*` must be a whole number, but is '2'"),
        ({"rank_pattern": {"c_attn(?=x)": 2}}, "`rank_pattern` in `.*` must have ends of module names, or simple"),
    ],
    ids=str,
)
def test_settings_that_change_the_mathematics_are_refused(tmp_path, settings, message):
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({"peft_type": "LORA", **settings}))
    with pytest.raises(ConfigError, match=message):
        read_settings(path).scale("transformer.h.0.attn.c_attn")


def test_a_rank_that_contradicts_the_tensors_is_refused(published, tmp_path):
    write_peft(tmp_path / "adapter", published("gpt2"), LINEAR["gpt2"])
    path = tmp_path / "adapter" / "adapter_config.json"
    for settings in ({"rank_pattern": {r"h\.1\..*": RANK + 1}}, {"r": 8}):
        path.write_text(json.dumps({"peft_type": "LORA", "r": RANK, **settings}))
        with pytest.raises(CheckpointError, match=r"must have matrices of rank \d \(`r` and `rank_pattern` in"):
            find_model(published("gpt2"), adapter=tmp_path / "adapter")


def test_settings_of_no_table_are_named_and_ignored(published, tmp_path, capsys):
    new = {f"new_{i}": i for i in range(7)}
    write_peft(tmp_path / "adapter", published("gpt2"), LINEAR["gpt2"], task_type="CAUSAL_LM", lora_dropout=0.1, **new)
    find_model(published("gpt2"), adapter=tmp_path / "adapter")
    told = capsys.readouterr().err
    assert "ignores them: `new_0`, `new_1`, `new_2`, `new_3`, `new_4` and 2 more." in told
    assert "task_type" not in told


MODULES = [
    ({"target_modules": ["q_proj", "v_proj"]}, "target_modules"),
    ({"target_modules": r".*\.(q|v)_proj"}, "target_modules"),
    ({"exclude_modules": ["layers.1.mlp.down_proj"]}, "exclude_modules"),
    ({"target_modules": ["q_proj", "v_proj", "gate_proj", "down_proj"], "layers_to_transform": [0]}, "layers_to_tr"),
    ({"target_modules": "all-linear"}, ""),
    ({"target_modules": "q_proj|v_proj"}, "target_modules"),  # a regular expression for whole names
    ({"exclude_modules": "q_proj"}, ""),
    ({"exclude_modules": r".*\.q_proj"}, "exclude_modules"),
    ({"target_modules": r"model\.layers\.\d+\..*_proj", "layers_to_transform": [0]}, ""),
]


@pytest.mark.parametrize(("settings", "key"), MODULES, ids=str)
def test_modules_without_an_adapter_have_no_matrices(published, tmp_path, settings, key):
    """PEFT ignores matrices of other modules with a warning."""
    name = "llama multi-query"
    write_peft(tmp_path / "adapter", published(name), LINEAR[name], **settings)
    if not key:
        find_model(published(name), adapter=tmp_path / "adapter")
        return
    with pytest.raises(CheckpointError, match=f"`{key}.* must include all matrices in `adapter_model.safetensors`"):
        find_model(published(name), adapter=tmp_path / "adapter")


def test_an_adapter_in_the_folder_of_its_model_must_be_given(published, tmp_path, capsys):
    """`transformers` merges it without a word."""
    folder = shutil.copytree(published("gpt2"), tmp_path / "gpt2")
    write_peft(tmp_path / "adapter", folder, LINEAR["gpt2"], base_model_name_or_path="gpt2")
    for file in (tmp_path / "adapter").iterdir():
        shutil.copy(file, folder)
    for read in (find_model, notices_of):
        with pytest.raises(
            ConfigError, match=r"`.*adapter_config\.json` must not be beside `config.json`, .*--adapter"
        ):
            read(folder)
    assert find_model(folder, adapter=folder).settings_folders == (folder,)
    (tmp_path / "adapter" / "generation_config.json").write_text('{"min_p": 0.1, "suppress_tokens": [3]}')
    source = find_model(published("gpt2"), adapter=tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"`suppress_tokens` in `.*adapter/generation_config\.json` must be"):
        check_generation(source.settings_folders, None, "")


def test_the_name_of_the_model_is_compared(published, tmp_path, capsys):
    for base, is_told in (("org/Some-Model", True), ("org/GPT2", False), (None, False)):
        folder = tmp_path / f"adapter-{len(list(tmp_path.iterdir()))}"
        write_peft(folder, published("gpt2"), LINEAR["gpt2"], base_model_name_or_path=base)
        find_model(published("gpt2"), adapter=folder)
        assert ("was trained with the model `org/Some-Model`" in capsys.readouterr().err) is is_told


def test_the_name_of_the_model_is_a_whole_folder_of_its_path():
    model = ModelConfig(num_layers=1, hidden_size=8, num_heads=1)
    agreeing = [
        ("org/GPT2", "models/gpt2"),
        ("/models/gpt2/", "models/GPT2/final"),
        ("org/gpt2", "hub/models--org--gpt2/snapshots/0f1e"),
        ("org/my--model", "my--model"),
        ("", "any"),
    ]
    differing = [
        ("org/gpt2", "gpt2-medium"),
        ("org/gpt2", "distilgpt2/final"),
        ("org/gpt2", "models--org--gpt2-xl/0f1e"),
    ]
    for base, folder in (*agreeing, *differing):
        notice = PublishedAdapter(model, {}, base).notice_of_base(Path("/data") / folder)
        assert bool(notice) is ((base, folder) in differing), (base, folder)


INITIAL = [True, False, "gaussian", "orthogonal", "mica", "eva"]
CHANGING = ["olora", "pissa", "pissa_niter_4", "OLoRA"]


with_peft = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",
    "ignore:(PiSSA changes|.init_lora_weights. is 'eva'|lora with eva):UserWarning",
)
"""Mark for tests in which PEFT warns about itself."""


@with_peft
@pytest.mark.one_in(8)
@pytest.mark.parametrize("initial", [*CHANGING, *INITIAL])
def test_an_initialisation_that_changes_the_model_is_refused_and_others_are_read(ranks, published, tmp_path, initial):
    from peft import LoraConfig, PeftModel, get_peft_model

    base, adapter = published("llama"), tmp_path / "adapter"
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=initial)
    torch.manual_seed(5)
    model = get_peft_model(their_model(base, torch.float32), config)
    with torch.no_grad():
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(adapter)
    theirs = PeftModel.from_pretrained(their_model(base, torch.float32), adapter)(TOKENS).logits.detach()
    if initial in CHANGING:
        with pytest.raises(ConfigError, match=r"`init_lora_weights` in `.*` must be true, .* Merge the adapter with"):
            find_model(base, adapter=adapter)
        edit_settings(adapter, init_lora_weights=True)  # as it was read before
    ((ours,),) = ranks.run(1, jobs.logits, find_model(base, adapter=adapter), Layout(), ["float32"])
    assert (worst(ours, theirs) <= 1e-4) is (initial not in CHANGING)


@with_peft
@pytest.mark.slow  # the quick case above imports PEFT and compares logits; this one reads twice the rank
def test_a_converted_adapter_is_read(ranks, published, tmp_path):
    """PEFT can write the difference to the original model, as an adapter of twice the rank."""
    from peft import LoraConfig, get_peft_model

    base, adapter = published("llama"), tmp_path / "adapter"
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights="pissa")
    torch.manual_seed(5)
    model = get_peft_model(their_model(base, torch.float32), config)
    model.peft_config["default"].init_lora_weights = True  # as PEFT's documentation says
    model.save_pretrained(tmp_path / "initial")
    model.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    theirs = model(TOKENS).logits.detach()
    model.save_pretrained(adapter, path_initial_model_for_weight_conversion=tmp_path / "initial")
    ((ours,),) = ranks.run(1, jobs.logits, find_model(base, adapter=adapter), Layout(), ["float32"])
    assert worst(ours, theirs) <= 1e-4


def edit_settings(adapter: Path, **changes: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_adapter_of_another_model_is_refused(published, tmp_path):
    write_peft(tmp_path / "adapter", published("llama"), ("q_proj",))
    with pytest.raises(CheckpointError, match="must hold only matrices A and B of the model's layers, but has `base_"):
        find_model(published("gpt2"), adapter=tmp_path / "adapter")
    write_peft(tmp_path / "wide", published("llama in threes"), ("q_proj",))
    with pytest.raises(CheckpointError, match=r"must have matrices A and B of the shapes \[r, 32\] and \[32, r\]"):
        find_model(published("llama"), adapter=tmp_path / "wide")


def test_a_folder_without_an_adapter_is_refused(published, tmp_path):
    with pytest.raises(CheckpointError, match=r"must be the folder of an adapter with `adapter_config.json`"):
        find_model(published("gpt2"), adapter=tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"must hold `adapter_model.safetensors`, but does not"):
        find_model(published("gpt2"), adapter=tmp_path)


def test_a_run_without_adapters_has_none_to_export(published, tmp_path):
    result = CliRunner().invoke(commands, ["checkpoint", "adapter", str(published("gpt2")), str(tmp_path / "out")])
    assert result.exit_code != 0
    assert "must be a checkpoint of a run with adapters" in str(result.exception)
