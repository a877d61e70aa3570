"""Descriptions of heads, and what a model with a head can do."""

from dataclasses import replace
from typing import Any

import pytest

from crosscut.architecture import Ability, Layer, Target, describe, flat, lower
from crosscut.architecture.readings import attention_products
from crosscut.architecture.words import model_in_words, shape_in_figures
from crosscut.config import Layout, ModelConfig
from crosscut.config.parts.head import HeadKind
from crosscut.model.heads.table import HEADS

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "vocab_size": 50, "max_sequence_length": 8}
ENCODER: dict[str, Any] = {**SIZES, "attention": "bidirectional"}


def of_kind(sizes: dict[str, Any], kind: str) -> ModelConfig:
    return ModelConfig(**sizes, head=kind, num_classes=3 if kind == "classes" else 0)


@pytest.mark.parametrize("kind", HeadKind.values())
def test_every_kind_of_head_is_described_and_has_a_class(kind: str) -> None:
    head = describe(of_kind(ENCODER, kind)).head
    assert head.name == kind
    assert type(head) in HEADS
    terms = {term.field for term in head.loss_terms}
    assert terms <= head.reads.keys()
    assert terms == ({"targets"} if head.vocabulary else {"labels"})


@pytest.mark.parametrize(
    ("sizes", "kind", "found"),
    [
        (SIZES, "next_token", {Ability.WRITE}),
        (ENCODER, "next_token", {Ability.EMBED}),
        (ENCODER, "masked_tokens", {Ability.FILL, Ability.EMBED}),
        (SIZES, "spans", {Ability.SOLVE}),
        (ENCODER, "choice", {Ability.SOLVE, Ability.EMBED}),
    ],
)
def test_abilities_follow_from_the_head_and_from_attention(
    sizes: dict[str, Any], kind: str, found: set[Ability]
) -> None:
    assert describe(of_kind(sizes, kind)).head.abilities == found


def layers(*kinds: str, **more: Any) -> tuple[Layer, ...]:
    return describe(ModelConfig(**SIZES, layers=kinds, **more)).layers


def test_attention_is_read_from_its_products() -> None:
    target = replace(Target.of(Layout(tensor=2)), sequences=3, length=8)
    with_attention, without = layers("attention gelu", "mamba2", mamba2={"head_size": 8})
    scores, values = attention_products(with_attention, target)
    assert (scores.elements, values.elements) == (3 * 2 * 8 * 8, 3 * 8 * 16 // 2)
    assert attention_products(without, target) == ()


def test_query_heads_that_share_a_key_head_are_counted_on_one_rank() -> None:
    (layer, _) = layers("attention", num_kv_heads=2)
    of_two, of_four = (replace(Target.of(Layout(tensor=ranks)), length=8) for ranks in (2, 4))
    assert max(step.repeats_of_keys(of_two) for step in flat(lower(layer, of_two))) == 2
    assert max(step.repeats_of_keys(of_four) for step in flat(lower(layer, of_four))) == 1


def test_a_model_is_described_in_words() -> None:
    model = ModelConfig(**{**SIZES, "num_layers": 1})
    assert model_in_words(model, "1.2K") == "GPT-2, 1.2K parameters (1 layer of attention and gelu; hidden 16; 4 heads)"
    assert model_in_words(model, "1.2K", "vocabulary 50").endswith("hidden 16; 4 heads; vocabulary 50)")
    assert shape_in_figures(model) == "1 x 16, 4"
