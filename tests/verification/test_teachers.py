"""A model that learns from a teacher on another number of tensor ranks is the uncut model with an uncut teacher."""

from pathlib import Path
from typing import Any

import pytest

from crosscut.config import Layout, load_run, write_toml
from tests.ranks import RankPool
from tests.verification.runs import BERT, CHOICE, CLASSES, MASKED, SPANS, STORED, TEACHER, proven

BOTH = Layout(tensor=2, data=2)
SPLIT = Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True)
FORWARD = {"folder": TEACHER["folder"], "tensor": 1, "alpha": 1.0}
PACKED = {"training": {"document_mask": True, "micro_batch_size": 1}}
LAYERS = {"training": {"recompute": "full", "z_loss": 0.01}, "logit_softcap": 2.0}


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(tensor=2), {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)  # other layouts have the same loss, and these exchanges
            for case in (
                (BOTH, PACKED),
                (SPLIT, {"teacher": FORWARD}),
                (Layout(context=2, tensor=2), PACKED),
                (Layout(pipeline=2, tensor=2), LAYERS),
                (Layout(pipeline=2, data=2, schedule="zero_bubble"), {}),
                (BOTH, {"training": {"precision": "bfloat16"}}),
                (Layout(tensor=4), {"teacher": {**FORWARD, "tensor": 0, "loss": "reverse_kl"}}),
            )
        ),
    ],
    ids=str,
)
def test_a_teacher_changes_nothing_about_the_layout(ranks: RankPool, layout: Layout, options: dict[str, Any]) -> None:
    report = proven(ranks, layout, **{"teacher": TEACHER, **options})
    assert any(check.name == "collectives" and check.same for check in report.checks)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(context=2, tensor=2), PACKED),
        *(
            pytest.param(*case, marks=pytest.mark.slow)  # other layouts have the same loss
            for case in (
                (SPLIT, {}),
                (Layout(tensor=4), {"teacher": {"cache": "logits", "k": 300}}),
                (Layout(pipeline=2, tensor=2), LAYERS),
                (Layout(pipeline=2, data=2), {"teacher": {"cache": "logits", "k": 1, "loss": "reverse_kl"}}),
                (BOTH, {**BERT, **MASKED}),
            )
        ),
    ],
    ids=str,
)
def test_stored_logits_change_nothing_about_the_layout(
    ranks: RankPool, layout: Layout, options: dict[str, Any]
) -> None:
    proven(ranks, layout, **{"teacher": STORED, **options})


TWO = {"training": {"micro_batch_size": 2}}


@pytest.mark.parametrize(
    ("layout", "model", "tensor", "options"),
    [
        (Layout(tensor=2), {**BERT, **CLASSES}, 1, {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)  # other layouts and heads have the same exchange
            for case in (
                (BOTH, {**BERT, **CLASSES}, 4, TWO),
                (SPLIT, {**BERT, **CLASSES}, 2, TWO),
                (SPLIT, CLASSES, 1, {}),
                (Layout(data=4), {**BERT, **CHOICE}, 2, TWO),
                (Layout(tensor=2, sequence_parallel=True), {**BERT, **SPANS}, 1, {}),
                (BOTH, SPANS, 4, {}),
                (BOTH, {**BERT, **CHOICE}, 1, {"training": {"precision": "bfloat16", "micro_batch_size": 2}}),
            )
        ),
    ],
    ids=str,
)
def test_a_teacher_of_labels_changes_nothing_about_the_layout(
    ranks: RankPool, tmp_path: Path, layout: Layout, model: dict[str, Any], tensor: int, options: dict[str, Any]
) -> None:
    """The result proves losses, gradients and messages."""
    shape = {"num_layers": 3, "hidden_size": 48, "num_heads": 4, "vocab_size": 300, "max_sequence_length": 16}
    write_toml(load_run({"model": {**shape, **model}, "training": {"sequence_length": 16}}), tmp_path / "config.toml")
    teacher = {**TEACHER, "folder": str(tmp_path), "tensor": tensor}
    report = proven(ranks, layout, **{"teacher": teacher, **model, **options})
    assert any(check.name == "collectives" and check.same for check in report.checks)
