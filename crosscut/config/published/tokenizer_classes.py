"""Classes with which `transformers` (5.24) reads a `tokenizer.json`.

`transformers` chooses a class by the files beside `tokenizer.json` and by the type of the model. Some classes take only
the vocabulary from `tokenizer.json`. They make the steps before it from `tokenizer_config.json`, with values of their
own for missing keys. The classes of this kind that belong to the supported families are listed here with their steps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from crosscut.config.published.folders import MODEL_FILE, TOKENIZER_CONFIG_FILE
from crosscut.config.system.files import json_or_none, read_json

BERT, ROBERTA = "BertTokenizer", "RobertaTokenizer"
GPT2, LLAMA, QWEN2, GPT_NEOX = "GPT2Tokenizer", "LlamaTokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer"
PLAIN = "PreTrainedTokenizerFast"
"""Class that tokenizes as `tokenizer.json` says."""
REGISTERED = MappingProxyType(
    {
        "gpt2": GPT2, "gpt_bigcode": PLAIN, "mistral": PLAIN, "qwen2": QWEN2, "qwen3": QWEN2, "starcoder2": GPT2,
        "olmo2": PLAIN, "bert": BERT, "roberta": ROBERTA, "mamba": GPT_NEOX, "mamba2": GPT_NEOX,
        "granitemoehybrid": PLAIN, "jamba": PLAIN, "qwen3_next": QWEN2, "olmo_hybrid": PLAIN, "mixtral": PLAIN,
        "qwen2_moe": QWEN2, "qwen3_moe": QWEN2, "olmoe": GPT_NEOX, "granitemoe": PLAIN,
    }
)  # fmt: skip
"""Class of a tokenizer without `tokenizer_class`, by the type of the model. `PLAIN` for other types."""
_ALWAYS = (
    "gpt_bigcode", "mistral", "qwen2", "olmo2", "granitemoehybrid", "jamba", "olmo_hybrid", "mixtral", "granitemoe",
)  # fmt: skip
"""Types of models for which `transformers` ignores `tokenizer_class`."""
_TOKENS: Mapping[str, Mapping[str, str]] = {
    BERT: {
        "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]",
    },
    ROBERTA: {
        "bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>",
        "pad_token": "<pad>", "mask_token": "<mask>",
    },
}  # fmt: skip
"""Special tokens of a class, by name, if the files name no others."""
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern of the words of Qwen2."""

_Step = tuple[str, Mapping[str, Any]]
"""Type of a step and its values."""
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "BertNormalizer": {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
    "ByteLevel": {"add_prefix_space": True, "use_regex": True},
    "BPE": {
        "byte_fallback": False, "fuse_unk": False, "ignore_merges": False, "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
    },
}  # fmt: skip
"""Values of a step that `tokenizer.json` omits or sets to null."""


class Difference(NamedTuple):
    """First place where `tokenizer.json` and a class differ."""

    part: str
    name: str
    """Name of the value of a step; empty if the steps themselves differ."""
    found: Any
    wanted: Any


