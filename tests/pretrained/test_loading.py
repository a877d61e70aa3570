"""Published weights in: the logits of `transformers`, whichever ranks read what."""

import json
import re
import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from crosscut.config import CheckpointError, ConfigError, Layout
from crosscut.config.published.folders import read_published
from crosscut.config.published.weights import differing
from crosscut.pretrained import find_model, notices_of, require_weights
from crosscut.pretrained.families import weights_of
from tests.pretrained import jobs
from tests.pretrained.models import (
    FAMILIES,
    IN_THREES,
    MIXTURES,
    TOKENS,
    edit,
    make,
    parameters_in_session,
    their_logits,
    their_model,
)
from tests.refusals import refusal

TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
"""Tolerances relative to the largest logit."""
CASES = [("float64", "hardest"), ("float64", "others"), ("float32", "all")]
"""Precisions, and the layouts that they are tested on."""


def worst(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


LAYOUTS = [
    Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True),
    Layout(),
    Layout(tensor=2),
    Layout(tensor=4, sequence_parallel=True),
]
LAYOUTS_IN_THREES = [Layout(tensor=3, sequence_parallel=True), Layout(tensor=3)]
CHOSEN = {"hardest": slice(0, 1), "others": slice(1, None), "all": slice(None)}


@pytest.fixture(scope="module")
def ours(ranks, published, request):
    """Gives, for a precision and some layouts, the logits of every model that this session tests there."""
    tested = parameters_in_session(request, test_logits_are_those_of_transformers)

    @cache
    def logits(precision: str, which: str) -> dict[str, list[tuple[Layout, torch.Tensor]]]:
        found: dict[str, list[tuple[Layout, torch.Tensor]]] = {}
        chosen = {given["name"] for given in tested if (given["precision"], given["which"]) == (precision, which)}
        for names, layouts in ((FAMILIES, LAYOUTS), (IN_THREES, LAYOUTS_IN_THREES)):
            sources = {name: find_model(published(name)) for name in names if name in chosen}
            for layout in layouts[CHOSEN[which]]:
                for told in ranks.run(layout.world_size, jobs.logits_of_all, sources, layout, precision):
                    for name, of_model in told.items():
                        found.setdefault(name, []).append((layout, of_model))
        return found

    return logits


@pytest.mark.one_in(6)  # in float64, on the hardest layout
@pytest.mark.parametrize(("precision", "which"), CASES)
@pytest.mark.parametrize("name", [*FAMILIES, *IN_THREES])
def test_logits_are_those_of_transformers(ours, published, name, precision, which):
    theirs = their_logits(published(name), getattr(torch, precision))
    # NanoChat's norm of heads follows the rotation, whose sines and cosines are rounded to float32, and removes their
    # rounding. Crosscut's norm comes before the rotation. DeepSeek-V2's sines and cosines come from another function,
    # which rounds them to float32 otherwise.
    is_rounded = "nanochat" in name or "deepseek_v2" in name
    tolerance = max(TOLERANCES[precision], 1e-6 if is_rounded else 0.0)
    for layout, logits in ours(precision, which)[name]:
        assert worst(logits, theirs) <= tolerance, str(layout)


def test_float64_is_told_from_float32(published):
    """The reference is not itself in float32, which would need another tolerance."""
    folder = published("llama")
    single, double = (their_logits(folder, dtype) for dtype in (torch.float32, torch.float64))
    assert 1e-8 < worst(single, double) < 1e-4


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2, data=2, sharding="zero2", sequence_parallel=True),
        Layout(tensor=2, sequence_parallel=True),
        Layout(data=2, sharding="zero3"),
        Layout(tensor=2, data=2, sharding="zero3"),
    ],
    ids=str,
)
def test_every_layout_holds_the_same_model(ranks, published, layout):
    source = find_model(published("llama tied"))
    (reference,) = ranks.run(1, jobs.weights, source, Layout())
    for weights in ranks.run(layout.world_size, jobs.weights, source, layout):
        assert weights.keys() == reference.keys()
        assert all(torch.equal(weights[name], reference[name]) for name in reference)
    theirs = their_logits(published("llama tied"), torch.float64)
    for (ours,) in ranks.run(layout.world_size, jobs.logits, source, layout, ["float64"]):
        assert worst(ours, theirs) <= 1e-9


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=4), Layout(data=2, sharding="zero3")], ids=str)
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "qwen3", "mamba2", "nemotron_h", "granitemoehybrid", "qwen3_next", "olmo_hybrid"]
)
def test_a_rank_reads_what_it_holds_and_no_more(ranks, published, name, layout):
    source = find_model(published(name))
    for read, held, _ in ranks.run(layout.world_size, jobs.elements_read, source, layout):
        assert read == held


