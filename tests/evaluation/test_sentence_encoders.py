"""Embeddings of the encoders that sentence-transformers writes, beside the library's own vectors in float64."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.config import CheckpointError, ConfigError, DataError, Layout
from crosscut.config.published.sentences import read_steps
from crosscut.evaluation.embeddings import TextOptions, embed, embeddings
from crosscut.evaluation.embeddings.pooling import SentencePooling, require_weights_of
from crosscut.evaluation.embeddings.texts import TextEncoder, about_steps, encode_texts
from crosscut.evaluation.ranks import Machinery
from crosscut.pretrained import export_checkpoint, export_model, find_model
from tests.evaluation.sentences import (
    HIDDEN,
    TEXTS,
    change,
    library,
    make_trunk,
    modules_of,
    theirs,
    with_keys,
    write,
)
from tests.pretrained.encoders import make_encoder
from tests.pretrained.jobs import load
from tests.ranks import RankPool

ON = Machinery(layout=Layout(), device="cpu", precision="float64")
MODES = ["mean", "cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"]
TAILS = ["", "N", "DN", "ND", "R", "SNR"]
QUERY = TextOptions(prompt_name="query")
PROMPTS = {"query": "jumps over: ", "passage": "dog "}


@pytest.fixture(scope="module")
def trunk(tmp_path_factory) -> Path:
    return make_trunk(tmp_path_factory.mktemp("trunk") / "bert")


@pytest.fixture(scope="module")
def written(tmp_path_factory, trunk) -> Path:
    """A list of modules with a dense layer, which the tests change."""
    modules = modules_of(trunk, ["weightedmean", "max"], "D")
    return write(tmp_path_factory.mktemp("written") / "model", modules, prompts=PROMPTS)


def _embedded(folder: str, asked: dict[str, Any]) -> Tensor:
    """On a rank: the embeddings of `TEXTS`, in one batch."""
    source, (encoder, ids) = encode_texts(folder, lambda: TEXTS, ON, TextOptions(**asked), lambda _: None)
    return embeddings(load(source, Layout(), "float64"), ids, pooling=encoder.pooling())


def difference(ranks: RankPool, folder: Path, library_asks: dict[str, Any] | None = None, **asked: Any) -> float:
    """Largest difference of an element from the library's."""
    (ours,) = ranks.run(1, _embedded, str(folder), asked)
    expected = theirs(folder, **(library_asks or {}))
    assert ours.shape == expected.shape
    return float((ours - expected).abs().max())


