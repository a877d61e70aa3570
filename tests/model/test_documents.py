"""Documents of packed sequences: where they begin, which tokens they show, and what a model makes of them."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from crosscut.config import IGNORED, ConfigError, Layout, ModelConfig
from crosscut.model import Batch
from crosscut.model.documents import attention_mask, find_documents
from crosscut.parallel import GradientReducer
from tests.model.twins import (
    CONFIG,
    FAMILIES,
    S,
    assert_gradients_of,
    batch,
    batch_for,
    plain_twin,
    randomised,
    wholes_of,
)
from tests.ranks import RankPool

END = 9


def test_an_end_of_text_is_the_first_token_that_is_read_of_the_next_document() -> None:
    tokens = torch.tensor([[5, 6, END, 7, 8, END, 7], [END, END, 5, 6, 7, 8, END]])
    found = find_documents(tokens, end_of_text=END)
    assert found.numbers.tolist() == [[0, 0, 1, 1, 1, 2, 2], [1, 2, 2, 2, 2, 2, 3]]
    assert found.positions.tolist() == [[0, 1, 0, 1, 2, 0, 1], [0, 0, 1, 2, 3, 4, 0]]


def test_a_token_sees_itself_and_the_earlier_tokens_of_its_document() -> None:
    numbers = torch.tensor([[0, 0, 1, 1], [3, 3, 3, 4]])
    found = attention_mask(masked(documents=numbers), torch.bfloat16, is_causal=True)
    mask = found.added
    assert mask.shape == (2, 1, 4, 4)
    assert mask.dtype == torch.bfloat16
    assert set(mask.unique().tolist()) == {0.0, -math.inf}
    assert seen(masked(documents=numbers), is_causal=True) == [
        [[0], [0, 1], [2], [2, 3]],
        [[0], [0, 1], [0, 1, 2], [3]],
    ]


def masked(**fields: Tensor) -> Batch:
    """A batch with fields of which a mask is made."""
    (like, *_) = fields.values()
    more = {"positions": like} if "documents" in fields else {}
    return Batch(tokens=like, **fields, **more)


def seen(batch: Batch, **how: Any) -> list[list[list[int]]]:
    """Keys that each query of each sequence sees; one query stands for all where all see the same."""
    found = attention_mask(batch, torch.float32, **how)
    return [[[j for j in range(4) if row[j] == 0] for row in each[0]] for each in found.added]


def test_nothing_hidden_needs_no_mask() -> None:
    assert attention_mask(masked(segments=torch.zeros(1, 4)), torch.float32, is_causal=False) is None


def test_a_window_shows_the_last_tokens_of_the_document() -> None:
    windows = {"is_causal": True, "window": 2}
    assert seen(masked(segments=torch.zeros(1, 4)), **windows) == [[[0], [0, 1], [1, 2], [2, 3]]]
    packed = masked(documents=torch.tensor([[0, 0, 0, 1]]))
    assert seen(packed, **windows) == [[[0], [0, 1], [1, 2], [3]]]
    late = attention_mask(packed, torch.float32, queries=torch.tensor([2, 3]), **windows)
    assert torch.isfinite(late.added[0, 0]).tolist() == [[False, True, True, False], [False, False, False, True]]


def test_padding_is_seen_by_no_token() -> None:
    mask = torch.tensor([[True, True, True, False], [False, True, False, True]])
    assert seen(masked(mask=mask), is_causal=False) == [[[0, 1, 2]], [[1, 3]]]
    assert seen(masked(mask=mask), is_causal=True)[0] == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]
    numbers = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 1]])
    packed = masked(documents=numbers, mask=mask)
    assert seen(packed, is_causal=False) == [[[0, 1], [0, 1], [2], [2]], [[1], [1], [1], [3]]]


def test_a_query_without_any_key_sees_all_of_them_so_that_its_result_is_a_number() -> None:
    assert seen(masked(mask=torch.zeros(1, 4, dtype=torch.bool)), is_causal=False) == [[[0, 1, 2, 3]]]


def _with_segments(model: dict[str, Any]) -> None:
    own = batch(0)
    randomised(Layout(), config=replace(CONFIG, **model)).loss(replace(own, segments=own.tokens % 2))


def test_segments_need_types(ranks: RankPool) -> None:
    message = (
        r"^A batch for a model with `model\.token_types` of 0 must not have segments, but has some\. Make the batch"
    )
    with pytest.raises(ConfigError, match=message):
        ranks.run(1, _with_segments, {})
    ranks.run(1, _with_segments, {"token_types": 2})


def _changed_padding(layout: Layout) -> float:
    """Largest change of a real token's hidden state when the ids of the padding change."""
    config = FAMILIES["BERT"]
    model, batch = randomised(layout, config=config), batch_for(config)
    other = torch.where(batch.mask, batch.tokens, (batch.tokens + 1) % CONFIG.vocab_size)
    before, after = (model.hidden_states(one).detach() for one in (batch, replace(batch, tokens=other)))
    assert not torch.equal(before, after)
    return float((before - after)[batch.mask].abs().max())


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, sequence_parallel=True)], ids=str)
def test_the_ids_of_padding_change_no_real_token(ranks: RankPool, layout: Layout) -> None:
    assert ranks.run(layout.world_size, _changed_padding, layout) == [0.0] * layout.world_size


def test_a_batch_gives_a_model_its_documents() -> None:
    ids = torch.tensor([[5, END, 7, 8]])
    batch = Batch.from_ids(ids).with_documents(END)
    assert {name: tensor.tolist() for name, tensor in batch.given().items()} == {
        "tokens": [[5, END, 7]], "targets": [[END, 7, 8]], "documents": [[0, 1, 1]], "positions": [[0, 0, 1]]
    }  # fmt: skip


def packed() -> Batch:
    tokens = batch(0).tokens
    tokens = tokens.masked_fill(tokens == END, 0)
    for row, places in enumerate([(3, 4), (1, 15), (8,), ()]):
        tokens[row, list(places)] = END
    return replace(batch(0), tokens=tokens).with_documents(END)


def _run(layout: Layout, config: ModelConfig) -> dict[str, Any]:
    model = randomised(layout, config=config)
    reducer = GradientReducer(model.parameters(), model.mesh)
    reducer.arm()
    loss = model.loss(packed())
    loss.backward()
    reducer.finish()
    return {
        "loss": loss.detach(),
        **wholes_of(model),
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2), Layout(tensor=4, sequence_parallel=True)], ids=str)
@pytest.mark.parametrize("family", ["GPT-2", "Llama grouped-query"])
def test_a_packed_sequence_is_its_documents_apart_in_the_plain_model(
    ranks: RankPool, family: str, layout: Layout
) -> None:
    config = FAMILIES[family]
    results = ranks.run(layout.world_size, _run, layout, config)
    plain = plain_twin(config, results[0]["parameters"])
    batch, loss = packed(), torch.zeros((), dtype=torch.float64)
    for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
        starts = [0, *((tokens[1:] == END).nonzero().flatten() + 1).tolist(), S]
        for start, stop in pairwise(starts):
            if (num_targets := int((targets[start:stop] != IGNORED).sum())) > 0:
                one = Batch(tokens=tokens[None, start:stop], targets=targets[None, start:stop])
                loss = loss + plain.loss(one) * num_targets
    loss.backward()
    for result in results:
        torch.testing.assert_close(result["loss"], loss.detach(), rtol=1e-10, atol=1e-10)
        assert_gradients_of(plain, result["gradients"], tolerance=1e-10)
    assert config is not CONFIG or results[0]["gradients"]["positions.weight"][S - 1].any()  # a document of S tokens
