"""Plain leaves of parameters: layers compute with them, and the parameters keep the gradients."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from crosscut.config import Layout
from crosscut.parallel import ColumnParallelLinear, ParallelMesh, VocabParallelEmbedding, local, make_mesh
from crosscut.parallel.pretended import pretended_ranks
from crosscut.parallel.state.parameters import local_inside, replicated_parameter
from crosscut.training.speed.compilation import CompiledCode, Compiler
from tests.parallel.twins import CPU


@pytest.fixture
def mesh() -> Iterator[ParallelMesh]:
    with pretended_ranks(2, 0):
        yield make_mesh(Layout(tensor=2), CPU)


@pytest.fixture
def layer(mesh: ParallelMesh) -> ColumnParallelLinear:
    made = ColumnParallelLinear(4, 6, mesh=mesh)
    _own(made).copy_(torch.arange(12.0).view(3, 4))
    return made


def _own(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, DTensor)
    return weight._local_tensor


def _grad(parameter: Any) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad._local_tensor


def _converted(layer: ColumnParallelLinear) -> None:
    layer.bfloat16()


def _assigned(layer: ColumnParallelLinear) -> None:
    layer.load_state_dict({name: 2.0 * value for name, value in layer.state_dict().items()}, assign=True)


def _loaded(layer: ColumnParallelLinear) -> None:
    layer.load_state_dict({name: 2.0 * value for name, value in layer.state_dict().items()})


def _emptied(layer: ColumnParallelLinear) -> None:
    layer.to_empty(device="cpu")
    _own(layer).fill_(3.0)


def _replaced(layer: ColumnParallelLinear) -> None:
    layer.weight._local_tensor = _own(layer) + 1.0  # type: ignore[attr-defined]


def _moved(layer: ColumnParallelLinear) -> None:
    _own(layer).data = _own(layer) + 1.0


CHANGES = [_converted, _assigned, _loaded, _emptied, _replaced, _moved]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("compiles", [False, True])
def test_no_former_tensor_is_read(layer: ColumnParallelLinear, change: Callable[..., None], compiles: bool) -> None:
    run: Any = CompiledCode(Compiler("eager")) if compiles else (lambda forward, x: forward(x))
    x = torch.randn(2, 3, 4)
    run(layer.forward, x).sum().backward()
    change(layer)
    layer.zero_grad()
    y = run(layer.forward, x.to(_own(layer).dtype))
    bias = layer.bias._local_tensor  # type: ignore[union-attr]
    assert torch.allclose(y, torch.nn.functional.linear(x.to(y.dtype), _own(layer), bias))
    y.sum().backward()
    assert _grad(layer.weight).dtype == _own(layer).dtype
    assert torch.allclose(_grad(layer.weight).float(), x.sum((0, 1)).expand(3, 4), rtol=0.02, atol=0.05)


def test_a_conversion_between_the_passes_is_an_error(layer: ColumnParallelLinear) -> None:
    y = layer(torch.randn(2, 3, 4))
    layer.double()
    with pytest.raises(RuntimeError, match="converted or replaced between them"):
        y.sum().backward()


def test_a_conversion_frees_the_former_tensor(layer: ColumnParallelLinear) -> None:
    layer(torch.randn(2, 3, 4)).sum().backward()
    former = weakref.ref(_own(layer))
    gc.disable()
    try:
        layer.bfloat16()
        assert former() is None
    finally:
        gc.enable()


def test_a_model_with_leaves_can_be_freed_and_copied(layer: ColumnParallelLinear) -> None:
    x = torch.randn(2, 3, 4)
    expected = layer(x)
    expected.sum().backward()
    copied = copy.deepcopy(layer)
    copied.zero_grad()
    copied(x).sum().backward()
    assert torch.equal(_grad(copied.weight), _grad(layer.weight))
    own = weakref.ref(_own(copied))
    del copied
    gc.collect()
    assert own() is None


def test_the_gradient_of_a_tied_embedding_is_counted_once(mesh: ParallelMesh) -> None:
    embedding = VocabParallelEmbedding(256, 4, mesh=mesh, dtype=torch.float64)
    tokens = torch.tensor([[0, 3, 3]])
    before = torch.arange(128 * 4, dtype=torch.float64).view(128, 4) / 100
    _own(embedding).copy_(before)
    for _ in range(2):
        hidden, tied = embedding(tokens, with_weight=True)
        (hidden.square().sum() + (2.0 * tied.tensor).sum()).backward()
    expected = torch.full_like(before, 4.0)
    expected[0] += 2 * 2 * before[0]
    expected[3] += 2 * 2 * 2 * before[3]
    assert torch.allclose(_grad(embedding.weight), expected)
    alike = [each for each in gc.get_objects() if isinstance(each, Tensor) and not isinstance(each, DTensor)]
    sizes = {each.untyped_storage()._cdata for each in alike if each.shape == before.shape and not each.requires_grad}
    weights = {_own(embedding).untyped_storage()._cdata, before.untyped_storage()._cdata}
    assert sizes - weights - {expected.untyped_storage()._cdata} == {_grad(embedding.weight).untyped_storage()._cdata}


def test_the_hooks_of_a_parameter_run(layer: ColumnParallelLinear) -> None:
    seen: list[Any] = []
    layer.weight.register_hook(lambda gradient: gradient * 3.0)
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.sum().item()))
    for _ in range(2):
        layer(torch.ones(2, 3, 4)).sum().backward()
    assert _grad(layer.weight).unique().tolist() == [36.0]
    assert len(seen) == 2


def test_uses_of_both_kinds_add_up(mesh: ParallelMesh) -> None:
    parameter: Any = replicated_parameter((4,), mesh.tensor, dtype=torch.float32, device=CPU)
    local_inside(parameter, torch.float32).sum().backward()
    assert parameter.grad.placements == (Partial(),)
    parameter.grad = None
    for _ in range(2):
        local(parameter, torch.float32).sum().backward()
    assert parameter.grad.placements == (Replicate(),)
    assert _grad(parameter).tolist() == [2.0] * 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_is_given_no_distributed_tensors(layer: ColumnParallelLinear) -> None:
    given: list[str] = []

    def look(graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        given.extend(type(node.meta["example_value"]).__name__ for node in graph.graph.find_nodes(op="placeholder"))
        return graph

    compiler = Compiler("eager")
    compiler._compile = look
    CompiledCode(compiler)(layer.forward, torch.ones(2, 3, 4)).sum().backward()
    assert len(given) == 3
    assert not [kind for kind in given if "DTensor" in kind]


def test_no_leaf_is_made_for_generation(layer: ColumnParallelLinear) -> None:
    with torch.inference_mode():
        layer(torch.ones(2, 3, 4))
    layer(torch.ones(2, 3, 4)).sum().backward()
    assert isinstance(layer.weight.grad, DTensor)


def test_a_shallow_copy_gets_its_own_gradient(mesh: ParallelMesh) -> None:
    first = replicated_parameter((3,), mesh.tensor, dtype=torch.float64, device=CPU, value=1.0)
    local(first, torch.float64).sum().backward()
    second = copy.copy(first)
    second.grad = None
    (2.0 * local(second, torch.float64)).sum().backward()
    assert (_grad(first).tolist(), _grad(second).tolist()) == ([1.0] * 3, [2.0] * 3)


def test_a_hook_may_remove_itself(mesh: ParallelMesh) -> None:
    parameter, calls, handles = replicated_parameter((3,), mesh.tensor, dtype=torch.float64, device=CPU), [], {}

    def once(name: str) -> None:
        calls.append(name)
        handles[name].remove()

    for register in (parameter.register_hook, parameter.register_post_accumulate_grad_hook):
        name = register.__name__
        handles[name] = register(lambda _, name=name: once(name))
        register(lambda _: calls.append("stays"))
    local(parameter, torch.float64).sum().backward()
    assert sorted(calls) == ["register_hook", "register_post_accumulate_grad_hook", "stays", "stays"]


def test_a_parameter_that_moves_in_its_storage_is_read_where_it_is(mesh: ParallelMesh) -> None:
    parameter = replicated_parameter((3,), mesh.tensor, dtype=torch.float64, device=CPU)
    rows = torch.arange(6.0, dtype=torch.float64)
    assert isinstance(parameter, DTensor)
    for part in (rows[:3], rows[3:]):
        parameter._local_tensor.data = part
        assert local(parameter, torch.float64).tolist() == part.tolist()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # as above
def test_parameters_without_gradients_have_no_leaves(layer: ColumnParallelLinear) -> None:
    layer.register_parameter("places", nn.Parameter(torch.arange(3), requires_grad=False))
    compiler = Compiler("eager")
    layer.requires_grad_(requires_grad=False)
    assert CompiledCode(compiler)(layer.forward, torch.ones(1, 2, 4, requires_grad=True)).shape == (1, 2, 3)


def test_a_saved_parameter_is_loaded_without_code(layer: ColumnParallelLinear, tmp_path: Any) -> None:
    layer(torch.ones(1, 2, 4)).sum().backward()
    torch.save(vars(layer.weight)["leaves"], tmp_path / "leaves.pt")
    assert not torch.load(tmp_path / "leaves.pt", weights_only=True)
