"""Folders of tiny models of every family, written by `transformers`, and of a sentence encoder, written by
sentence-transformers, and the edit of each case.
"""

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosscut.config.data import Objective
from crosscut.config.published.families import FAMILIES
from crosscut.config.published.keys import ADAPTER, GENERATION, ROTARY, SPECIAL_TOKENS, TOKENIZER, Keys, keys_of_model
from crosscut.config.published.keys.sentences import MODULES, SENTENCES
from crosscut.config.published.tokenizer_classes import PLAIN, QWEN2_SPLIT
from crosscut.data import Tokenizer

VOCAB_SIZE = 300
_SMALL = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64, "vocab_size": VOCAB_SIZE,
}  # fmt: skip
_GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB_SIZE}
_MIXTURE = {**_SMALL, "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_GROUPS = {**_MIXTURE, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
_LATENT = {
    **_GROUPS, "num_key_value_heads": 4, "kv_lora_rank": 10, "q_lora_rank": 12, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8, "v_head_dim": 5, "first_k_dense_replace": 1,
}  # fmt: skip
_MIXER = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 4}
_OWN: Mapping[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "qwen3": {**_SMALL, "num_key_value_heads": 2, "head_dim": 16},
    "mixtral": _MIXTURE,
    "qwen2_moe": {**_MIXTURE, "num_experts": 4, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**_MIXTURE, "num_experts": 4, "head_dim": 16},
    "olmoe": {**_MIXTURE, "num_experts": 4},
    "granitemoe": _MIXTURE,
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
    "jamba": {**_MIXTURE, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {**_MIXTURE, **_MIXER, "shared_intermediate_size": 24, "layer_types": ["mamba", "attention"]},
    "nemotron_h": {
        **_GROUPS,
        "hybrid_override_pattern": "ME*",
        "moe_shared_expert_intermediate_size": 24,
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 16,
        "chunk_size": 4,
    },
    "qwen3_next": {
        **_MIXTURE,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_value_head_dim": 6,
        "linear_key_head_dim": 8,
    },
    "mamba2": {**_SMALL, "num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 16, "chunk_size": 4},
    "bamba": {**_SMALL, "num_key_value_heads": 2, **_MIXER},
    "bert": _SMALL,
    "roberta": {**_SMALL, "type_vocab_size": 1, "pad_token_id": 1},
}
"""Sizes of the families whose keys differ from those of a Llama."""
ADAPTED = "llama"
"""Family whose folder also holds an adapter."""
ADAPTER_FOLDER = "adapter"
SENTENCE = "bert sentence-transformers"
"""Name of the folder of the sentence encoder."""

HEADS = ("CausalLM", "LMHeadModel", "ForMaskedLM", "ForSequenceClassification", "ForQuestionAnswering")
"""Ends of the names of architectures whose logits are compared."""

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, 4, 16, 64, 128, -1, 0.5, 1.0, 2.0, 1e-3, 1e9, "", "x", "none", [], [0], ["x"], {},
    {"0": "x"}, "gelu", "gelu_new", "relu", "silu", "relu2", "absolute", "LlamaForCausalLM", "float16",
    {"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "default"},
    {"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0, "rope_theta": 100.0},
    ["full_attention", "full_attention"], ["sliding_attention", "full_attention"], "pissa", "gaussian", "eva",
    "all-linear", ["q_proj"], {"q_proj": 4}, "<|endoftext|>", {"content": "<|endoftext|>"}, "PreTrainedTokenizerFast",
    "BertTokenizer", "GPT2Tokenizer", "LlamaTokenizer", "[MASK]", "fox",
    "regression", "multi_label_classification", "single_label_classification",
    "greedy", "group_limited_greedy", "noaux_tc", "softmax", "sigmoid", [1],
    "cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", ["cls", "mean"], "query", 8,
    {"query": "jumps: "}, "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.GELU", "right", "left",
    "sentence_transformers.sentence_transformer.modules.Normalize", "sentence_transformers.models.Pooling",
)  # fmt: skip
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES]}
_SPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
_CASED = {
    "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
    "lowercase": False,
}  # fmt: skip
VARIANTS = (
    ("llama LlamaForCausalLM metaspace", "pre_tokenizer", _SPACE),
    ("bert BertForMaskedLM cased", "normalizer", _CASED),
    ("gpt_bigcode GPTBigCodeForCausalLM digits", "pre_tokenizer", _DIGITS),
)
"""Folders with other tokenizers: name, changed part, and its content. The name begins with family and architecture."""
_UNKNOWN = ("depth", "my_key", "logit_scale", "residual_multiplier")


@dataclass(frozen=True)
class Edit:
    """Change of one key of one file. `value` is `REMOVED` if the key is removed."""

    model: str
    file: str
    path: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        key = ".".join(self.path)
        return f"{self.model}, {self.file}: " + (
            f"{key} removed" if self.value == REMOVED else f"{key} = {self.value!r}"
        )

    def apply(self, folder: Path) -> None:
        """Change the file in `folder`. A file that is missing is created."""
        file = folder / self.file
        file.parent.mkdir(exist_ok=True)
        table = json.loads(file.read_text()) if file.is_file() else {}
        *sections, key = self.path
        inner = table
        for section in sections:
            inner = inner[int(section)] if isinstance(inner, list) else inner.setdefault(section, {})
        if self.value == REMOVED:
            inner.pop(key, None)
        else:
            inner[key] = self.value
        file.write_text(json.dumps(table))


REMOVED = "(removed)"


def make_models(folder: Path) -> None:
    """Write a folder for each architecture of each family, and an adapter."""
    for family in FAMILIES.values():
        for architecture in (family.architecture, *family.heads):
            if architecture.endswith(HEADS):
                _make(folder / f"{family.model_type} {architecture}", family.model_type, architecture)
    for name, part, step in VARIANTS:
        model_type, architecture, _ = name.split()
        _make(folder / name, model_type, architecture)
        _change_tokenizer(folder / name, part, step)
    _make_sentence_encoder(folder / SENTENCE)
    _make_adapter(folder / f"{ADAPTED} {FAMILIES[ADAPTED].architecture}")


def _make(folder: Path, model_type: str, architecture: str) -> None:
    import torch
    import transformers

    torch.manual_seed(3)
    make = getattr(transformers, architecture)
    sizes = _OWN.get(model_type, {**_SMALL, "num_key_value_heads": 2})
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": sizes.get("pad_token_id")}
    model = make(make.config_class(**{**sizes, **ids}))
    _randomize(model)
    model.save_pretrained(folder)
    objective = Objective.MASKED if model_type == "bert" else Objective.CAUSAL
    tokenizer = Tokenizer.train(["the quick brown fox jumps " * 50], vocab_size=VOCAB_SIZE, objective=objective)
    tokenizer.save(folder / "tokenizer.json")
    settings = {"tokenizer_class": PLAIN} if model_type in ("roberta", "qwen3") else {}
    if settings:  # whose own classes add a template, or make other steps
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if model_type == "qwen2":
        words = {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False}
        steps = [words, {**_BYTES, "use_regex": False}]
        _change_tokenizer(folder, "normalizer", {"type": "NFC"})
        _change_tokenizer(folder, "pre_tokenizer", {"type": "Sequence", "pretokenizers": steps})


def _change_tokenizer(folder: Path, part: str, step: dict[str, Any]) -> None:
    """Replace a part of a tokenizer, and let its settings agree where they can."""
    path = folder / "tokenizer.json"
    table = json.loads(path.read_text())
    table[part] = step
    settings: dict[str, Any] = {}
    if step is _SPACE:
        table["model"] |= {"byte_fallback": True, "fuse_unk": True}
        settings = {"tokenizer_class": "LlamaTokenizer"}
    elif step is _CASED:
        settings = {"do_lower_case": False}
    path.write_text(json.dumps(table))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _randomize(model: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2).add_(1.0 if parameter.dim() == 1 else 0.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)


def _make_sentence_encoder(folder: Path) -> None:
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

    trunk = folder.with_name(".trunk")
    model = transformers.BertModel(transformers.BertConfig(**_SMALL), add_pooling_layer=False)
    _randomize(model)
    model.save_pretrained(trunk)
    tokenizer = Tokenizer.train(["the quick brown fox jumps " * 50], vocab_size=VOCAB_SIZE, objective=Objective.MASKED)
    tokenizer.save(trunk / "tokenizer.json")
    settings = {**tokenizer.settings(), "unk_token": "[UNK]", "model_max_length": 12}
    (trunk / "tokenizer_config.json").write_text(json.dumps(settings))
    size = int(_SMALL["hidden_size"])
    modules = [Transformer(str(trunk)), Pooling(size, "mean"), Dense(size, size), Normalize()]
    prompts = {"query": "the fox: ", "document": ""}
    encoder = SentenceTransformer(modules=modules, device="cpu", prompts=prompts, default_prompt_name="query")
    encoder.save_pretrained(str(folder), create_model_card=False)
    shutil.rmtree(trunk)


def _make_adapter(base: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            parameter.normal_(std=0.2)
    model.save_pretrained(base / ADAPTER_FOLDER)
    # A line about another name of the model would count as told in every case.
    Edit("", f"{ADAPTER_FOLDER}/adapter_config.json", ("base_model_name_or_path",), None).apply(base)


def draw(models: Path, seed: int, number: int) -> Edit:
    """Draw the edit of a case."""
    chance = random.Random(f"{seed}/metadata/{number}")
    names = sorted(path.name for path in models.iterdir())
    name = chance.choice([*names, *[SENTENCE] * (len(names) // 4)])
    files = dict(_files(name))
    if not (models / name / ADAPTER_FOLDER).is_dir():
        files.pop(f"{ADAPTER_FOLDER}/adapter_config.json")
    file = chance.choice(["config.json"] * (1 if name == SENTENCE else 4) + list(files))
    sections: tuple[str, ...] = ()
    keys = files[file]
    if file == "config.json" and "rope_parameters" in keys.used and chance.random() < 0.2:
        sections, keys = (chance.choice(("rope_parameters", "rope_scaling")),), ROTARY
    present = json.loads((models / name / file).read_text()) if (models / name / file).is_file() else {}
    if keys is MODULES:
        sections = (str(chance.randrange(len(present))),)
        present = present[int(sections[0])]
    known = [*present, *keys.used, *keys.only] if chance.random() < 0.8 else [*keys.without_effect, *_UNKNOWN]
    key = chance.choice([key for key in known if key not in ("model_type", "peft_type")] or list(_UNKNOWN))
    allowed = [*keys.only.get(key, ()), present.get(key)]
    value = chance.choice([REMOVED, *allowed, *VALUES, *VALUES, *VALUES])
    if type(present.get(key)) in (int, float) and not isinstance(present[key], bool) and chance.random() < 0.5:
        value = chance.choice((present[key] * 2, present[key] // 2, present[key] + 1, float(present[key]), 0, None))
    return Edit(name, file, (*sections, key), value)


def _files(name: str) -> Iterator[tuple[str, Keys]]:
    yield "config.json", keys_of_model(name.split()[0])
    if name == SENTENCE:
        yield from SENTENCES.items()
    yield "generation_config.json", GENERATION
    yield "tokenizer_config.json", TOKENIZER
    yield "special_tokens_map.json", SPECIAL_TOKENS
    yield f"{ADAPTER_FOLDER}/adapter_config.json", ADAPTER


def copied(models: Path, edit: Edit, folder: Path) -> Path:
    """Copy the model of a case to `folder`, and apply its edit."""
    shutil.copytree(models / edit.model, folder)
    edit.apply(folder)
    return folder
