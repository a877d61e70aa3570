"""Documents of packed sequences: where they begin, which tokens they show, and what a model makes of them."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from crosscut.config import IGNORED, Layout, ModelConfig
from crosscut.model import Batch
from crosscut.model.documents import causal_mask, find_documents
from crosscut.parallel import GradientReducer
from tests.model.twins import CONFIG, FAMILIES, PlainGPT, S, batch, randomised, real, reordered
from tests.ranks import RankPool

END = 9
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def test_an_end_of_text_is_the_first_token_that_is_read_of_the_next_document() -> None:
    tokens = torch.tensor([[5, 6, END, 7, 8, END, 7], [END, END, 5, 6, 7, 8, END]])
    found = find_documents(tokens, end_of_text=END)
    assert found.numbers.tolist() == [[0, 0, 1, 1, 1, 2, 2], [1, 2, 2, 2, 2, 2, 3]]
    assert found.positions.tolist() == [[0, 1, 0, 1, 2, 0, 1], [0, 0, 1, 2, 3, 4, 0]]


def test_a_token_sees_itself_and_the_earlier_tokens_of_its_document() -> None:
    mask = causal_mask(torch.tensor([[0, 0, 1, 1], [3, 3, 3, 4]]), torch.bfloat16).added
    assert mask.shape == (2, 1, 4, 4)
    assert mask.dtype == torch.bfloat16
    assert set(mask.unique().tolist()) == {0.0, -math.inf}
    seen = [[[j for j in range(4) if row[j] == 0] for row in each[0]] for each in mask]
    assert seen == [[[0], [0, 1], [2], [2, 3]], [[0], [0, 1], [0, 1, 2], [3]]]


def test_a_batch_gives_a_model_its_documents() -> None:
    ids = torch.tensor([[5, END, 7, 8]])
    tokens, targets, documents = Batch.from_ids(ids).with_documents(END).packed()
    assert (tokens.tolist(), targets.tolist()) == ([[5, END, 7]], [[END, 7, 8]])
    assert documents is not None
    assert (documents.numbers.tolist(), documents.positions.tolist()) == ([[0, 1, 1]], [[0, 0, 1]])
    assert Batch.from_ids(ids).packed()[2] is None


def packed() -> Batch:
    tokens, targets = batch(0)
    tokens = tokens.masked_fill(tokens == END, 0)
    for row, places in enumerate([(3, 4), (1, 15), (8,), ()]):
        tokens[row, list(places)] = END
    return Batch(tokens=tokens, targets=targets).with_documents(END)


def _run(layout: Layout, config: ModelConfig) -> dict[str, Any]:
    model = randomised(layout, config=config)
    reducer = GradientReducer(model.parameters(), model.mesh)
    reducer.arm()
    loss = model.loss(*packed().packed())
    loss.backward()
    reducer.finish()
    return {
        "loss": loss.detach(),
        "parameters": {name: real(name, p.full_tensor().detach()) for name, p in model.named_parameters()},
        "gradients": {name: real(name, p.grad.full_tensor()) for name, p in model.named_parameters()},
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(tensor=4, sequence_parallel=True)], ids=str)
@pytest.mark.parametrize("family", ["GPT-2", "Llama grouped-query"])
def test_a_packed_sequence_is_its_documents_apart_in_the_plain_model(
    ranks: RankPool, family: str, layout: Layout
) -> None:
    config = FAMILIES[family]
    results = ranks.run(layout.world_size, _run, layout, config)
    plain = PlainGPT(config).double()
    ours = results[0]["parameters"]
    plain.load_state_dict({name: reordered(name, p, config) for name, p in ours.items()}, strict=not config.tied)
    batch, loss = packed(), torch.zeros((), dtype=torch.float64)
    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
        starts = [0, *((tokens[1:] == END).nonzero().flatten() + 1).tolist(), S]
        for start, stop in pairwise(starts):
            if (num_targets := int((targets[start:stop] != IGNORED).sum())) > 0:
                loss = loss + plain.loss(tokens[None, start:stop], targets[None, start:stop]) * num_targets
    loss.backward()
    for result in results:
        torch.testing.assert_close(result["loss"], loss.detach(), **CLOSE)
        for name, parameter in plain.named_parameters():
            gradient = reordered(name, result["gradients"][name], config)
            torch.testing.assert_close(gradient, parameter.grad, **CLOSE)
    assert config is not CONFIG or results[0]["gradients"]["positions.weight"][S - 1].any()  # a document of S tokens
