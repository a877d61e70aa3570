"""Fields that models read, and the shapes of these fields."""

from typing import Any

import pytest

from crosscut.architecture import describe
from crosscut.architecture.inputs import FIELDS, Element, LossTerm, Read
from crosscut.config import ModelConfig

SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 50, "max_sequence_length": 8}
BERT: dict[str, Any] = {**SIZES, "attention": "bidirectional", "token_types": 2}
MASKED = {"head": "masked_tokens", "sentence_order": True}


@pytest.mark.parametrize(
    ("model", "document_mask", "names"),
    [
        (SIZES, False, "tokens targets"),
        (SIZES, True, "tokens positions documents targets"),
        ({**BERT, **MASKED}, False, "tokens segments mask targets order predicted"),
        ({**BERT, "head": "masked_tokens", "token_types": 1}, False, "tokens mask targets predicted"),
        ({**BERT, "head": "classes", "num_classes": 3}, False, "tokens segments mask labels"),
        ({**SIZES, "head": "number"}, False, "tokens mask labels"),
    ],
)
def test_a_model_lists_the_fields_that_it_reads(model: dict[str, Any], document_mask: bool, names: str) -> None:
    assert " ".join(describe(ModelConfig(**model)).reads(document_mask=document_mask)) == names


def test_ids_have_as_many_values_as_the_model_has_rows() -> None:
    reads = describe(ModelConfig(**{**BERT, **MASKED})).reads(document_mask=False)
    values = {name: read.num_values for name, read in reads.items() if read.kind is Element.ID}
    assert values == {"tokens": 50, "segments": 2, "targets": 50, "order": 2}
    assert describe(ModelConfig(**BERT, head="classes", num_classes=3)).head.reads["labels"].num_values == 3


@pytest.mark.parametrize(
    ("head", "shape", "element"),
    [("number", (6,), Element.REAL), ("spans", (6, 2), Element.PLACE), ("choice", (2,), Element.ID)],
)
def test_labels_have_the_form_of_the_head(head: str, shape: tuple[int, ...], element: Element) -> None:
    labels = describe(ModelConfig(**BERT, head=head)).head.reads["labels"]
    assert labels.shape(6, 8, sharing=3) == shape
    assert labels.kind is element


def test_every_other_field_has_the_shape_of_the_table() -> None:
    shapes = {name: Read(name).shape(6, 8, predicted=5) for name in FIELDS if name != "labels"}
    names = ("tokens", "targets", "positions", "documents", "segments", "mask", "teacher", "teacher_ids")
    of_tokens = dict.fromkeys(names, (6, 8))
    assert shapes == {**of_tokens, "order": (6,), "teacher_labels": (6,), "predicted": (5,), "places": (8,)}


def test_each_term_of_a_loss_is_divided_by_the_rows_of_what_it_predicts() -> None:
    terms = {
        "next_token": [LossTerm("tokens", "targets")],
        "masked_tokens": [LossTerm("tokens", "targets"), LossTerm("order", "order")],
        "spans": [LossTerm("task", "labels")],
    }
    for head, expected in terms.items():
        more = {"sentence_order": True} if head == "masked_tokens" else {}
        assert list(describe(ModelConfig(**BERT, head=head, **more)).head.loss_terms) == expected


def test_a_field_that_is_not_in_the_table_cannot_be_read() -> None:
    with pytest.raises(AssertionError, match="colours is no field of a batch"):
        Read("colours")
