"""Tokenizers of published encoders, beside those of `transformers`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from crosscut.config import ConfigError
from crosscut.config.data import Objective
from crosscut.config.published.tokenizers import check_tokenizer
from crosscut.data import Tokenizer
from crosscut.data.tokenization.published import PublishedTokenizer

TEXTS = [
    "the quick BROWN fox",
    "",
    "  caf\u00e9 na\u00efve \u732b dog",
    "jumps [MASK] over",
    "fox " * 30,
    "the<mask> end </s>",
]
WORDS = "the quick brown fox jumps over a lazy dog cafe naive caf\u00e9 The Fox \u732b " * 40
NAMES = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]"}
BERT = {"tokenizer_class": "BertTokenizer", **NAMES}
ROBERTA = {"tokenizer_class": "RobertaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>"}


def put(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    Tokenizer.train([WORDS], vocab_size=270, objective=Objective.MASKED).save(folder / "tokenizer.json")
    put(folder / "config.json", {"model_type": "bert", "vocab_size": 270})
    return folder


@pytest.fixture(scope="module")
def roberta(tmp_path_factory) -> Path:
    """A byte-level BPE with RoBERTa's special tokens."""
    folder = tmp_path_factory.mktemp("roberta")
    Tokenizer.train([WORDS], vocab_size=300).save(folder / "tokenizer.json")
    table = json.loads((folder / "tokenizer.json").read_text())
    plain = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    first = len(table["model"]["vocab"])
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    table["added_tokens"] += [{"id": first + place, "content": name} | plain for place, name in enumerate(names)]
    put(folder / "tokenizer.json", table)
    put(folder / "config.json", {"model_type": "roberta", "vocab_size": 310})
    return folder


def theirs(folder: Path, **asked: Any) -> list[list[int]]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(folder)(TEXTS, **asked)["input_ids"])


def ours(folder: Path, most: int = 0) -> list[list[int]]:
    inner = PublishedTokenizer(path=folder / "tokenizer.json").read(most)
    return [one.ids for one in inner.encode_batch(TEXTS)]


CASED = {"lowercase": False}
REFUSED = "must be .* as in `tokenizer.json`, but is"


def require_parity(folder: Path, message: str) -> None:
    """The files are refused exactly where `transformers` gives the texts other tokens."""
    assert (ours(folder) == theirs(folder)) is not bool(message)
    if message:
        with pytest.raises(ConfigError, match=message):
            check_tokenizer(folder)
        return
    check_tokenizer(folder)
    assert ours(folder, 7) == theirs(folder, truncation=True, max_length=7)


