"""The model compiles without a graph break, the collectives inside."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from crosscut.config import Layout
from crosscut.model.shared import Shared
from crosscut.model.sublayers.rotary import rotations
from tests.model.twins import FAMILIES, B, S, build
from tests.ranks import RankPool


def _changed_in_place(graph: fx.GraphModule) -> list[str]:
    """Operators that change a result of a traced autograd function in place."""
    bodies = [body for name, body in graph.named_modules() if name.startswith("fwd_body")]
    assert bodies, "no function was traced"
    results = {
        node for body in bodies for output in body.graph.find_nodes(op="output") for node in output.all_input_nodes
    }
    writers = [
        node
        for result in results
        for node in (result, *result.users)
        if result is node.kwargs.get("out") or (node.op == "call_method" and str(node.target).endswith("_"))
    ]
    return [str(node.target) for node in writers]


def _layer_and_what_a_compiler_is_given(layout: Layout, family: str) -> tuple[list[str], list[tuple[Tensor, Tensor]]]:
    """Operators that change results in place in a compiled layer, and pairs of gradients of the compiled and the plain
    layer.
    """
    config = dataclasses.replace(FAMILIES[family], num_layers=1)
    model, changed = build(layout, config=config), []
    block = model.blocks[0]
    rotation = None if model.positions is not None else rotations(torch.arange(S), config, torch.float64)
    shape = (B, S // layout.tensor if layout.sequence_parallel else S, config.hidden_size)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def look(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        changed.extend(_changed_in_place(graph))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def gradients(forward: Any) -> list[Tensor]:
        x.grad = None
        block.zero_grad()
        forward(x, Shared(rotation))[0].square().sum().backward()
        return [x.grad, *(p.grad.full_tensor() for p in block.parameters())]

    expected = [gradient.clone() for gradient in gradients(block)]
    found = gradients(torch.compile(block, fullgraph=True, backend=look))
    return changed, list(zip(found, expected, strict=True))


@pytest.mark.slow  # it compiles every function
@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, sequence_parallel=True)], ids=str)
@pytest.mark.parametrize("family", ["GPT-2", "Llama"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_function_changes_its_result_in_place_for_a_compiler(ranks: RankPool, layout: Layout, family: str) -> None:
    changed, gradients = ranks.run(layout.tensor, _layer_and_what_a_compiler_is_given, layout, family)[0]
    assert changed == [], "PyTorch 2.11 forgets the gradient of such a result"
    for found, expected in gradients:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
