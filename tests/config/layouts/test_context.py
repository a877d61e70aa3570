"""Sequences that context ranks share: what a run may ask for, and which way of attention is chosen."""

from typing import Any

import pytest

from crosscut.config import load_run


def _run(layout: dict[str, Any], *overrides: str, **model: Any) -> Any:
    shape = {"num_layers": 2, "hidden_size": 48, "num_heads": 12, "vocab_size": 300, "max_sequence_length": 1 << 17}
    table = {
        "model": {**shape, "dropout": 0.0, **model},
        "training": {"sequence_length": 64, "batch_size": 4, "precision": "bfloat16"},
        "layout": layout,
    }
    return load_run(table, overrides)


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
        (
            {"context": 4},
            ["training.sequence_length=131072", "training.batch_size=1", "model.dropout=0.1"],
            {"num_kv_heads": 3, "layers": ["sliding_attention gelu", "attention gelu"]},
            "gather",
            "the gathered keys and values of a layer, with the masks, take 16,390.0 MiB on each rank",
        ),
        (
            {"context": 4},
            ["training.sequence_length=131072", "training.batch_size=1", "model.dropout=0.1"],
            {"num_kv_heads": 3, "layers": ["sliding_attention gelu", "gelu"]},
            "gather",
            "the gathered keys and values of a layer, with the mask, take 8,198.0 MiB on each rank",
        ),
        ({"context": 4, "context_attention": "ring"}, [], {}, "ring", "`layout.context_attention` selects it"),
        (
            {"context": 2},
            [],
            {"num_kv_heads": 1, "layers": ["sparse_attention gelu", "attention gelu"]},
            "all_to_all",
            "blocks are counted from the start of the sequence",
        ),
    ],
)
def test_heads_and_memory_choose_the_way(
    layout: dict[str, Any], overrides: list[str], model: dict[str, Any], way: str, reason: str
) -> None:
    assert _run(layout, *overrides, **model).context_attention == (way, reason)
