"""Heads for tasks against plain ones, on every layout."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config import IGNORED, ConfigError, Layout, ModelConfig
from crosscut.model import Batch
from crosscut.model.heads.summary_heads import last_places
from crosscut.parallel import make_reducer
from crosscut.parallel.collectives import all_reduce
from tests.model.twins import (
    BERT,
    CONFIG,
    LAYOUTS,
    LLAMA,
    SHARDED,
    B,
    PlainGPT,
    S,
    assert_gradients_of,
    build,
    plain_twin,
    randomised,
    wholes_of,
)
from tests.ranks import RankPool

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
ENCODER = dataclasses.replace(CONFIG, norm_place="after", **BERT)
DECODER = dataclasses.replace(CONFIG, num_kv_heads=2, mlp_size=96, **LLAMA)
IN_THREES = {"hidden_size": 48, "num_heads": 6, "num_kv_heads": 3, "mlp_size": 96}
NUM_CHOICES = 2
TWICE_SHARDED = [layout for layout in SHARDED if layout.data == 2]
"""The two questions of a choice are for two data ranks."""
HEADS: dict[str, dict[str, Any]] = {
    "classes": {"head": "classes", "num_classes": 3},
    "number": {"head": "number"},
    "spans": {"head": "spans"},
    "choice": {"head": "choice"},
}
MODELS = {
    **{f"BERT, {name}": ENCODER.with_head(**head) for name, head in HEADS.items()},
    **{f"Llama, {name}": DECODER.with_head(**head) for name, head in HEADS.items()},
    "GPT-2, classes": CONFIG.with_head("classes", num_classes=2),
}
LABELS = {
    "classes": torch.tensor([1, IGNORED, 0, 1]),
    "number": torch.tensor([0.5, torch.nan, -2.0, 100.25], dtype=torch.float64),
    "spans": torch.tensor([[3, 5], [0, 0], [IGNORED, IGNORED], [2, 15]]),
    "choice": torch.tensor([1, 0]),
}


def batch_of(config: ModelConfig) -> Batch:
    """Four sequences, of which two end with padding, in another part of a split sequence than the last one."""
    tokens = torch.randint(0, config.vocab_size, (B, S), generator=torch.Generator().manual_seed(4))
    mask = torch.ones(B, S, dtype=torch.bool)
    mask[0, 11:] = mask[1, 3:] = False
    segments = torch.arange(B * S).view(B, S) // 5 % config.token_types if config.token_types else None
    return Batch(tokens=tokens, labels=LABELS[config.head], mask=mask, segments=segments)


def run(layout: Layout, config: ModelConfig) -> dict[str, Any]:
    """On a rank: the loss over all data ranks, its gradients, the parameters, and the logits of the own sequences."""
    model = randomised(layout, config=config)
    mesh = model.mesh
    batch = batch_of(config).chunk(mesh.data.size)[mesh.data.rank]
    reducer = make_reducer(model, mesh)
    reducer.arm()
    loss = model.loss(batch, {"task": 0.5})
    loss.backward()
    reducer.finish()
    num_choices = NUM_CHOICES if config.head == "choice" else 1
    return {
        "loss": all_reduce(loss.detach(), mesh.data),
        **wholes_of(model),
        "logits": model.task_logits(batch, num_choices=num_choices).detach(),
        "data": (mesh.data.rank, mesh.data.size),
    }


def expected(config: ModelConfig, parameters: dict[str, Tensor]) -> tuple[PlainGPT, Tensor, Tensor]:
    """The plain model with these parameters, its logits, and half the sum of its losses."""
    plain = plain_twin(config, parameters)
    batch, labels = batch_of(config), LABELS[config.head]
    logits = plain.task_logits(batch, NUM_CHOICES)
    if config.head == "spans":
        both = (F.cross_entropy(logits[..., i], labels[:, i], reduction="none", ignore_index=IGNORED) for i in (0, 1))
        loss = sum(both).sum() / 2
    elif config.head == "number":
        loss = F.mse_loss(logits[[0, 2, 3], 0], labels[[0, 2, 3]], reduction="sum")
    else:
        loss = F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)
    return plain, logits.detach(), loss * 0.5


def check(results: list[dict[str, Any]], config: ModelConfig) -> None:
    plain, logits, loss = expected(config, results[0]["parameters"])
    loss.backward()
    for result in results:
        rank, size = result["data"]
        torch.testing.assert_close(result["logits"], logits.chunk(size)[rank], **CLOSE)
        torch.testing.assert_close(result["loss"], loss.detach(), **CLOSE)
        assert_gradients_of(plain, result["gradients"], tolerance=1e-10)


@pytest.mark.one_in(14)
@pytest.mark.parametrize("layout", [Layout(), *LAYOUTS, *TWICE_SHARDED], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_heads_are_plain_ones(ranks: RankPool, name: str, layout: Layout) -> None:
    check(ranks.run(layout.world_size, run, layout, MODELS[name]), MODELS[name])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("name", ["BERT, spans", "BERT, classes", "Llama, choice"])
def test_three_ranks_share_a_head(ranks: RankPool, name: str, is_split: bool) -> None:
    length = {"max_sequence_length": 18}  # positions for the padding that makes the sequence divisible
    config = dataclasses.replace(MODELS[name], **IN_THREES, **length)
    layout = Layout(tensor=3, sequence_parallel=is_split)
    check(ranks.run(3, run, layout, config), config)


def short(batch: Batch, length: int) -> Batch:
    """The first tokens of a batch, with labels among them."""
    parts = {name: tensor[:, :length] for name, tensor in batch.given().items() if name != "labels"}
    return Batch(**parts, labels=batch.labels.clamp(max=length - 1))


def lengths(layout: Layout, config: ModelConfig) -> list[tuple[Tensor, Tensor]]:
    """On a rank: the logits of a length that no split divides, and the same after padding by hand."""
    model = randomised(layout, config=config)
    batch = short(batch_of(config), 9)
    padded = {name: F.pad(tensor, (0, 3)) for name, tensor in batch.given().items() if name != "labels"}
    both = (batch, dataclasses.replace(batch, **padded))
    return [(model.task_logits(own).detach()[:, :9], model.loss(own).detach()) for own in both]


@pytest.mark.parametrize("name", ["BERT, classes", "BERT, spans", "Llama, classes"])
def test_a_sequence_may_have_any_length(ranks: RankPool, name: str) -> None:
    for (logits, loss), (filled, filled_loss) in ranks.run(
        2, lengths, Layout(tensor=2, sequence_parallel=True), MODELS[name]
    ):
        torch.testing.assert_close(logits, filled, **CLOSE)
        if MODELS[name].head == "classes":  # the softmax of spans counts all tokens of the batch, as in transformers
            torch.testing.assert_close(loss, filled_loss, **CLOSE)


def test_summary_of_a_decoder_is_its_last_token_that_is_no_padding() -> None:
    tokens = torch.zeros(3, 5, dtype=torch.long)
    mask = torch.tensor([[True, True, True, False, False], [False, True, True, True, True], [False] * 5])
    assert last_places(mask, tokens).tolist() == [2, 4, 0]
    assert last_places(None, tokens).tolist() == [4, 4, 4]


def test_labels_are_counted_and_stay_with_their_sequences() -> None:
    for head, number in {"classes": 3, "number": 3, "spans": 3, "choice": 2}.items():
        batch = batch_of(MODELS[f"BERT, {head}"])
        assert int(batch.num_targets) == number
        first, second = batch.chunk(2)
        assert torch.equal(torch.cat([first.tokens, second.tokens]), batch.tokens)
        assert torch.equal(torch.cat([first.labels, second.labels]).nan_to_num(), LABELS[head].nan_to_num())
    with pytest.raises(ConfigError, match=r"^`num_parts` must divide the batch's number of labels \(2\), but is 4\."):
        batch.chunk(4)


def refused(kind: str) -> None:
    model = build(Layout(), config=CONFIG if kind in ("tokens", "labels") else MODELS["BERT, choice"])
    tokens = torch.zeros(3, 4, dtype=torch.long)
    if kind == "tokens":
        model.task_logits(Batch(tokens=tokens))
    elif kind == "labels":
        model.loss(Batch(tokens=tokens, labels=tokens[:, 0]))
    elif kind == "no labels":
        model.loss(Batch(tokens=tokens, targets=tokens))
    elif kind == "numbers":
        model.loss(Batch(tokens=tokens, labels=torch.zeros(3)))
    elif kind == "scores":
        model.logits(tokens)
    elif kind == "factors":
        model.loss(Batch(tokens=tokens, labels=tokens[:1, 0]), {"tokens": 0.5})
    else:
        model.task_logits(Batch(tokens=tokens), num_choices=2)


@pytest.mark.parametrize(
    ("kind", "message"),
    {
        "tokens": r'^`model.head` must be "classes", "number", "spans" or "choice" for the logits of a task, but is "',
        "labels": r'^A batch for a model with `model.head` = "next_token" must not have labels, but has some\.',
        "no labels": r'^A batch for a model with `model.head` = "choice" must have labels, but has none\. Make',
        "numbers": r'^A batch for a model with `model.head` = "choice" must have integers as labels, but has torch.flo',
        "scores": r'^`model.head` must be "next_token" or "masked_tokens" for the scores of tokens, but is "choice"',
        "factors": r"^`scales` must have only terms of the model's loss \(task\), but has `tokens`\. Remove it\.",
        "choices": r"^`num_choices` must divide the number of sequences \(3\), but is 2\. Try 1 or 3\.",
    }.items(),
)
def test_another_use_is_refused(ranks: RankPool, kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ranks.run(1, refused, kind)
