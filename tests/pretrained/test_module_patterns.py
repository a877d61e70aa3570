"""Keys of PEFT's `rank_pattern` and `alpha_pattern`, matched without backtracking."""

import random
import re
import time
from collections.abc import Iterable

import pytest

from crosscut.pretrained import module_patterns
from crosscut.pretrained.module_patterns import ModulePatterns

NAMES = [f"model.layers.{i}.{module}" for i in range(30) for module in ("self_attn.q_proj", "mlp.down_proj")]


def key_of_peft(keys: Iterable[str], name: str) -> str | None:
    """The rule of PEFT 0.21 (`peft.utils.other.get_pattern_key`)."""
    return next((key for key in keys if re.match(rf"(.*\.)?({key})$", name)), None)


@pytest.mark.parametrize(
    "keys",
    [
        ["q_proj"],  # the end of a name
        ["proj", "down_proj"],  # the end of a part of a name is none
        ["layers.1.self_attn.q_proj", "model.layers.2.mlp.down_proj"],  # names, as EVA writes them
        [r"^model\.layers\.1.*\.(q|k)_proj", r".*\.down_proj"],  # the form in PEFT's documentation
        [r"layers\.[2-7]\.mlp\.\w+", r"layers\.\d{2}\.self_attn\.[^k]_proj$", ".*"],
        [r"model\.layers\.(?:1|12)\.self_attn\.q_proj", r"^layers\.3\.mlp\.down_proj"],
    ],
)
def test_the_first_key_that_peft_finds_is_found(keys):
    patterns = ModulePatterns(keys)
    assert [patterns.first(name) for name in NAMES] == [key_of_peft(keys, name) for name in NAMES]


def test_random_keys_match_as_in_python():
    draw = random.Random(3)
    atoms = ["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", "(a|b)", "(?:ab|b)", "1", "(a|)", "[a-c1]"]
    times = ["", "", "", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{2,}", "*?", "+?"]
    for _ in range(500):
        key = "".join(draw.choice(atoms) + draw.choice(times) for _ in range(draw.randint(0, 4)))
        if draw.random() < 0.3:
            key = f"({key}){draw.choice(times)}|{draw.choice(atoms)}"
        name = "".join(draw.choice("ab.1c") for _ in range(draw.randint(0, 8)))
        assert ModulePatterns([key]).first(name) == key_of_peft([key], name), (key, name)
        is_whole = ModulePatterns([key], whole=True).first(name) is not None
        assert is_whole is (re.fullmatch(key, name) is not None), (key, name)


@pytest.mark.parametrize("key", ["(a+)+b", "(a|aa)*" * 10 + "c", "(.*a){12}c", "((((a*)*)*)*)*b", "(a?){90}a{90}"])
def test_keys_on_which_python_backtracks_take_no_time(key):
    start = time.process_time()
    assert ModulePatterns([key]).first("model.layers.0." + "a" * 80) is None
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (["(?i)q_proj"], "is not a pattern that Crosscut supports"),
        (["q_proj("], "is not a pattern that Crosscut supports"),
        (["q_proj)"], "is not a pattern that Crosscut supports"),
        (["*q_proj"], "is not a pattern that Crosscut supports"),
        (["[z-a]"], "is not a pattern that Crosscut supports"),
        ([r"(q)\1"], "is not a pattern that Crosscut supports"),
        (["(" * 400 + ")" * 400], "is not a pattern that Crosscut supports"),
        (["a" * 1001], "a key has 1,001 characters"),
        ([f"{i:0500}+" for i in range(20)], "take more than 100,000 steps"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_other_keys_are_refused_with_the_reason(monkeypatch, keys, reason):
    monkeypatch.setattr(module_patterns, "_MOST_STEPS", 100_000)
    with pytest.raises(ValueError, match=reason):
        ModulePatterns(keys)


def test_many_keys_share_one_bound_of_steps(monkeypatch):
    assert module_patterns._MOST_STEPS == 3_000_000, "about a second"
    monkeypatch.setattr(module_patterns, "_MOST_STEPS", 300_000)
    patterns = ModulePatterns([f"(.*{i}.*)*x" for i in range(300)])
    with pytest.raises(ValueError, match="take more than 300,000 steps"):
        for i in range(1000):
            patterns.first(f"model.layers.{i}.{'0123456789' * 10}")
