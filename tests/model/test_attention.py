"""Attention with keys and values that are repeated, for GPUs' kernels that take none that heads of queries share."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from crosscut.config import Layout, ModelConfig, RunConfig, TrainingConfig
from crosscut.model import Batch
from crosscut.model.shared import Shared
from crosscut.model.sublayers import attention
from crosscut.model.sublayers.attention import capability_of
from crosscut.model.sublayers.rotary import rotations
from crosscut.parallel import make_mesh
from crosscut.planner import layer_activations
from crosscut.training.precision import resolve_on
from crosscut.training.speed import compilation
from crosscut.training.step import Trainer
from tests.ranks import RankPool

SIZES = {"num_layers": 1, "hidden_size": 64, "num_heads": 8, "vocab_size": 128, "num_kv_heads": 2}
LLAMA = {
    **SIZES,
    "positions": "rotary",
    "norm": "rms",
    "layers": ("attention swiglu",),
    "biases": "none",
    "dropout": 0.0,
}
HOPPER = (9, 0)


def run_of(model: dict[str, Any], **training: Any) -> RunConfig:
    layout = Layout(tensor=training.pop("tensor", 1))
    options = {"batch_size": 2, "sequence_length": 16, "compile": "off", **training}
    return RunConfig(model=ModelConfig(**model), layout=layout, training=TrainingConfig(**options))


def trainer_of(run: RunConfig, capability: tuple[int, int] | None) -> Trainer:
    """A trainer on the CPU whose attention takes it for such a GPU."""
    with mock.patch.object(attention, "capability_of", lambda _: capability):
        return Trainer(resolve_on(run, torch.device("cpu")), make_mesh(run.layout, torch.device("cpu")))


def heads_and_gradients(run: RunConfig, capability: tuple[int, int] | None) -> tuple[list[Any], list[Tensor]]:
    """Heads that the kernel is given in a step, with whether it is told that they are shared; loss and gradients."""
    trainer, given, plain = trainer_of(run, capability), [], F.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        given.append((q.shape[1], k.shape[1], v.shape[1], options["enable_gqa"]))
        return plain(q, k, v, **options)

    tokens = torch.randint(128, (2, 17), generator=torch.Generator().manual_seed(0))
    with mock.patch.object(F, "scaled_dot_product_attention", watched):
        loss = trainer.accumulate(0, [Batch.from_ids(tokens)])
    return given, [loss.detach().clone(), *(p.grad.to_local().clone() for p in trainer.parameters)]


@pytest.mark.parametrize(
    ("model", "tensor", "heads"),
    [
        ({**LLAMA, "dropout": 0.3}, 1, (8, 2)),
        ({**LLAMA, "qk_norm": True}, 2, (4, 1)),
        ({**SIZES, "num_kv_heads": 1, "dropout": 0.0}, 2, (4, 1)),  # ranks have the same one
        ({**LLAMA, "num_kv_heads": 8}, 1, (8, 8)),
    ],
    ids=["dropout", "norms", "multi-query", "as many of each"],
)
def test_repeated_keys_and_values_give_the_same_and_the_same_gradients(
    ranks: RankPool, model: dict[str, Any], tensor: int, heads: tuple[int, int]
) -> None:
    run = run_of(model, tensor=tensor, precision="float64")
    shared = ranks.run(tensor, heads_and_gradients, run, None)
    repeated = ranks.run(tensor, heads_and_gradients, run, HOPPER)
    for (plain, expected), (given, found) in zip(shared, repeated, strict=True):
        assert plain == [(heads[0], heads[1], heads[1], heads[0] != heads[1])]
        assert given == [(heads[0], heads[0], heads[0], False)]
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-13)


def test_shared_heads_go_to_the_kernels_that_take_them(ranks: RankPool) -> None:
    run = run_of(LLAMA, precision="bfloat16")
    given, _ = ranks.run(1, heads_and_gradients, run, HOPPER)[0]
    assert given == [(8, 2, 2, True)]
    given, _ = ranks.run(1, heads_and_gradients, run, (7, 5))[0]
    assert given == [(8, 8, 8, False)]


def bytes_kept(run: RunConfig, backend: str = "aot_eager") -> int:
    """Bytes that a layer keeps for its backward pass, without its parameters and the rotation that all layers share."""
    with mock.patch.object(compilation, "BACKEND", backend):
        trainer = trainer_of(run, HOPPER)
    model, kept = trainer.model, dict[int, int]()
    dtype = getattr(torch, run.training.numbers.compute)
    rotation = None if model.positions is not None else rotations(torch.arange(16), run.model, dtype)
    shared = [*(p.to_local() for p in trainer.parameters), *(rotation or ())]
    own = {tensor.untyped_storage()._cdata for tensor in shared}

    def keep(saved: Tensor) -> Tensor:
        kept[saved.untyped_storage()._cdata] = saved.untyped_storage().nbytes()
        return saved

    x = torch.randn(2, 16, 64, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        model.blocks[0](x, Shared(rotation))[0].sum().item()
    return sum(size for storage, size in kept.items() if storage not in own)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(
    "model",
    [
        LLAMA,
        {**LLAMA, "qk_norm": True},
        {**SIZES, "dropout": 0.0},
        {**LLAMA, "qk_norm": True, "qk_norm_kind": "layer"},
        {**LLAMA, "layers": ("attention relu2",)},
        {**LLAMA, "layers": ("attention geglu",)},
        {**LLAMA, "norm_place": "output", "qk_norm": True, "qk_norm_over": "all_heads"},
        {**LLAMA, "attention_gate": True, "qk_norm": True, "rotary_fraction": 0.5},
        {**LLAMA, "attention_gate": True, "layers": ("nope_attention swiglu",)},
        {**LLAMA, "layers": ("sparse_attention swiglu",), "sparse_attention": {"block_size": 2, "stride": 3}},
    ],
    ids=[
        "Llama",
        "Qwen3",
        "GPT-2",
        "QK layer norm",
        "squared ReLU",
        "GeGLU",
        "OLMo 2",
        "Qwen3-Next",
        "no positions",
        "blocks",
    ],
)
def test_a_layer_that_repeats_keys_keeps_what_the_planner_says(
    ranks: RankPool, model: dict[str, Any], recompute: str
) -> None:
    run = run_of(model, precision="float32", recompute=recompute)
    assert ranks.run(1, bytes_kept, run)[0] == layer_activations(run, device="cuda").total


@pytest.mark.slow  # compiles three layers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
def test_a_compiled_layer_keeps_them_whether_or_not_attention_is_to_be_recomputed(ranks: RankPool) -> None:
    run = run_of(LLAMA, precision="float32", recompute="selective", compile="on")
    plain = run_of(LLAMA, precision="float32")
    assert ranks.run(1, bytes_kept, run)[0] == layer_activations(run, device="cuda").total
    assert layer_activations(run) == layer_activations(plain)


@pytest.mark.slow  # compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_layer_shares_them_where_the_kernel_does(ranks: RankPool) -> None:
    run = run_of(LLAMA, precision="bfloat16", compile="on")
    account = layer_activations(run, device="cuda")
    repeated = layer_activations(run, device="cuda", capability=(7, 0))
    assert ranks.run(1, bytes_kept, run)[0] == pytest.approx(account.total + account.weights, rel=0.02)
    assert repeated.total > 1.04 * account.total


def test_the_capability_is_the_devices() -> None:
    assert capability_of(torch.device("cpu")) is None
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 6)):
        assert capability_of(torch.device("cuda", 0)) == (8, 6)
