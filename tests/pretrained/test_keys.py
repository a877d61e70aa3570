"""Tables of the keys of published files, against the classes of `transformers` and PEFT that write these files."""

import dataclasses
import inspect
import json
import re
import shutil

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError

from crosscut.config import ConfigError, ModelConfig
from crosscut.config.published.families import FAMILIES
from crosscut.config.published.folders import read_published
from crosscut.config.published.keys import ADAPTER, GENERATION, SPECIAL_TOKENS, TOKENIZER, keys_of_model
from crosscut.config.published.presets import PRESETS
from crosscut.config.published.tokenizer_classes import PLAIN, REGISTERED, TokenizerClass
from crosscut.config.published.tokenizers import check_tokenizer
from crosscut.data import Tokenizer
from crosscut.data.tokenization.inner import read_inner
from crosscut.planner import count_parameters
from crosscut.pretrained import find_model
from tests.pretrained.encoders import make_encoder
from tests.refusals import refusal

STATED = {"nemotron_h": {"hybrid_override_pattern": "M-*E"}, "deepseek_v2": {"num_experts_per_tok": 6}}
"""Keys that a file must have, because they have no defaults."""


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_key_of_a_config_of_transformers_is_in_the_table(model_type):
    from transformers import AutoConfig, PreTrainedConfig

    config = AutoConfig.for_model(model_type)
    fields = {field.name for kind in (PreTrainedConfig, type(config)) for field in dataclasses.fields(kind)}
    written = {*config.to_dict(), *PreTrainedConfig().to_dict(), *config.attribute_map, *fields}
    assert not {key for key in written if not key.startswith("_")} - set(keys_of_model(model_type).known())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_that_a_file_omits_has_the_default_of_transformers(model_type, tmp_path):
    from transformers import AutoConfig

    family, stated = FAMILIES[model_type], STATED.get(model_type, {})

    def read(table: dict[str, object]) -> object:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **stated, **table}))
        return read_published(tmp_path).model

    theirs = AutoConfig.for_model(model_type, **stated).to_dict()
    assert read({}) == read(theirs)
    # Half as many heads would be fewer than the default of keys.
    heads = {family.keys.get(field) for field in ("num_heads", "gated_delta.num_value_heads")}
    for key in {*family.keys.values(), *family.aliases} & set(theirs) - heads:
        if type(theirs[key]) is int and theirs[key] > 1:
            half = {key: theirs[key] // 2}
            try:
                wanted = AutoConfig.for_model(model_type, **{**stated, **half}).to_dict()
            except StrictDataclassClassValidationError:  # a width of heads that contradicts `expand`
                with pytest.raises(ConfigError):
                    read(half)
            else:
                assert read(half) == read(wanted), key


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name in STATED])
def test_a_key_without_a_default_must_be_given(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    told = refusal(ConfigError, read_published, tmp_path)
    assert told.startswith(f"`{next(iter(STATED[model_type]))}` in `{tmp_path}/config.json` must be ")


def test_the_preset_of_nemotron_h_is_the_published_model(tmp_path):
    """Sizes are the defaults of `transformers`, and the number of parameters is that of the paper, 8.1 billion."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = ModelConfig(**PRESETS["nemotron-h-8b"])
    letters = {"mamba2": "M", "attention": "*", "relu2": "-"}
    pattern = "".join(letters[model.layer(index)] for index in range(model.num_layers))
    config = AutoConfig.for_model("nemotron_h", hybrid_override_pattern=pattern, max_position_embeddings=8192)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert read_published(tmp_path).model == model
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == count_parameters(model) == 8_100_852_736


MIXTURES = {
    "mixtral-8x7b": {"max_position_embeddings": 32_768},
    "qwen3-30b-a3b": {
        "num_hidden_layers": 48, "head_dim": 128, "max_position_embeddings": 40_960, "norm_topk_prob": True,
        "rope_theta": 1_000_000.0,
    },
    "deepseek-v3": {},
}  # fmt: skip
"""Presets with the keys of the published files that are no defaults of `transformers`."""


@pytest.mark.parametrize("name", MIXTURES)
def test_the_preset_of_a_mixture_is_the_published_model(tmp_path, name):
    """46.7, 30.53 and 671 billion parameters, as published; the biases of DeepSeek-V3 are buffers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = ModelConfig(**PRESETS[name])
    model_type = {"mixtral-8x7b": "mixtral", "qwen3-30b-a3b": "qwen3_moe"}.get(name, "deepseek_v3")
    config = AutoConfig.for_model(model_type, **MIXTURES[name])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    read = read_published(tmp_path).model
    assert dataclasses.replace(read, mlp_size=model.mlp_size) == model  # no layer of a Mixtral has an MLP
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
    biases = [each for path, each in theirs.named_buffers() if path.endswith("e_score_correction_bias")]
    assert sum(tensor.numel() for tensor in (*theirs.parameters(), *biases)) == count_parameters(model)


def test_each_key_of_an_adapter_is_in_the_table():
    from peft import LoraConfig

    written = set(LoraConfig().to_dict()) | {field.name for field in dataclasses.fields(LoraConfig)}
    assert not written - set(ADAPTER.known())


def test_no_key_has_two_meanings():
    for table in (ADAPTER, GENERATION, TOKENIZER, SPECIAL_TOKENS, *map(keys_of_model, FAMILIES)):
        known = list(table.known())
        assert len(known) == len(set(known)), table.title


def test_each_key_of_a_generation_config_is_in_the_table():
    from transformers import GenerationConfig

    assert not set(vars(GenerationConfig())) - set(GENERATION.known())


def test_each_key_of_a_tokenizer_config_is_in_the_table(tmp_path):
    """The options of the classes of the families, and the keys that they write."""
    from transformers import (
        AutoTokenizer,
        BertTokenizer,
        GPT2Tokenizer,
        LlamaTokenizer,
        PreTrainedTokenizerFast,
        Qwen2Tokenizer,
        RobertaTokenizer,
    )

    named = {"self", "args", "kwargs"}
    keys: set[str] = set()
    for kind in (BertTokenizer, GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer, RobertaTokenizer):
        keys |= set(inspect.signature(kind.__init__).parameters) - named
    Tokenizer.train(["a text"], vocab_size=260).save(tmp_path / "tokenizer.json")
    for kind in (AutoTokenizer, PreTrainedTokenizerFast):
        kind.from_pretrained(tmp_path).save_pretrained(tmp_path / "saved")
        keys |= set(json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text()))
    assert not keys - set(TOKENIZER.known())