EXPERT_LAYOUTS = [
    Layout(data=2, expert=2),
    Layout(tensor=2, data=2, expert=2, sequence_parallel=True),
    Layout(data=2, expert=2, sharding="zero3"),
    Layout(data=3, expert=3),
]


@pytest.mark.one_in(13)
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_a_rank_reads_only_its_own_experts(ranks, published, name, layout):
    source, experts = find_model(published(name)), set()
    for read, held, names in ranks.run(layout.world_size, jobs.elements_read, source, layout):
        is_whole = layout.sharding and "deepseek" in name  # both rows of a rotated pair are read, if one is held
        assert held <= read <= 1.01 * held if is_whole else read == held
        own = {int(found[1]) for each in names if (found := re.search(r"\.experts\.(\d+)\.", each))}
        assert not own or own == {*range(min(own), min(own) + source.model.num_experts // layout.expert)}
        experts |= own
    assert experts in (set(), {*range(source.model.num_experts)})
    assert bool(experts) is ("granite" not in name)  # one tensor holds all experts of a Granite
    theirs = their_logits(published(name), torch.float64)
    for (ours,) in ranks.run(layout.world_size, jobs.logits, source, layout, ["float64"]):
        assert worst(ours, theirs) <= (2e-6 if "deepseek_v2" in name else 1e-12)


@pytest.mark.one_in(13)
@pytest.mark.parametrize("name", MIXTURES)
def test_logits_are_as_close_to_transformers_as_its_casts_allow(ranks, published, name):
    """Its routers and norms compute in float32, even in a float64 model, and DeepSeek-V2's sines, too."""
    with torch.no_grad():
        as_it_is = their_model(published(name), torch.float64)(TOKENS).logits
    ((ours,),) = ranks.run(1, jobs.logits, find_model(published(name)), Layout(), ["float64"])
    is_rounded = name.startswith(("deepseek_v2", "qwen3_next"))  # Qwen3-Next's state is float32
    assert 1e-9 < worst(ours, as_it_is) <= (1e-5 if is_rounded else 1e-6)
    if not name.startswith("deepseek_v2"):
        assert worst(ours, their_logits(published(name), torch.float64)) <= 1e-12


def test_layers_that_predict_further_tokens_are_left_out(published, copied):
    """They follow the model's layers, as in the files of DeepSeek-V3."""
    name = "deepseek_v3 with experts"
    other, mark = ({f"model.layers.2.{each}": torch.zeros(1)} for each in ("mlp.gate.weight", "eh_proj.weight"))
    with pytest.raises(CheckpointError, match="but holds 3 layers"):
        check(copied(name, lambda tensors: tensors.update(other)))
    check(copied(name, lambda tensors: tensors.update(other | mark)))


def test_many_files_are_one_model(ranks, published, tmp_path):
    make(tmp_path / "many", "gpt2", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    (one,), (many,) = (
        ranks.run(1, jobs.weights, find_model(folder), Layout()) for folder in (published("gpt2"), tmp_path / "many")
    )
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_blocks_of_rows_join(ranks, published):
    source = find_model(published("gpt2"))
    whole, pieces = (ranks.run(2, jobs.weights_in_blocks, source, Layout(tensor=2), size) for size in (1 << 20, 700))
    for one, other in zip(whole, pieces, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_weights_are_held_in_the_precision(ranks, published, precision):
    source = find_model(published("qwen2"))
    (dtypes,) = ranks.run(1, jobs.dtypes, source, precision)
    assert dtypes == {f"torch.{precision}"}
    (reference,) = ranks.run(1, jobs.logits, source, Layout(), ["float32"])
    (rounded,) = ranks.run(1, jobs.logits, source, Layout(), [precision])
    assert worst(rounded[0].float(), reference[0]) < 0.1


def test_float8_has_no_weights_of_its_own(ranks, published):
    with pytest.raises(ConfigError, match="`precision` must be 'float32', 'bfloat16', 'float16' or 'float64', but is"):
        ranks.run(1, jobs.load, find_model(published("gpt2")), Layout(), "float8")


# What is wrong with a folder


@pytest.fixture
def copied(published, tmp_path):
    """Copies a family's folder, its tensors changed by a function of them."""

    def copy(name, change=lambda tensors: None):
        folder = tmp_path / "copy"
        shutil.copytree(published(name), folder, dirs_exist_ok=True)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        return folder

    return copy


def check(folder) -> None:
    require_weights(read_published(folder).model, folder)


def test_missing_tensors_are_named(copied):
    def remove(tensors):
        for name in list(tensors):
            if name.endswith("k_proj.weight"):
                del tensors[name]

    folder = copied("llama", remove)
    assert refusal(CheckpointError, check, folder) == (
        f"`{folder}` must hold all tensors of the model in its `config.json`, but lacks "
        "`model.layers.0.self_attn.k_proj.weight`, `model.layers.1.self_attn.k_proj.weight`. Download "
        "the missing files."
    )


def test_left_over_tensors_are_named(copied):
    def add(tensors):
        for i in range(5):
            tensors[f"model.layers.0.adapter.{i}"] = torch.zeros(1)

    with pytest.raises(
        CheckpointError, match=r"has `model.layers.0.adapter.0`, .* and 2 more. The model computes some"
    ):
        check(copied("llama", add))


@pytest.mark.parametrize(
    ("name", "harmless"),
    [
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt2", "transformer.h.1.attn.masked_bias"),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("qwen3_next", "mtp.layers.0.mlp.down_proj.weight"),
    ],
)
def test_what_is_known_to_be_no_parameter_is_passed_over(copied, name, harmless):
    check(copied(name, lambda tensors: tensors.update({harmless: torch.zeros(1)})))


_EMBEDDING = "model.embed_tokens.weight"
UNTIED = {"gpt2": "transformer.wte.weight", "llama tied": _EMBEDDING, "qwen2": _EMBEDDING}


@pytest.mark.parametrize("name", UNTIED)
@pytest.mark.parametrize("differs", [False, True], ids=["copy", "another"])
def test_an_output_beside_tied_weights_is_kept_if_it_differs(ranks, copied, capsys, name, differs):
    def add(tensors):
        tensors["lm_head.weight"] = tensors[UNTIED[name]].clone()
        tensors["lm_head.weight"][7, 3] += 1.5 * differs

    folder = copied(name, add)
    source = find_model(folder)
    assert source.model.tied is not differs
    told = f"`{UNTIED[name]}` and `lm_head.weight` in `{folder}` differ, although `tie_word_embeddings` in"
    assert (told in capsys.readouterr().err) is differs
    ((ours,),) = ranks.run(1, jobs.logits, source, Layout(), ["float64"])
    assert worst(ours, their_logits(folder, torch.float64)) <= 1e-9


def test_either_of_two_tied_tensors_is_enough(ranks, copied):
    folder = copied("llama tied", lambda tensors: tensors.update({"lm_head.weight": tensors.pop(_EMBEDDING)}))
    ((ours,),) = ranks.run(1, jobs.logits, find_model(folder), Layout(), ["float64"])
    assert worst(ours, their_logits(folder, torch.float64)) <= 1e-9


def test_tied_tensors_are_compared_once_and_by_their_values(copied, monkeypatch):
    read: list[int] = []
    blocks = differing.__globals__["_blocks"]
    monkeypatch.setitem(differing.__globals__, "_blocks", lambda *given: read.append(1) or blocks(*given))
    for dtype, change in ((torch.float32, 0.0), (torch.float64, 0.0), (torch.float64, 1e-9), (torch.bfloat16, 0.0)):

        def add(tensors, dtype=dtype, change=change):
            if dtype is torch.bfloat16:
                tensors[_EMBEDDING] = tensors[_EMBEDDING].bfloat16().float()
            tensors["lm_head.weight"] = tensors[_EMBEDDING].to(dtype, copy=True)
            tensors["lm_head.weight"][7, 3] += change

        folder = copied("llama tied", add)
        assert find_model(folder).model.tied is not bool(change)
        notices_of(folder)
        assert len(read) == 2
        read.clear()


def test_a_whole_file_has_precedence_over_an_index(ranks, published, tmp_path, capsys):
    """As in `transformers`, whether the index is old or new."""
    make(tmp_path / "many", "gpt2", max_shard_size="20KB")
    index, files = (sorted((tmp_path / "many").glob(f"*{end}")) for end in (".index.json", "-of-*.safetensors"))
    whole = {name: tensor * 2 for name, tensor in load_file(published("gpt2") / "model.safetensors").items()}
    save_file(whole, tmp_path / "many" / "model.safetensors", metadata={"format": "pt"})
    find_model(tmp_path / "many")
    assert "holds two sets of weights. Crosscut reads `model.safetensors`, as" in capsys.readouterr().err
    for file in files[:2]:
        file.unlink()  # an index whose files are gone stops nothing
    ((ours,),) = ranks.run(1, jobs.logits, find_model(tmp_path / "many"), Layout(), ["float64"])
    assert worst(ours, their_logits(tmp_path / "many", torch.float64)) <= 1e-9
    index[0].unlink()
    capsys.readouterr()
    find_model(tmp_path / "many")
    assert capsys.readouterr().err == ""


def test_an_untied_model_needs_its_output(copied):
    with pytest.raises(CheckpointError, match=r"lacks `lm_head\.weight`"):
        check(copied("llama", lambda tensors: tensors.pop("lm_head.weight")))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_names_may_lack_the_prefix(ranks, published, copied, name):
    """As in the files of models without their output, GPT-2's own among them."""

    def shorten(tensors):
        for key in list(tensors):
            tensors[key.removeprefix("transformer.").removeprefix("model.")] = tensors.pop(key)

    (short,), (full,) = (
        ranks.run(1, jobs.weights, find_model(folder), Layout()) for folder in (copied(name, shorten), published(name))
    )
    assert all(torch.equal(short[key], full[key]) for key in full)


def in_memory(tensors):
    """Rename the released tensors of an OLMo hybrid to the names that `transformers` has in memory."""
    for key in [key for key in tensors if key.endswith("q_conv1d.weight")]:
        parts = [tensors.pop(key.replace("q_conv1d", f"{part}_conv1d")) for part in "qkv"]
        tensors[key.replace("q_conv1d", "conv1d")] = torch.cat(parts)
    for old, new in (
        ("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm")
    ):  # fmt: skip
        for key in [key for key in tensors if old in key]:
            tensors[key.replace(old, new)] = tensors.pop(key)


def as_saved(tensors):
    """Cut the taps and name the norms of an OLMo hybrid as `transformers` does when it saves a model."""
    in_memory(tensors)
    for key in [key for key in tensors if key.endswith(".conv1d.weight")]:
        parts = [part.clone() for part in tensors.pop(key).chunk(3)]
        tensors.update({key.replace("conv1d", f"{part}_conv1d"): each for part, each in zip("qkv", parts, strict=True)})
    for old, new in (
        ("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm")
    ):  # fmt: skip
        for key in [key for key in tensors if old in key]:
            tensors[key.replace(old, new)] = tensors.pop(key)


@pytest.mark.parametrize("change", [as_saved, in_memory])
def test_each_form_of_the_files_of_olmo_hybrid_is_read(ranks, published, copied, change):
    """On two ranks, whose parts of the taps begin in the middle of a tensor. An export has the released form."""
    released, other = published("olmo_hybrid"), copied("olmo_hybrid", change)
    shapes = [{name: t.shape for name, t in load_file(f / "model.safetensors").items()} for f in (released, other)]
    assert shapes[0] != shapes[1]
    one, two = (ranks.run(2, jobs.weights, find_model(folder), Layout(tensor=2)) for folder in (released, other))
    assert all(torch.equal(one[0][key], two[0][key]) for key in one[0])
    wanted = their_logits(released, torch.float64)
    assert torch.equal(their_logits(other, torch.float64), wanted)  # `transformers` reads each form, too


def test_taps_of_another_number_are_named(copied):
    def cut(tensors):
        tensors["model.layers.0.linear_attn.v_conv1d.weight"] = torch.zeros(7, 1, 3)

    folder = copied("olmo_hybrid", cut)
    names = " and ".join(f"`model.layers.0.linear_attn.{part}_conv1d.weight`" for part in "qkv")
    assert refusal(CheckpointError, check, folder) == (
        f"{names} in `{folder}/model.safetensors` must have 56 rows (`config.json`), but have 39. Download the model "
        "again."
    )


def test_another_shape_is_named(copied):
    folder = copied("llama", lambda t: t.update({"model.norm.weight": torch.zeros(31)}))
    assert refusal(CheckpointError, check, folder) == (
        f"`model.norm.weight` in `{folder}/model.safetensors` must have the shape [32] from `config.json`, "
        "but has [31]. Download the model again."
    )


def test_another_type_is_named(copied):
    folder = copied("llama", lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=r"must have type F64, F32, F16 or BF16, but has I8. Quantised weights"):
        check(folder)


def test_files_that_are_not_there_or_not_whole_are_named(copied, tmp_path):
    folder = copied("llama")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=rf"`{path}` must be an undamaged safetensors file, but is not: "):
        check(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"`{folder}` must hold `model.safetensors`, but does not. Download"):
        check(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(CheckpointError, match=rf"`{folder}` must hold `model-1.safetensors`, but does not"):
        check(folder)
    for content in ("{}", r'{"weight_map": {"a": "\u0000"}}', '{"weight_map": {"a": "../b"}}'):
        index.write_text(content)
        with pytest.raises(CheckpointError, match=rf"`{index}` must be an index that maps tensors to files"):
            check(folder)


def test_the_tables_name_the_models_parameters(ranks, published):
    """All that there are, with their shapes but for the vocabulary's padding."""
    models = {name: find_model(published(name)).model for name in FAMILIES}
    (told,) = ranks.run(1, jobs.shapes_of_all, list(models.values()))
    for (name, model), (shapes, padded) in zip(models.items(), told, strict=True):
        ours = {
            weight.name: (padded.get(weight.name, weight.shape[0]), *weight.shape[1:]) for weight in weights_of(model)
        }
        assert ours == shapes, name


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_layers", [1, 3, 10_000])
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_number_of_layers_is_compared_with_the_files(published, tmp_path, model, num_layers):
    folder = shutil.copytree(published(model), tmp_path / "model")
    edit(folder, **{"n_layer" if model == "gpt2" else "num_hidden_layers": num_layers})
    assert refusal(CheckpointError, find_model, folder) == (
        f"`{folder}` must hold the tensors of {num_layers:,} layers (`config.json`), but holds 2 layers. Download the "
        "model again."
    )


@pytest.mark.parametrize(
    ("key", "value"), [("vocab_size", 2_000_000_000), ("intermediate_size", 2_000_000_000), ("hidden_size", 1 << 20)]
)
def test_size_that_differs_from_the_files_is_told_before_anything_is_created(published, tmp_path, key, value):
    folder = shutil.copytree(published("llama"), tmp_path / "model")
    edit(folder, **{key: value})
    with pytest.raises(CheckpointError, match=r"must have the shape \[.*\] from `config.json`, but has"):
        find_model(folder)
