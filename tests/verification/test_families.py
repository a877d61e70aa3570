"""Both families of decoders verified, with heads of keys and values fewer than those of queries, and than ranks."""

from typing import Any

import pytest

from crosscut.config import Layout
from crosscut.verification import for_verification, verify_runs
from tests.ranks import RankPool
from tests.verification.runs import BERT, CHOICE, CLASSES, LLAMA, MASKED, MODERN, NUMBER, SPANS, proven, tiny_run

QWEN3 = {**LLAMA, "qk_norm": True, "head_size": 12}
GRANITE = {
    **LLAMA,
    "positions": "none",
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logit_divisor": 1.5,
}
CASES = [
    ({**BERT, **MASKED}, Layout(tensor=2, data=2)),
    ({"num_kv_heads": 2}, Layout(tensor=4, sequence_parallel=True)),
    ({"num_kv_heads": 1}, Layout(tensor=2, data=2)),
    (LLAMA, Layout()),
    (LLAMA, Layout(tensor=4)),
    ({**LLAMA, "num_kv_heads": 2}, Layout(tensor=2, sequence_parallel=True)),
    ({**LLAMA, "num_kv_heads": 2}, Layout(tensor=4)),
    ({**LLAMA, "num_kv_heads": 2, "tied": False}, Layout(tensor=4, sequence_parallel=True)),
    ({**LLAMA, "num_kv_heads": 1}, Layout(tensor=4)),
    ({**LLAMA, "num_kv_heads": 1}, Layout(tensor=2, data=2, sharding="zero3")),
    ({**LLAMA, "num_heads": 9, "num_kv_heads": 3, "hidden_size": 36, "mlp_size": 96}, Layout(tensor=3)),
    ({**LLAMA, "num_heads": 9, "num_kv_heads": 1, "hidden_size": 36, "mlp_size": 96}, Layout(tensor=3)),
    ({**LLAMA, "biases": "qkv", "num_kv_heads": 1}, Layout(tensor=2, sequence_parallel=True)),
    ({**QWEN3, "num_kv_heads": 2}, Layout(tensor=4)),
    ({"lora_rank": 2}, Layout(tensor=2, sequence_parallel=True)),
    ({**LLAMA, "num_kv_heads": 2, "lora_rank": 4}, Layout(tensor=4)),
    ({**LLAMA, "num_kv_heads": 1, "lora_rank": 4}, Layout(tensor=2, data=2, sharding="zero3")),
    ({"layers": ("attention relu2",)}, Layout(tensor=4, sequence_parallel=True)),
    ({"layers": ("attention geglu",)}, Layout(tensor=2, data=2, sharding="zero2")),
    ({"qk_norm": True, "qk_norm_kind": "layer", "num_kv_heads": 2}, Layout(tensor=4, sequence_parallel=True)),
    (
        {"layers": ("attention swiglu", "attention gelu")},
        Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True),
    ),
    (
        {"layers": ("attention", "gelu attention gelu attention"), "num_kv_heads": 2},
        Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True),
    ),
    (MODERN, Layout(tensor=4, sequence_parallel=True)),
    ({**MODERN, "num_kv_heads": 1}, Layout(tensor=2, data=2, sharding="zero3")),
    ({"embedding_norm": True}, Layout(tensor=2, data=2, sequence_parallel=True)),
    ({"norm_affine": False, "embedding_norm": True, "qk_norm": True, "qk_norm_kind": "layer"}, Layout(tensor=2)),
    ({**QWEN3, "num_kv_heads": 1}, Layout(tensor=2, data=2, sharding="zero2", sequence_parallel=True)),
    ({**GRANITE, "num_kv_heads": 2}, Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True)),
    (GRANITE, Layout(tensor=4, sequence_parallel=True)),
    (GRANITE, Layout(context=2, tensor=2)),
    (BERT, Layout(tensor=4)),
    (BERT, Layout(tensor=2, data=2, sequence_parallel=True)),
    ({**BERT, "norm_place": "before"}, Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True)),
    ({**LLAMA, **BERT, "num_kv_heads": 1}, Layout(tensor=4, sequence_parallel=True)),
    ({**BERT, **MASKED}, Layout(tensor=4, sequence_parallel=True)),
    ({"num_kv_heads": 2}, Layout(tensor=2)),
    ({**BERT, **MASKED, "tied": False}, Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True)),
    ({**BERT, **MASKED, "norm_place": "before"}, Layout(data=2, sharding="zero2")),
    ({"norm_place": "after"}, Layout(tensor=2, sequence_parallel=True)),
    ({**BERT, **CLASSES}, Layout(tensor=2, data=2)),
    ({**BERT, **CLASSES, "norm_place": "before"}, Layout(tensor=2, sequence_parallel=True)),
    ({**BERT, **CHOICE}, Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True)),
    ({**BERT, **SPANS}, Layout(tensor=2)),
    ({**BERT, **SPANS}, Layout(tensor=2, data=2, sharding="zero2", sequence_parallel=True)),
    ({**LLAMA, **CLASSES}, Layout(tensor=4, sequence_parallel=True)),
    (CLASSES, Layout(tensor=2, data=2, sharding="zero3")),
    (CHOICE, Layout(tensor=2, data=2)),
    ({**BERT, **NUMBER}, Layout(tensor=2, data=2, sharding="zero3", sequence_parallel=True)),
    ({**LLAMA, **NUMBER}, Layout(tensor=4, sequence_parallel=True)),
    ({**LLAMA, **SPANS}, Layout(tensor=2, sequence_parallel=True)),
]


def _described(value: Any) -> str:
    return str(value) if isinstance(value, Layout) else " ".join(f"{k}={v}" for k, v in value.items() if k not in LLAMA)


@pytest.mark.one_in(len(CASES))  # test_gpt.py compares the families with plain twins
@pytest.mark.parametrize(("model", "layout"), CASES, ids=_described)
def test_every_family_is_the_uncut_model(ranks: RankPool, model: dict[str, Any], layout: Layout) -> None:
    report = proven(ranks, layout, **model)
    # The heads run after the model's own forward call, so only their gradients and the loss are compared.
    of_heads = ("order", "prediction", "task")
    silent = {row.module for row in report.rows if row.forward is None and not row.module.startswith(of_heads)}
    assert {module for module in silent if not module.endswith(".adapter")} <= {"output"}


@pytest.mark.slow  # eight processes of its own
@pytest.mark.parametrize("family", [{}, {**LLAMA, "mlp_size": 96}], ids=["GPT-2", "Llama"])
@pytest.mark.parametrize("num_kv_heads", [8, 4, 1])
def test_eight_ranks_are_the_uncut_model(family: dict[str, Any], num_kv_heads: int) -> None:
    run = tiny_run(**{**family, "num_heads": 8, "num_kv_heads": num_kv_heads, "hidden_size": 64})
    (report,) = verify_runs([for_verification(run, Layout(tensor=8), "float64")])
    assert report.same, report.first