@pytest.mark.parametrize(
    ("normalizer", "settings", "message"),
    [
        ({}, BERT, ""),
        ({}, {**BERT, "do_lower_case": False}, REFUSED),
        (CASED, {**BERT, "do_lower_case": False}, ""),
        (CASED, BERT, '`do_lower_case` in .* must be false as .* missing, which means .*`"do_lower_case": false` into'),
        (CASED, None, "`do_lower_case` in .* must be false as in `tokenizer.json`, but is missing"),
        (CASED, {**BERT, "do_lower_case": False, "strip_accents": False}, ""),  # null there means the same
        (CASED, {**BERT, "do_lower_case": False, "strip_accents": True}, "`strip_accents` in .* must be false"),
        ({"strip_accents": True}, {**BERT, "strip_accents": None}, ""),
        ({"strip_accents": False, "handle_chinese_chars": False}, BERT, REFUSED),
        (
            {"strip_accents": False, "handle_chinese_chars": False},
            {**BERT, "do_lower_case": True, "strip_accents": False, "tokenize_chinese_chars": False},
            "",
        ),
        (CASED, {**BERT, "tokenizer_class": "BertTokenizerFast"}, REFUSED),
        (CASED, {**BERT, "tokenizer_class": "PreTrainedTokenizerFast"}, ""),
        ({}, {"do_lower_case": False, **NAMES}, REFUSED),
        ({}, {**BERT, "split_special_tokens": True}, ""),
        ({}, None, ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("part", [None, "post_processor", "truncation"])
def test_bert_has_the_steps_of_its_class(bert, tmp_path, normalizer, settings, message, part):
    """With and without a part of `tokenizer.json` that the class does not read."""
    folder = shutil.copytree(bert, tmp_path / "model")
    if settings is not None:
        put(folder / "tokenizer_config.json", settings)
    table = json.loads((folder / "tokenizer.json").read_text())
    table["normalizer"] |= normalizer
    if part:
        cut = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Left"}
        table[part] = cut if part == "truncation" else None
    put(folder / "tokenizer.json", table)
    require_parity(folder, message)


@pytest.mark.parametrize(
    ("has_space", "settings", "message"),
    [
        (False, ROBERTA, ""),
        (False, {**ROBERTA, "tokenizer_class": None}, ""),
        (False, None, ""),
        (False, {**ROBERTA, "add_prefix_space": True}, "`add_prefix_space` in .* must be false as in"),
        (True, {**ROBERTA, "add_prefix_space": True}, ""),
        (
            True,
            {**ROBERTA, "tokenizer_class": None},
            "must be true as in `tokenizer.json`, but is missing, which means",
        ),
        (False, {**ROBERTA, "truncation_side": "left"}, ""),
        (False, {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True}, ""),
    ],
    ids=str,
)
def test_roberta_has_the_steps_of_its_class(roberta, tmp_path, has_space, settings, message):
    folder = shutil.copytree(roberta, tmp_path / "model")
    if settings is not None:
        put(folder / "tokenizer_config.json", settings)
    table = json.loads((folder / "tokenizer.json").read_text())
    table["pre_tokenizer"]["add_prefix_space"] = has_space
    put(folder / "tokenizer.json", table)
    require_parity(folder, message)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, None),
        ({"model_max_length": 12}, 12),
        ({"max_len": 9}, 9),
        ({"model_max_length": None, "max_len": 9}, None),
        ({"model_max_length": 1e30}, int(1e30)),
    ],
)
def test_length_is_that_of_the_settings(bert, tmp_path, settings, most):
    from transformers import AutoTokenizer

    folder = shutil.copytree(bert, tmp_path / "model")
    put(folder / "tokenizer_config.json", {**BERT, **settings})
    assert PublishedTokenizer(path=folder / "tokenizer.json").max_tokens == most
    assert int(AutoTokenizer.from_pretrained(folder).model_max_length) == (int(1e30) if most is None else most)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_max_length": "x"}, r"^`model_max_length` in `.*` must be a number of at least 1, but is 'x'\."),
        ({"max_len": 0}, r"^`max_len` in `.*` must be a number of at least 1, but is 0\."),
        ({"do_lower_case": None}, r"^`do_lower_case` in `.*` must be true as .*, but is null\."),
        ({"strip_accents": "no"}, r"^`strip_accents` in `.*` must be true as .*, but is 'no'\."),
        ({"tokenizer_class": "RobertaTokenizer"}, r"must fit `tokenizer\.json`, .* kind BPE, but is 'RobertaTokeni"),
        ({"cls_token": "[X]"}, r"has no token '\[X\]', but is 'BertTokenizer'\. Save"),
        ({"truncation_side": "top"}, r"^`truncation_side` in `.*` must be right or left, but is 'top'\."),
    ],
)
def test_damaged_settings_are_refused(bert, tmp_path, settings, message):
    folder = shutil.copytree(bert, tmp_path / "model")
    put(folder / "tokenizer_config.json", {**BERT, **settings})
    tokenizer = PublishedTokenizer(path=folder / "tokenizer.json")
    with pytest.raises(ConfigError, match=message):
        check_tokenizer(folder)
        tokenizer.read(tokenizer.max_tokens or 5)


def test_prompt_is_counted_without_the_token_at_its_end(bert, roberta, tmp_path):
    tokenizer = PublishedTokenizer(path=bert / "tokenizer.json")
    assert (tokenizer.num_prompt_tokens("", 9), tokenizer.num_prompt_tokens("the fox", 9)) == (0, 3)  # with [CLS]
    assert tokenizer.num_prompt_tokens("the fox jumps over", 4) == 3  # cut
    plain = shutil.copytree(roberta, tmp_path / "model")
    put(plain / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"})
    assert PublishedTokenizer(path=plain / "tokenizer.json").num_prompt_tokens("the fox", 9) == 2
    assert PublishedTokenizer(path=plain / "tokenizer.json").num_prompt_tokens("the fox</s>", 9) == 2
    put(plain / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    put(plain / "special_tokens_map.json", {"eos_token": "</s>"})
    assert PublishedTokenizer(path=plain / "tokenizer.json").num_prompt_tokens("the fox</s>", 9) == 2


def test_tokenizer_of_a_run_is_only_its_own_file(bert, tmp_path):
    folder = shutil.copytree(bert, tmp_path / "model")
    put(folder / "tokenizer_config.json", {**BERT, "do_lower_case": False, "model_max_length": 5})
    tokenizer = PublishedTokenizer(path=folder / "tokenizer.json", is_published=False)
    assert tokenizer.max_tokens is None
    assert tokenizer.read().encode("The Fox").ids == tokenizer.read().encode("the fox").ids
    lower = PublishedTokenizer(path=folder / "tokenizer.json", lower_case=True)
    assert lower.read().encode("The Fox").ids == lower.read().encode("the fox").ids
