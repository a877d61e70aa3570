"""Gradients of encoders with heads, beside those of `transformers` in float64."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from crosscut.config import IGNORED, Layout
from crosscut.model import Batch
from crosscut.pretrained import find_model
from crosscut.pretrained.families import weights_of, with_prefix
from tests.pretrained import encoders, jobs
from tests.pretrained.encoders import PADDING, make_encoder

ORDER = torch.tensor([0, 1, 1])
TOKENS = F.pad(encoders.TOKENS, (0, 1), value=PADDING)
"""One more token than usual, so that two ranks can divide the sequence."""
MASK = F.pad(encoders.MASK, (0, 1))
TARGETS = TOKENS.flip(1).where(MASK & (torch.arange(TOKENS.shape[1]) % 3 == 1), IGNORED)
NAMES = {"bert with heads": 0, "bert for masked tokens": 0, "roberta with a head": 2}
"""Encoders, with the row of the first position in their table of positions."""
LAYOUTS = [Layout(), Layout(tensor=2), Layout(tensor=2, sequence_parallel=True), Layout(tensor=4)]


def batch_of(name: str) -> Batch:
    segments, order = encoders.batch_of(name).segments, ORDER if "heads" in name else None
    segments = None if segments is None else F.pad(segments, (0, 1))
    return Batch(tokens=TOKENS, targets=TARGETS, segments=segments, mask=MASK, order=order)


@pytest.fixture(scope="module", params=NAMES)
def case(request, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("gradients") / "model"
    make_encoder(folder, request.param)
    return request.param, folder


def theirs(folder: Path, name: str) -> jobs.Gradients:
    """Loss, and gradients by the full names of the published tensors."""
    from transformers import AutoModelForMaskedLM, AutoModelForPreTraining

    has_order = "heads" in name
    kind = AutoModelForPreTraining if has_order else AutoModelForMaskedLM
    model = kind.from_pretrained(folder, dtype=torch.float64).eval()
    types = batch_of(name).segments
    given = {"next_sentence_label": ORDER} if has_order else {}
    loss = model(TOKENS, attention_mask=MASK.long(), token_type_ids=types, labels=TARGETS, **given).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    full = with_prefix(find_model(folder).model, list(found))
    return float(loss.detach()), {new: found[old] for new, old in full.items()}


@pytest.mark.one_in(5)  # each encoder on a layout of its own
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_are_those_of_transformers(ranks, case, layout):
    name, folder = case
    expected, gradients = theirs(folder, name)
    source, most = find_model(folder), max(float(one.abs().max()) for one in gradients.values())
    for loss, found in ranks.run(layout.world_size, jobs.gradients, source, layout, batch_of(name)):
        assert abs(loss - expected) <= 1e-9 * abs(expected)
        compared = set()
        for weight in weights_of(source.model, first_position=NAMES[name]):
            for index, part in enumerate(weight.sources):
                their = gradients[part.name][part.start :][: weight.source_rows]
                difference = (found[weight.name][weight.rows(index)] - their).abs().max()
                # The biases of keys have gradients of 0 but for rounding.
                assert difference <= 1e-9 * max(float(their.abs().max()), 1e-3 * most), weight.name
                compared.add(part.name)
        assert compared == set(gradients), "every parameter of theirs has a gradient of ours"
