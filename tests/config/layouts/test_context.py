"""Sequences that context ranks share: what a run may ask for, and which way of attention is chosen."""

from typing import Any

import pytest

from crosscut.config import ConfigError, load_run
from tests.refusals import refusal


def _run(layout: dict[str, Any], *overrides: str, **model: Any) -> Any:
    shape = {"num_layers": 2, "hidden_size": 48, "num_heads": 12, "vocab_size": 300, "max_sequence_length": 1 << 17}
    table = {
        "model": {**shape, "dropout": 0.0, **model},
        "training": {"sequence_length": 64, "batch_size": 4, "precision": "bfloat16"},
        "layout": layout,
    }
    return load_run(table, overrides)


@pytest.mark.parametrize(
    ("layout", "overrides", "message"),
    [
        (
            {"context": 4},
            ["training.sequence_length=60"],
            (
                "`training.sequence_length` must be a multiple of 8 (2 x `layout.context`), but is 60. Every context "
                "rank has an early and a late piece of each sequence. Try 56 or 64."
            ),
        ),
        (
            {"context": 4, "tensor": 2, "sequence_parallel": True},
            ["training.sequence_length=56"],
            (
                "`training.sequence_length` must be a multiple of 16 (2 x `layout.context` x `layout.tensor`), but is "
                "56. Every context rank has an early and a late piece of each sequence. Try 48 or 64."
            ),
        ),
        (
            {"context": 8, "tensor": 3, "context_attention": "all_to_all"},
            [],
            (
                "For all-to-all attention, `layout.context` must divide the 4 heads of a tensor rank "
                "(`model.num_heads` 12 / `layout.tensor` 3), but is 8. Try 1, 2 or 4, or set "
                'layout.context_attention="auto".'
            ),
        ),
        (
            {"context": 2, "context_attention": "ring"},
            ["model.dropout=0.1"],
            (
                '`model.dropout` must be 0 with layout.context_attention="ring", but is 0.1. The ring merges the '
                "results of several kernels, and these kernels cannot drop scores. Set "
                'layout.context_attention="auto", or model.dropout=0.'
            ),
        ),
        (
            {"context": 2},
            ["model.head=masked_tokens", "model.attention=bidirectional", "data.objective=masked"],
            (
                '`layout.context` must be 1 for a model with `model.head` = "masked_tokens", but is 2. Context '
                "parallelism is only for models that predict the next token. Remove `layout.context`."
            ),
        ),
        (
            {"context": 2, "data": 4, "sharding": "zero3", "shard_group": 2},
            [],
            (
                "`layout.shard_group` must be 0 with `layout.context` above 1, but is 2. The context ranks and all "
                "data ranks together hold one copy of the state. Remove `layout.shard_group`."
            ),
        ),
    ],
)
def test_what_cannot_be_is_said_before_a_rank_starts(
    layout: dict[str, Any], overrides: list[str], message: str
) -> None:
    assert message in refusal(ConfigError, _run, layout, *overrides)


def test_one_context_rank_needs_none_of_this() -> None:
    _run({"context_attention": "ring"}, "training.sequence_length=61", "model.dropout=0.1")


@pytest.mark.parametrize(
    ("layout", "overrides", "model", "way", "reason"),
    [
        ({"context": 4}, [], {}, "all_to_all", "4 context ranks divide the 12 key-value heads of a tensor rank"),
        (
            {"context": 4},
            [],
            {"num_kv_heads": 3},
            "gather",
            # 2 x 4 sequences x 64 tokens x 3 heads of 4 elements, and a mask of 16 x 64, of two bytes each
            "the gathered keys and values of a layer, with the mask, take 0.0 MiB on each rank",
        ),
        (
            {"context": 4},
            ["training.sequence_length=131072", "training.batch_size=1"],
            {"num_kv_heads": 3},
            "ring",
            "the gathered keys and values of a layer, with the mask, take 8,198.0 MiB on each rank",
        ),
        (
            {"context": 4},
            ["training.sequence_length=131072", "training.batch_size=1", "model.dropout=0.1"],
            {"num_kv_heads": 3},
            "gather",
            "the gathered keys and values of a layer, with the mask, take 8,198.0 MiB on each rank",
        ),
        ({"context": 4, "context_attention": "ring"}, [], {}, "ring", "`layout.context_attention` selects it"),
    ],
)
def test_heads_and_memory_choose_the_way(
    layout: dict[str, Any], overrides: list[str], model: dict[str, Any], way: str, reason: str
) -> None:
    assert _run(layout, *overrides, **model).context_attention == (way, reason)
