"""Weights out: folders that `transformers` loads, from any layout, bit for bit what came in."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from crosscut.checkpoint.format.tensor_file import Form
from crosscut.checkpoint.storage import LocalFolder
from crosscut.config import ConfigError, Layout
from crosscut.pretrained import export_checkpoint, find_model
from crosscut.pretrained.families import published_shapes
from crosscut.pretrained.task_files import with_class
from crosscut.pretrained.writing import plan_files, write_tensors
from tests.pretrained import jobs
from tests.pretrained.encoders import make_encoder
from tests.pretrained.models import FAMILIES, their_logits

LAYOUTS = [
    Layout(tensor=2, data=2, sharding="zero2"),
    Layout(),
    Layout(tensor=4),
    Layout(tensor=2, sequence_parallel=True),
    Layout(data=2, sharding="zero3"),
]


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(path))
    return found


def assert_same_tensors(one: Path, other: Path) -> None:
    first, second = tensors_in(one), tensors_in(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor, second[name]), name


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_came_in_goes_out(ranks, published, tmp_path, name):
    """From two tensor ranks: the same tensors, the same computation."""
    folder, out = published(name), tmp_path / "out"
    ranks.run(2, jobs.export, find_model(folder), Layout(tensor=2), out, 10**9)
    assert_same_tensors(folder, out)
    # A DeepSeek-V2 leaves as a DeepSeek-V3, which has the same tensors, but another function for sines and cosines.
    close = {"rtol": 1e-4, "atol": 1e-5} if name == "deepseek_v2" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(their_logits(out, torch.float32), their_logits(folder, torch.float32), **close)
    assert find_model(out).model == find_model(folder).model


@pytest.mark.one_in(5)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_writes_the_same_files(ranks, published, tmp_path, layout):
    folder, out = published("llama tied"), tmp_path / "out"
    ranks.run(layout.world_size, jobs.export, find_model(folder), layout, out, 30_000)
    names = sorted(path.name for path in out.iterdir())
    files = [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    beside = ["model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]
    assert names == ["config.json", "generation_config.json", *files, *beside]
    assert_same_tensors(folder, out)
    (again,) = ranks.run(1, jobs.weights, find_model(out), Layout())
    (before,) = ranks.run(1, jobs.weights, find_model(folder), Layout())
    assert all(torch.equal(again[name], before[name]) for name in before)


def test_transformers_loads_many_files_and_the_tokenizer(ranks, published, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "out"
    ranks.run(1, jobs.export, find_model(published("qwen3")), Layout(), out, 20_000)
    _, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(told.values()), told
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "the quick fox, 世界"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token == "<|endoftext|>"


def test_transformers_reads_an_exported_tokenizer_with_the_same_class(ranks, published, tmp_path):
    """A RoBERTa becomes a `bert`. No class but Qwen2's reads the tokenizer of a Qwen2, so that is named."""
    from transformers import AutoTokenizer

    texts = ["the quick fox", "jumps over 2024"]
    folder = make_encoder(tmp_path / "roberta", "roberta with a head")
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    inner.save(str(folder / "tokenizer.json"))
    for place, line in ((folder, ""), (published("qwen2"), "its Qwen2Tokenizer has another `normalizer`")):
        out = tmp_path / f"out-{place.name}"
        ranks.run(1, jobs.export, find_model(place), Layout(), out, 10**9)
        theirs, again = (AutoTokenizer.from_pretrained(one) for one in (place, out))
        assert theirs(texts)["input_ids"] == again(texts)["input_ids"]
        files = {name: (out / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
        model_type = json.loads((out / "config.json").read_text())["model_type"]
        assert line in (told := with_class(files, out / "tokenizer.json", model_type)[1]) and bool(line) is bool(told)


def test_what_lies_beside_the_tokenizer_comes_along(ranks, published, tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out"
    shutil.copytree(published("llama"), folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    ranks.run(1, jobs.export, find_model(folder), Layout(), out, 10**9)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()


def test_files_keep_to_their_size():
    shapes = {"a": (100, 10), "b": (10,), "c": (3, 10), "d": (1000, 10)}
    forms = {name: Form(shape, torch.float32) for name, shape in shapes.items()}
    files = plan_files(forms, max_bytes=4 * 1010)
    assert [(file.name, list(file.forms)) for file in files] == [
        ("model-00001-of-00003.safetensors", ["a", "b"]),
        ("model-00002-of-00003.safetensors", ["c"]),
        ("model-00003-of-00003.safetensors", ["d"]),
    ]
    assert [file.name for file in plan_files(forms, max_bytes=10**6)] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_library_reads_what_is_written(tmp_path, dtype):
    tensors = {"a": torch.randn(5, 3).to(dtype), "b": torch.randn(7).to(dtype), "c": torch.randn(4, 6).t().to(dtype)}
    forms = {name: Form(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    write_tensors(LocalFolder(tmp_path), plan_files(forms, max_bytes=10**6), iter(tensors.values()))
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_the_tensors_of_a_file_follow_each_other_in_order(published, ranks, tmp_path):
    """So that a reader that goes through a file goes forward on the disk."""
    source = find_model(published("gpt2"))
    ranks.run(1, jobs.export, source, Layout(), tmp_path / "out", 10**9)
    with (tmp_path / "out" / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    del header["__metadata__"]
    assert list(header) == list(published_shapes(source.model))
    starts = [entry["data_offsets"][0] for entry in header.values()]
    assert starts == sorted(starts)


@pytest.mark.parametrize("name", ["mamba2", "nemotron_h with experts"])
def test_a_model_in_bfloat16_keeps_its_float32_decay_rates(ranks, published, tmp_path, name):
    """Its files have no other type, except for the biases by which experts are chosen, as those of DeepSeek-V3."""
    folder, out = published(name), tmp_path / "out"
    rates = torch.cat(ranks.run(2, jobs.export_in_bfloat16, find_model(folder), Layout(tensor=2), out))
    theirs, ours = tensors_in(folder), tensors_in(out)
    assert torch.equal(rates, theirs["backbone.layers.0.mixer.A_log"])
    biases = {key for key in ours if key.endswith("e_score_correction_bias")}
    assert len(biases) == ("experts" in name) * 2
    assert all(torch.equal(ours[key], theirs[key]) for key in biases)
    assert {ours[key].dtype for key in ours.keys() - biases} == {torch.bfloat16}


def test_a_folder_that_holds_something_is_left_alone(ranks, published, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for told in ranks.run(2, jobs.export_raises, find_model(published("gpt2")), Layout(tensor=2), tmp_path):
        expected = f"ConfigError: `{tmp_path}` must be a new folder, but is not empty. Choose another name."
        assert told == [expected] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_place_that_cannot_be_written_is_told_on_all_ranks(ranks, published, tmp_path):
    """The first rank fails; the others are not left waiting."""
    (tmp_path / "file").write_text("no folder")
    out = tmp_path / "file" / "out"
    for told in ranks.run(2, jobs.export_raises, find_model(published("gpt2")), Layout(tensor=2), out, None):
        assert len(told) == 2
        assert all(text.startswith(f"CheckpointError: `{out}` must be writable, but is not: ") for text in told)


def test_a_disk_that_fills_up_leaves_nothing(ranks, published, tmp_path):
    source = find_model(published("gpt2"))
    for told in ranks.run(2, jobs.export_raises, source, Layout(tensor=2), tmp_path / "out", 5):
        expected = (
            f"CheckpointError: `{tmp_path}/out` must be writable, but is not: No space left on device. Free some "
            "space, grant access, or choose another folder."
        )
        assert told == [expected] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_published_folder_is_no_checkpoint(published, tmp_path):
    folder = published("gpt2")
    with pytest.raises(
        ConfigError, match=rf"`{folder}` must be a run or a checkpoint, but is already a Hugging Face folder"
    ):
        export_checkpoint(find_model(folder), tmp_path / "out")