@pytest.mark.one_in(7)
@pytest.mark.parametrize("modes", [*MODES, ["max", "cls", "mean", "max"], MODES], ids=str)
def test_steps_are_the_librarys(trunk, tmp_path, modes):
    """With every list of modules after the transformer: the same hidden states give the same vector."""
    hidden = torch.randn(3, 9, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([9, 4, 6])
    mask = (torch.arange(9) < lengths[:, None]).long()
    for tail in TAILS:
        for skips in (False, True):
            folder = write(tmp_path / f"{tail} {skips}", modules_of(trunk, modes, tail, include_prompt=not skips))
            features = {"token_embeddings": hidden, "attention_mask": mask, "prompt_length": 3}
            for module in list(library(folder))[1:]:
                features = module(features)
            steps = read_steps(folder)
            require_weights_of(steps, HIDDEN)
            ours = SentencePooling(steps, num_skipped=3 if steps.skips_prompt else 0)(hidden, lengths)
            assert steps.size(HIDDEN) == ours.shape[1]
            torch.testing.assert_close(ours, features["sentence_embedding"], rtol=0, atol=1e-12)


def _renamed(folder: Path) -> None:
    (folder / "1_Pooling").rename(folder / "pooling of mine")
    paths = ("", "pooling of mine", "2_Dense")
    change(
        folder, "modules.json", lambda found: [{**one, "path": path} for one, path in zip(found, paths, strict=True)]
    )


def _older(folder: Path) -> None:
    """The spellings of version 2."""
    kinds = [f"sentence_transformers.models.{kind}" for kind in ("Transformer", "Pooling", "Dense")]
    change(
        folder, "modules.json", lambda found: [{**one, "type": kind} for one, kind in zip(found, kinds, strict=True)]
    )
    flags = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    change(folder, "1_Pooling/config.json", lambda _: {"word_embedding_dimension": HIDDEN, **flags})
    change(folder, "sentence_bert_config.json", lambda _: {"max_seq_length": 9, "do_lower_case": False})
    change(folder, "config_sentence_transformers.json", lambda _: {"__version__": {"sentence_transformers": "2.0.0"}})


def _named_for_roberta(folder: Path) -> None:
    (folder / "sentence_bert_config.json").unlink()
    change(folder, "sentence_roberta_config.json", with_keys(max_seq_length=7))


def _cut_in_the_tokenizer(folder: Path) -> None:
    """Truncation and padding inside `tokenizer.json`, as in all-MiniLM-L6-v2. The library takes only the side."""
    cut = {"max_length": 5, "strategy": "LongestFirst", "stride": 1, "direction": "Left"}
    padding = {"strategy": {"Fixed": 14}, "direction": "Left", "pad_to_multiple_of": 8, "pad_id": 0, "pad_type_id": 0}
    change(folder, "tokenizer.json", with_keys(truncation=cut, padding={**padding, "pad_token": "[PAD]"}))


def _setting(name: str, **values: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder, name, with_keys(**values))


CHANGES: dict[str, Callable[[Path], None]] = {
    "as written": lambda _: None,
    "default prompt": _setting("config_sentence_transformers.json", default_prompt_name="query"),
    "truncated": _setting("config_sentence_transformers.json", truncate_dim=10),
    "longest in sentence_bert_config": _setting("sentence_bert_config.json", max_seq_length=6),
    "longest in tokenizer_config": _setting("tokenizer_config.json", model_max_length=8),
    "both": lambda folder: (
        change(folder, "tokenizer_config.json", with_keys(model_max_length=5)),
        change(folder, "sentence_bert_config.json", with_keys(max_seq_length=11)),
    ),
    "a length without end": _setting("tokenizer_config.json", model_max_length=10**30),
    "cut on the left": _setting("tokenizer_config.json", truncation_side="left"),
    "padded on the left": _setting("tokenizer_config.json", padding_side="left"),
    "lower case": _setting("sentence_bert_config.json", do_lower_case=True),
    "renamed folder": _renamed,
    "older spellings": _older,
    "older file name": _named_for_roberta,
    "cut in the tokenizer": _cut_in_the_tokenizer,
}
"""Changes of files, by what they do."""


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", CHANGES)
def test_files_are_read_as_the_library_reads_them(ranks: RankPool, written, tmp_path, name):
    folder = shutil.copytree(written, tmp_path / "model")
    CHANGES[name](folder)
    assert difference(ranks, folder) < 1e-9


@pytest.mark.one_in(4)
@pytest.mark.parametrize("modes", ["mean", "cls", "weightedmean", ["lasttoken", "max"]], ids=str)
def test_prompt_is_left_out_of_the_pooling(ranks: RankPool, trunk, tmp_path, modes):
    modules = modules_of(trunk, modes, "N", include_prompt=False)
    folder = write(tmp_path / "model", modules, prompts=PROMPTS, default_prompt_name="passage")
    assert difference(ranks, folder) < 1e-9
    assert difference(ranks, folder, {"prompt_name": "query"}, prompt_name="query") < 1e-9
    assert difference(ranks, folder, {"prompt": ""}, prompt_name="document") < 1e-9  # the library's empty prompt


@pytest.mark.one_in(3)
@pytest.mark.parametrize("settings", [{}, {"add_prefix_space": True}, {"tokenizer_class": "RobertaTokenizer"}], ids=str)
def test_roberta_keeps_the_space_before_a_text(ranks: RankPool, tmp_path, settings):
    """A byte-level tokenizer reads spaces at the ends of a text, which WordPiece drops."""
    make_encoder(tmp_path / "roberta", "roberta")
    change(tmp_path / "roberta", "tokenizer_config.json", lambda _: {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "!", "model_max_length": 13, **settings,
    })  # fmt: skip
    folder = write(tmp_path / "model", modules_of(tmp_path / "roberta", "mean", "N"))
    texts = [text for text in TEXTS if text]
    ours = torch.tensor(embed(str(folder), lambda: texts, ON), dtype=torch.float64)
    assert (ours - theirs(folder, texts)).abs().max() < 1e-9


def test_command_embeds_with_ranks_and_names_what_it_ignores(forked_ranks, written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "model")
    change(folder, "1_Pooling/config.json", with_keys(include_prompt=False))
    expected = theirs(folder, prompt_name="query")
    change(folder, "1_Pooling/config.json", with_keys(colour="red"))  # which the library refuses
    change(folder, "modules.json", lambda modules: [{**one, "shape": 1} for one in modules])
    told: list[str] = []
    on = Machinery(layout=Layout(tensor=2), device="cpu", precision="float64")
    ours = torch.tensor(embed(str(folder), lambda: TEXTS, on, options=QUERY, tell=told.append))
    assert (ours - expected).abs().max() < 1e-6
    assert told[:2] == [
        f"Crosscut does not know these keys in `{folder}/modules.json` and ignores them: `shape`.",
        f"Crosscut does not know these keys in `{folder}/1_Pooling/config.json` and ignores them: `colour`.",
    ]
    assert told[3].startswith("The embeddings do not have the length 1")


def test_prompt_leaves_room_for_a_text(written, tmp_path):
    """The tokenizer puts no token around a text."""
    folder = shutil.copytree(written, tmp_path / "model")
    change(folder, "1_Pooling/config.json", with_keys(include_prompt=False))
    change(folder, "tokenizer.json", with_keys(post_processor=None))
    change(folder, "tokenizer_config.json", with_keys(tokenizer_class="PreTrainedTokenizerFast"))
    with pytest.raises(ConfigError, match=r"^`max_tokens` must be more than 1, .* prompt 'dog ', but is 1\. "):
        embed(str(folder), lambda: TEXTS, ON, options=TextOptions(prompt_name="passage", max_tokens=1))
    with pytest.raises(DataError, match=r"^Text 4 must have at least one token after the prompt, but has none\."):
        embed(str(folder), lambda: TEXTS, ON, options=TextOptions(prompt_name="passage"))


def test_prompt_is_one_of_the_models(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "model")
    with pytest.raises(
        ConfigError, match=r"^`prompt_name` must be one of .*'query', .*'passage'.*, but is 'answer'\.$"
    ):
        embed(str(folder), lambda: TEXTS, ON, options=TextOptions(prompt_name="answer"))
    with pytest.raises(ConfigError, match=r"^`prompt_name` must be left out .*, but is 'query'\.$"):
        shutil.rmtree(folder / "1_Pooling")
        for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
            (folder / name).unlink()
        embed(str(folder), lambda: TEXTS, ON, options=QUERY)


def test_dense_layer_must_fit(written, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(written, tmp_path / "model")
    weights = load_file(folder / "2_Dense" / "model.safetensors")
    for name, refused in {
        r"must hold linear\.bias \[24\], linear\.weight \[24, 64\], but holds linear\.weight \[24, 64\]\.": {
            "linear.weight": weights["linear.weight"]
        },
        r"must hold finite weights, but 1 value in `bias` is not finite": {
            **weights,
            "linear.bias": weights["linear.bias"].index_fill(0, torch.tensor([3]), float("nan")),
        },
    }.items():
        save_file(refused, folder / "2_Dense" / "model.safetensors")
        with pytest.raises(CheckpointError, match=refused if isinstance(refused, str) else name):
            embed(str(folder), lambda: TEXTS, ON)
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors` must exist, but is missing\. Save the model again"):
        embed(str(folder), lambda: TEXTS, ON)
    change(folder, "1_Pooling/config.json", with_keys(pooling_mode="mean"))
    with pytest.raises(CheckpointError, match=r"`in_features` in .* must be 32, .* but is 64\."):
        embed(str(folder), lambda: TEXTS, ON)
    assert json.loads((folder / "2_Dense" / "config.json").read_text())["in_features"] == 64


def _export(folder: Path, out: Path) -> None:
    source = find_model(folder)
    export_model(load(source, Layout(), "float32"), out, tokenizer=source.tokenizer)


def test_export_keeps_the_steps(ranks: RankPool, written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "model")
    _renamed(folder)
    change(folder, "config_sentence_transformers.json", with_keys(default_prompt_name="query"))
    ranks.run(1, _export, folder, tmp_path / "out")
    assert difference(ranks, tmp_path / "out") < 1e-9
    assert (theirs(tmp_path / "out") - theirs(folder)).abs().max() < 1e-12
    change(
        folder,
        "modules.json",
        lambda found: [*found, {"name": "cnn", "path": "c", "type": "sentence_transformers.CNN"}],
    )
    source = find_model(folder)
    with pytest.raises(ConfigError, match=r"`type` in .* must be a module of .*CNN"):
        export_checkpoint(replace(source, adapter="no adapter is read"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_run_of_a_sentence_encoder_says_that_it_has_no_steps(written):
    source = replace(find_model(written), is_published=False)
    steps = TextEncoder.of(source).steps
    assert (steps.poolings, steps.is_normalized) == (("mean",), True)
    assert about_steps(source, steps)[0] == (
        "The embeddings are the normalised mean of the tokens. `modules.json` of the sentence encoder from which the "
        "run started is not used."
    )


def test_run_without_files_of_the_library_has_the_normalised_mean(trunk):
    source = find_model(trunk)
    steps = read_steps(source.tokenizer.parent)
    assert (steps.poolings, steps.is_normalized, steps.size(HIDDEN)) == (("mean",), True, HIDDEN)