STEPS = [
    ("bert", {"do_lower_case": False}, "`do_lower_case` in `.*` must be true as in `tokenizer.json`, but is false"),
    ("bert", {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}, ""),
    ("bert", {"strip_accents": False}, "`strip_accents` in `.*` must be true as in `tokenizer.json`, but is false"),
    ("bert", {"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"}, ""),
    ("gpt2", {"add_prefix_space": True}, "`add_prefix_space` in `.*` must be false as in `tokenizer.json`, but is"),
    ("gpt2", {"add_prefix_space": False, "add_bos_token": True, "bos_token": "<|endoftext|>"}, ""),
]


@pytest.mark.parametrize(("name", "settings", "message"), STEPS, ids=str)
def test_a_tokenizer_whose_settings_contradict_its_steps_is_refused(published, tmp_path, name, settings, message):
    """Exactly where `transformers` gives a text other tokens than `tokenizer.json` does."""
    from transformers import AutoTokenizer

    if name == "bert":
        make_encoder(tmp_path / "model", "bert", wordpiece=True)
    else:
        shutil.copytree(published(name), tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    text = "The Qúick fox jumps<|endoftext|>"
    ours = read_inner(tmp_path / "model" / "tokenizer.json").encode(text).ids
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")(text)["input_ids"]
    assert (ours != theirs) is bool(message)
    if not message:
        assert check_tokenizer(tmp_path / "model") == []
        return
    with pytest.raises(ConfigError, match=message):
        check_tokenizer(tmp_path / "model")


def test_special_tokens_that_a_tokenizer_lacks_are_named(published, tmp_path, capsys):
    shutil.copytree(published("gpt2"), tmp_path / "model")
    settings = {"eos_token": "<|endoftext|>", "pad_token": {"content": "<pad>"}, "additional_special_tokens": ["<a>"]}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "model" / "special_tokens_map.json").write_text('{"unk_token": "<unk>", "new": 1}')
    find_model(tmp_path / "model")
    told = capsys.readouterr().err
    assert "lacks 3 of the special tokens that the files beside it name ('<pad>', '<unk>', '<a>'). Crosscut" in told
    assert "does not know these keys in" in told and "`new`" in told


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"added_tokens_decoder": {"298": {"content": "<|im_end|>", "special": True}}}, "lacks 1 of .* .'<.im_end.>'."),
        ({"model_specific_special_tokens": {"image": "<image>"}}, "lacks 1 of .* .'<image>'."),
        (
            {"added_tokens_decoder": {"0": {"content": "<|endoftext|>", "lstrip": True, "special": True}}},
            "describes 1 of the tokens .* in another way .'<.endoftext.>'.",
        ),
        ({"added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}}}, ""),
    ],
    ids=str,
)
def test_tokens_that_only_the_settings_find_in_a_text_are_named(published, tmp_path, settings, line):
    """Exactly where `transformers` gives a text other tokens."""
    from transformers import AutoTokenizer

    folder = shutil.copytree(published("gpt2"), tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    text = "the<|im_end|> fox <image> <|endoftext|>"
    ours = read_inner(folder / "tokenizer.json").encode(text).ids
    assert (ours != AutoTokenizer.from_pretrained(folder)(text)["input_ids"]) is bool(line)
    told = check_tokenizer(folder)
    assert len(told) == bool(line) and re.search(line, "".join(told))


def test_the_class_of_a_tokenizer_without_a_name_is_that_of_transformers():
    from transformers.models.auto import tokenization_auto as auto

    for model_type in FAMILIES:
        name = auto.TOKENIZER_MAPPING_NAMES.get(model_type) or "TokenizersBackend"
        assert REGISTERED.get(model_type, PLAIN) == name.replace("TokenizersBackend", PLAIN)
        is_fixed = model_type in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        is_fixed |= auto.TOKENIZER_MAPPING_NAMES.get(model_type) == "TokenizersBackend"
        told = TokenizerClass.of({"tokenizer_class": "T5TokenizerFast"}, {"model_type": model_type}, {}).name
        assert told == (REGISTERED[model_type] if is_fixed else "T5Tokenizer")


_SPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES]}
_LLAMA = {"tokenizer_class": "LlamaTokenizer"}