@dataclass(frozen=True)
class TokenizerClass:
    """Class with which `transformers` reads a tokenizer."""

    name: str
    """Name of the class without "Fast"; `PLAIN` for a class that tokenizes as `tokenizer.json` says."""
    is_given: bool
    """Whether a file names the class. If not, it follows from the type of the model."""

    @classmethod
    def of(cls, settings: Mapping[str, Any], model: Mapping[str, Any], inner: Mapping[str, Any]) -> "TokenizerClass":
        """Find the class, by the content of `tokenizer_config.json`, `config.json` and `tokenizer.json`."""
        given, model_type = settings.get("tokenizer_class") or model.get("tokenizer_class"), model.get("model_type")
        registered = REGISTERED.get(str(model_type), PLAIN)
        if not isinstance(given, str) or model_type in _ALWAYS:
            return cls(registered, False)
        name = given.removesuffix("Fast")
        is_byte_level = any(kind == "ByteLevel" for kind, _ in _steps(inner.get("pre_tokenizer")))
        is_plain = name in ("PreTrainedTokenizer", "TokenizersBackend") or (name == LLAMA and is_byte_level)
        return cls(PLAIN if is_plain else name, True)

    @classmethod
    def beside(cls, tokenizer: Path) -> "TokenizerClass":
        """Find the class for the tokenizer in the file `tokenizer`, by the files beside it."""
        config, model = (tokenizer.with_name(name) for name in (TOKENIZER_CONFIG_FILE, MODEL_FILE))
        settings, table = (read_json(path) if path.is_file() else {} for path in (config, model))
        inner = json_or_none(tokenizer)
        return cls.of(settings, table, inner if isinstance(inner, dict) else {})

    @property
    def is_known(self) -> bool:
        """Whether the steps of the class are listed here."""
        return self.name == PLAIN or bool(_class_steps(self.name, {}))

    @property
    def tokens(self) -> Mapping[str, str]:
        """Special tokens of an encoder's class, by name, if the files name no others. Empty for other classes."""
        return _TOKENS.get(self.name, {})

    def difference(self, settings: Mapping[str, Any], inner: Mapping[str, Any]) -> Difference | None:
        """Return the first difference between the steps of the class and those of `tokenizer.json`. None if there is
        none, or if the class is not known.
        """
        for part, wanted in _class_steps(self.name, settings).items():
            found = list(_steps(inner.get(part)))
            kinds = [", ".join(kind for kind, _ in steps) or "nothing" for steps in (found, wanted)]
            if kinds[0] != kinds[1]:
                return Difference(part, "", *kinds)
            for (_, has), (_, values) in zip(found, wanted, strict=True):
                for name, value in values.items():
                    if has.get(name) != value:
                        return Difference(part, name, has.get(name), value)
        return None

    def notice(self, settings: Mapping[str, Any], inner: Mapping[str, Any], tokenizer: Path) -> str:
        """Line for the user if the steps of the class differ from those in the file `tokenizer`. Empty otherwise."""
        if (found := self.difference(settings, inner)) is None:
            return ""
        return (
            f"`transformers` may give texts other tokens than `{tokenizer}`, by which Crosscut tokenizes: its "
            f"{self.name} has another `{found.part}`."
        )


def _class_steps(name: str, settings: Mapping[str, Any]) -> Mapping[str, list[_Step]]:
    """Steps of a class, keyed by their part of `tokenizer.json`. Empty for a class that is not known."""

    def flag(key: str, default: bool) -> Any:
        return default if settings.get(key) is None else settings[key]

    plain = _DEFAULTS["BPE"]
    byte_level = {"add_prefix_space": flag("add_prefix_space", False), "use_regex": True}
    if name == BERT:
        lower = settings.get("do_lower_case", True)
        normalizer = {
            "clean_text": True,
            "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
            "lowercase": lower,
            "strip_accents": flag("strip_accents", lower),
        }
        model = ("WordPiece", {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100})
        steps: list[_Step] = [("BertNormalizer", normalizer)]
        return {"model": [model], "normalizer": steps, "pre_tokenizer": [("BertPreTokenizer", {})]}
    if name in (ROBERTA, GPT2):
        return {"model": [("BPE", plain)], "normalizer": [], "pre_tokenizer": [("ByteLevel", byte_level)]}
    if name == GPT_NEOX:
        return {"model": [("BPE", plain)], "normalizer": [("NFC", {})], "pre_tokenizer": [("ByteLevel", byte_level)]}
    if name == LLAMA:
        scheme = ("always" if settings.get("legacy", False) else "first") if flag("add_prefix_space", True) else "never"
        space = {"replacement": "\u2581", "prepend_scheme": scheme, "split": False}
        model = ("BPE", {**plain, "byte_fallback": True, "fuse_unk": True})
        return {"pre_tokenizer": [("Metaspace", space)], "normalizer": [], "model": [model]}
    if name == QWEN2:
        words = {"pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False}
        parts: list[_Step] = [("Split", words), ("ByteLevel", {**byte_level, "use_regex": False})]
        return {"model": [("BPE", plain)], "normalizer": [("NFC", {})], "pre_tokenizer": parts}
    return {}


def _steps(step: object) -> Iterator[_Step]:
    """Yield the steps of a part of `tokenizer.json`, which may be a sequence of steps."""
    if not isinstance(step, dict):
        return
    if "vocab" in step and "type" not in step:  # older files
        step = {**step, "type": "BPE" if "merges" in step else "WordPiece"}
    if (kind := str(step.get("type"))) != "Sequence":
        values = {**_DEFAULTS.get(kind, {}), **{name: value for name, value in step.items() if value is not None}}
        if kind == "BertNormalizer" and values["strip_accents"] is None:
            values["strip_accents"] = values["lowercase"]
        yield kind, values
    for inner in (*dicts(step.get("normalizers")), *dicts(step.get("pretokenizers"))):
        yield from _steps(inner)


def dicts(value: object) -> list[dict[str, Any]]:
    """Return the objects in a list of a JSON file. Empty for a value that is not a list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
