"""The run that the tests of this folder verify, and its verification on the pool of ranks."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch

from crosscut.config import Layout, RunConfig, load_run
from crosscut.parallel import make_mesh
from crosscut.training.speed import compilation
from crosscut.verification import LayoutReport, for_verification, verify_on_mesh
from tests.parallel.stand_ins import products_in_pieces
from tests.ranks import RankPool

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "positions": "rotary",
    "norm": "rms",
    "layers": ("attention swiglu",),
    "biases": "none",
    "mlp_size": 88,
}
MODERN: dict[str, Any] = {
    **LLAMA, "layers": ("attention relu2",), "norm_affine": False, "embedding_norm": True, "qk_norm": True,
    "tied": False,
    "logit_softcap": 0.5,
}  # fmt: skip
"""A model with all the options of the modern recipe (docs/recipe.md)."""
BERT: dict[str, Any] = {
    "attention": "bidirectional",
    "norm_place": "after",
    "token_types": 3,
    "layers": ("attention gelu_exact",),
}
MASKED: dict[str, Any] = {"head": "masked_tokens", "sentence_order": True}
CLASSES: dict[str, Any] = {"head": "classes", "num_classes": 3}
NUMBER: dict[str, Any] = {"head": "number"}
SPANS: dict[str, Any] = {"head": "spans"}
CHOICE: dict[str, Any] = {"head": "choice"}
TEACHER: dict[str, Any] = {
    "folder": str(Path(__file__).parent / "teacher"), "tensor": 1, "loss": "jsd", "beta": 0.3, "temperature": 2.0,
    "alpha": 0.6,
}  # fmt: skip

STORED: dict[str, Any] = {
    "cache": "logits",
    "k": 7,
    **{name: TEACHER[name] for name in ("loss", "beta", "temperature")},
}
"""A teacher whose logits are stored; their values do not matter."""


def tiny_run(
    *,
    training: Mapping[str, Any] = MappingProxyType({}),
    optimizer: Mapping[str, Any] = MappingProxyType({}),
    data: Mapping[str, Any] = MappingProxyType({}),
    teacher: Mapping[str, Any] = MappingProxyType({}),
    **model: Any,
) -> RunConfig:
    """Tiny run with changed settings of `training`, `optimizer`, `data`, `teacher` and the model. The 300 vocabulary
    entries are padded to 384 on one rank, and to 512 on more ranks.
    """
    shape = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 300, "max_sequence_length": 16}
    table = {
        "model": {**shape, "dropout": 0.1, **model},
        "training": {"sequence_length": 16, "steps": 10, **training},
        "data": {**data},
        "teacher": {**teacher},
        "optimizer": {"warmup_steps": 0, **optimizer},
    }
    return load_run(table)


def verify_run(run: RunConfig, backend: str = "aot_eager") -> LayoutReport:
    """On a rank: verify a run. Its layers are compiled, if at all, without a generator of code, which takes long.
    Symmetric memory, which only GPUs have, is replaced.
    """
    with products_in_pieces(), mock.patch.object(compilation, "BACKEND", backend):
        return verify_on_mesh(run, make_mesh(run.layout, CPU))


def proven(ranks: RankPool, layout: Layout, precision: str = "float64", **options: Any) -> LayoutReport:
    """Verify the tiny run with these options on a layout, and require that nothing differs."""
    run = for_verification(tiny_run(**options), layout, precision)
    report: LayoutReport = ranks.run(layout.world_size, verify_run, run, time_limit=240.0)[0]
    assert report.same, (report.first, [check for check in report.checks if not check.same])
    return report