@pytest.mark.parametrize(
    ("name", "step", "settings", "line"),
    [
        ("llama", _SPACE, _LLAMA, ""),
        ("llama", _SPACE, {**_LLAMA, "legacy": True}, "its LlamaTokenizer has another `pre_tokenizer`"),
        ("llama", _SPACE, {**_LLAMA, "add_prefix_space": False}, "must be true as in `tokenizer.json`, but is false"),
        ("llama", _BYTES, _LLAMA, ""),  # transformers then reads what the file says
        ("llama", _DIGITS, {"tokenizer_class": "GPT2Tokenizer"}, "its GPT2Tokenizer has another `pre_tokenizer`"),
        ("starcoder2", _DIGITS, {}, "its GPT2Tokenizer has another `pre_tokenizer`"),
        ("gpt_bigcode", _DIGITS, {"tokenizer_class": "GPT2Tokenizer"}, ""),
        ("qwen2", _BYTES, {"tokenizer_class": "PreTrainedTokenizerFast"}, "its Qwen2Tokenizer has another"),
        ("qwen3", _BYTES, {"tokenizer_class": "PreTrainedTokenizerFast"}, ""),
        ("qwen3", _BYTES, {}, "its Qwen2Tokenizer has another `normalizer`"),
    ],
    ids=str,
)
def test_a_class_that_makes_other_steps_is_named(tmp_path, name, step, settings, line):
    """Exactly where `transformers` gives a text other tokens."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import models, pre_tokenizers, trainers
    from transformers import AutoTokenizer

    inner = Inner(models.BPE(byte_fallback=step is _SPACE, fuse_unk=step is _SPACE))
    inner.pre_tokenizer = getattr(pre_tokenizers, "Metaspace" if step is _SPACE else "ByteLevel")()
    names = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=names, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    inner.train_from_iterator(["the 2024 fox 2024 2024 " * 50], trainer)
    table = json.loads(inner.to_str())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**table, "pre_tokenizer": step}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "</s>"}))
    texts = ["the 2024 fox", "fox</s>2024"]
    ours = [read_inner(tmp_path / "tokenizer.json").encode(text).ids for text in texts]
    assert (ours != AutoTokenizer.from_pretrained(tmp_path)(texts)["input_ids"]) is bool(line)
    if line.startswith("must"):
        with pytest.raises(ConfigError, match=line):
            check_tokenizer(tmp_path)
    else:
        told = check_tokenizer(tmp_path)
        assert len(told) == bool(line) and re.search(line, "".join(told))
