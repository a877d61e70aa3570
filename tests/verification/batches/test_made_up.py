"""Made-up batches have the form of the batches that the model reads."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from crosscut.architecture import describe
from crosscut.config import Layout
from crosscut.model import Batch
from crosscut.parallel import Axis
from crosscut.rehearsal.rehearse import blank_batches
from crosscut.verification import for_verification
from crosscut.verification.batches.made_up import END_OF_TEXT, made_up_batch
from tests.verification.runs import BERT, CHOICE, CLASSES, MASKED, NUMBER, SPANS, tiny_run

ALONE = Axis("context", DeviceMesh.__new__(DeviceMesh), 0, 1, "")


def forms(batch: Batch) -> dict[str, tuple[int, bool, bool]]:
    """Number of dimensions, and whether the elements are floating-point or flags, by field. The number of the predicted
    tokens depends on the targets.
    """
    given = batch.given().items()
    return {name: (each.dim(), each.is_floating_point(), each.dtype == torch.bool) for name, each in given}


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"training": {"document_mask": True}},
        {**BERT, **MASKED},
        {**BERT, "head": "masked_tokens", "training": {"document_mask": True}},
        *({**kind, **head} for kind in ({}, BERT) for head in (CLASSES, NUMBER, CHOICE, SPANS)),
    ],
    ids=str,
)
def test_verify_and_the_dry_run_make_the_fields_that_the_model_reads(model: dict[str, Any]) -> None:
    run = for_verification(tiny_run(**model), Layout(), "float32")
    reads = describe(run.model).reads(document_mask=run.training.document_mask)
    (dry,) = blank_batches(run, ALONE)
    made_up = made_up_batch(run)
    if "documents" in reads:
        made_up = made_up.with_documents(END_OF_TEXT)
    if "predicted" in reads:
        made_up = made_up.with_predicted(run.mask_fraction)
    assert dry.given().keys() == made_up.given().keys() == reads.keys()
    assert forms(dry) == forms(made_up)
    shapes = {name: each.shape for name, each in made_up.given().items() if name not in ("predicted", "labels")}
    assert shapes == {name: each.shape for name, each in dry.given().items() if name not in ("predicted", "labels")}


def test_elements_are_values_that_the_model_has() -> None:
    run = for_verification(tiny_run(**BERT, **MASKED), Layout(data=2), "float32")
    batch = made_up_batch(run)
    for name, read in describe(run.model).reads(document_mask=False).items():
        if read.num_values:
            values = getattr(batch, name)
            assert set(values[values >= 0].tolist()) <= set(range(read.num_values))
            assert len(values.unique()) > 1
