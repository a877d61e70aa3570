"""Files of sentence encoders: keys of the library's own classes, and refusals."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from crosscut.config import ConfigError
from crosscut.config.published.keys.sentences import DENSE, MODULES, NORMALIZE, POOLING, SENTENCE, TRANSFORMER
from crosscut.config.published.sentences import ACTIVATIONS, Dense, Normalize, module_files, read_steps

TYPES = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
}
TANH = "torch.nn.modules.activation.Tanh"
OWN = {"Pooling": {"embedding_dimension": 8}, "Dense": {"in_features": 8, "out_features": 4}}


def listed(*kinds: str) -> list[dict[str, Any]]:
    return [
        {"idx": place, "name": str(place), "path": f"{place}_{kind}" if place else "", "type": TYPES.get(kind, kind)}
        for place, kind in enumerate(kinds)
    ]


def put(folder: Path, name: str, content: object) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An encoder with one module of each kind."""
    kinds = ["Transformer", "Pooling", "Dense", "Normalize"]
    put(tmp_path, "modules.json", listed(*kinds))
    for place, kind in enumerate(kinds[1:], 1):
        put(tmp_path, f"{place}_{kind}/config.json", OWN.get(kind, {}))
    return tmp_path


def test_tables_know_every_key_that_the_library_writes_or_reads():
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from sentence_transformers.sentence_transformer.modules.pooling import _LEGACY_POOLING_MODE_KWARGS as OLDER

    of_python = {"self", "args", "kwargs", "model_name_or_path", "backend", "init_weight", "init_bias"}
    for kind, table in {"Transformer": TRANSFORMER, "Pooling": POOLING, "Dense": DENSE, "Normalize": NORMALIZE}.items():
        made = getattr(modules, kind)
        renamed = {*made.config_key_renames, *(OLDER if kind == "Pooling" else ())}
        keys = {*made.config_keys, *inspect.signature(made.__init__).parameters, *renamed} - of_python
        assert keys - {*table.known()} == set(), kind
    assert {*SentenceTransformer(modules=[modules.Normalize()])._get_model_config(), "truncate_dim"} - {
        *SENTENCE.known()
    } == set()
    assert {"idx", "name", "path", "type", "kwargs"} == {*MODULES.known()}


def test_modules_are_computed_or_refused_by_name(folder):
    """All modules that the library has."""
    from sentence_transformers.sentence_transformer import modules

    kinds = {name for name in modules.__all__ if name not in ("Module", "InputModule")}
    for name in sorted(kinds - {*TYPES}):
        kind = getattr(modules, name)
        whole = f"{kind.__module__}.{kind.__name__}"
        put(folder, "modules.json", [*listed("Transformer", "Pooling"), {**listed("", "", whole)[2], "type": whole}])
        with pytest.raises(ConfigError, match=rf"`type` in .* must be a module of .*, but is '{whole}'\. "):
            read_steps(folder)


def test_activations_are_modules_of_torch_without_parameters():
    import torch

    for name in ACTIVATIONS:
        assert not list(getattr(torch.nn, name)().parameters())


@pytest.mark.parametrize(("function", "name"), [(TANH, "Tanh"), ("torch.nn.modules.linear.Identity", "Identity"),
                                               ("torch.nn.GELU", "GELU"), (None, "Tanh")])  # fmt: skip
