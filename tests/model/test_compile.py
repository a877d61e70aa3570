"""The model compiles without a graph break, the collectives inside."""

import pytest
import torch

from crosscut.config import Layout
from tests.model.twins import batch, build
from tests.ranks import RankPool


def _compiled_and_eager(layout: Layout) -> tuple[float, float]:
    """The differences of the loss and of a gradient."""
    model = build(layout)
    tokens, targets = batch(0)
    eager = model.loss(tokens, targets)
    eager.backward()
    weight = model.blocks[0].mlp.expand.weight
    expected = weight.grad.full_tensor().clone()
    model.zero_grad()
    compiled = torch.compile(model.loss, fullgraph=True, backend="aot_eager")(tokens, targets)
    compiled.backward()
    return (compiled - eager).abs().item(), (weight.grad.full_tensor() - expected).abs().max().item()


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(), marks=pytest.mark.slow),  # the same without collectives
        pytest.param(Layout(tensor=2), marks=pytest.mark.slow),
        Layout(tensor=2, sequence_parallel=True),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
def test_whole_loss_compiles_to_the_eager_result(ranks: RankPool, layout: Layout) -> None:
    for loss, gradient in ranks.run(layout.tensor, _compiled_and_eager, layout):
        assert loss < 1e-12
        assert gradient < 1e-12
