"""Models of 25 families, tiny and published."""

import pytest
import torch

from benchmarks.cutting.models import FAMILIES, build, large_matrices, pattern_of, published
from crosscut.verification.foreign.wide import in_float64, to_float64

pytestmark = pytest.mark.slow  # imports 25 models of transformers

WITHOUT_GRADIENT = {"model.encoder.embed_positions.weight", "dinov2.embeddings.mask_token"}
"""Whisper's fixed positions, and a mask that only the pretraining of DINOv2 applies."""


@pytest.mark.parametrize("name", FAMILIES)
def test_tiny_models_train_in_float64_and_have_the_names_of_the_published_ones(name: str) -> None:
    torch.manual_seed(0)
    model, inputs, loss_of = build(name)
    with in_float64():
        loss = loss_of(model.double()(**to_float64(inputs)))
        loss.backward()
    assert loss.dtype is torch.float64
    untrained = {full for full, parameter in model.named_parameters() if parameter.grad is None}
    untrained |= {
        full for full, parameter in model.named_parameters() if full not in untrained and not parameter.grad.any()
    }
    assert untrained <= WITHOUT_GRADIENT
    tiny = {pattern_of(full) for full, _ in model.named_parameters()}
    assert tiny == {pattern_of(full) for full, _ in published(name).named_parameters()}
    assert set(large_matrices(name)) <= tiny


@pytest.mark.parametrize(
    ("name", "number"),
    [("llama", 1_235_814_400), ("gpt2", 124_439_808), ("mixtral", 46_702_792_704), ("olmo2", 7_298_617_344)],
)
def test_published_sizes_give_the_published_number_of_parameters(name: str, number: int) -> None:
    assert sum(parameter.numel() for parameter in published(name).parameters()) == number


def test_copies_of_a_matrix_in_all_layers_count_together() -> None:
    assert pattern_of("encoder.layers.10.blocks.0.q.weight") == "encoder.layers.*.blocks.*.q.weight"
    large = large_matrices("gpt2")
    assert large["transformer.h.*.attn.c_proj.weight"] == pytest.approx(12 * 768**2 / 124_439_808)
    assert "transformer.wpe.weight" not in large  # 0.6%