def test_dense_layer_has_the_librarys_defaults(folder, function, name):
    put(folder, "2_Dense/config.json", OWN["Dense"] | ({} if function is None else {"activation_function": function}))
    dense = Dense(folder=folder / "2_Dense", num_inputs=8, num_outputs=4, activation=name)
    assert read_steps(folder).after == (dense, Normalize())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", {}, r"must be a JSON list of modules, but is not\."),
        ("modules.json", listed("Transformer", "Normalize"), r"must list one Transformer, one Pooling, .* but lists T"),
        ("modules.json", listed("Transformer", "Dense", "Pooling"), r"but lists Transformer, Dense, Pooling\."),
        ("modules.json", listed("Transformer", "Pooling", "Pooling"), r"but lists Transformer, Pooling, Pooling\."),
        ("modules.json", listed("Transformer", "modeling.Pooling"), r"`type` .* but is 'modeling\.Pooling'\."),
        ("modules.json", [{**one, "name": "x"} for one in listed("Transformer", "Pooling")], r"a `name` of its own"),
        ("modules.json", [{**listed("Transformer")[0], "path": "0_Transformer"}, listed("", "Pooling")[1]],
         r'`path` .* must be "" for the Transformer, but is \'0_Transformer\'\.'),
        ("modules.json", [*listed("Transformer"), {**listed("", "Pooling")[1], "path": "../1_Pooling"}],
         r"`path` .* must be a folder inside the model's, but is '\.\./1_Pooling'\."),
        ("sentence_bert_config.json", {"max_seq_length": "x"}, r"`max_seq_length` .* of at least 1, but is 'x'"),
        ("sentence_bert_config.json", {"do_lower_case": 1}, r"`do_lower_case` .* must be true or false, but is 1\."),
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 9}}}, r"`processing_kwargs` in"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, r"be 'feature-extraction', but is 'fill"),
        ("sentence_bert_config.json", {"modality_config": {"message": {"method": "forward"}}}, r"`modality_config` in"),
        ("sentence_bert_config.json", {"tokenizer_args": {"do_lower_case": True}}, r"`tokenizer_args` in .* but is \{"),
        ("1_Pooling/config.json", {"pooling_mode": "median"}, r"`pooling_mode` .* or a list of these, but is 'median'"),
        ("1_Pooling/config.json", {"pooling_mode": []}, r"`pooling_mode` in .* but is \[\]"),
        ("1_Pooling/config.json", {"include_prompt": "no"}, r"`include_prompt` .* true or false, but is 'no'"),
        ("2_Dense/config.json", {**OWN["Dense"], "activation_function": "mine.Tanh"}, r"but is 'mine\.Tanh'"),
        ("2_Dense/config.json", {**OWN["Dense"], "activation_function": "torch.nn.PReLU"}, r"is 'torch\.nn\.PReLU'"),
        ("2_Dense/config.json", {**OWN["Dense"], "module_input_name": "token_embeddings"}, r"is 'token_embeddings'"),
        ("2_Dense/config.json", {"in_features": 8}, r"`in_features` and `out_features` in .* must be given"),
        ("3_Normalize/config.json", {"module_input_name": None}, r"`module_input_name` .* but is null\."),
        ("3_Normalize/config.json", {"module_output_name": "x"}, r"`module_output_name` .* 'sentence_embedding'"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, r"`model_type` .* but is 'SparseE"),
        ("config_sentence_transformers.json", {"default_prompt_name": "q"}, r"must be the name of a prompt .*is 'q'"),
        ("config_sentence_transformers.json", {"prompts": {"q": 1}}, r"`prompts` in .* must map names to texts"),
        ("config_sentence_transformers.json", {"truncate_dim": -3}, r"`truncate_dim` .* at least 1, but is -3"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(folder, name, content, message):
    put(folder, name, content)
    with pytest.raises(ConfigError, match=message):
        read_steps(folder)


def test_harmless_values_are_read(folder):
    put(folder, "sentence_bert_config.json", {"max_seq_length": None, "model_args": {"trust_remote_code": True},
                                              "query_length": 8, "unpad_inputs": True})  # fmt: skip
    put(folder, "config_sentence_transformers.json", {"similarity_fn_name": "euclidean", "prompts": {"query": None}})
    steps = read_steps(folder)
    assert (steps.notices, steps.max_tokens, steps.prompt("query"), steps.prompt()) == ((), None, "", "")


def test_files_without_the_list_are_refused(folder):
    (folder / "modules.json").unlink()
    with pytest.raises(
        ConfigError, match=r"modules\.json` must exist beside `1_Pooling/config\.json`, but is missing\."
    ):
        read_steps(folder)
    assert list(module_files(folder)) == []


def test_file_of_a_module_must_exist(folder):
    own = [f"{name}/config.json" for name in ("1_Pooling", "2_Dense", "3_Normalize")]
    assert list(module_files(folder)) == ["modules.json", *own]
    (folder / "3_Normalize" / "config.json").unlink()  # which older versions do not write
    assert read_steps(folder).is_normalized
    (folder / "1_Pooling" / "config.json").unlink()
    with pytest.raises(
        ConfigError, match=r"1_Pooling/config\.json` must exist, but is missing\. .* Restore the file\."
    ):
        read_steps(folder)
