"""A linear layer's products: of few tokens; in 8 bits, near the exact ones and the same however a matrix is cut."""

from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from crosscut.config import Layout
from crosscut.kernels import FLOAT8, ORDINARY, onednn
from crosscut.kernels.products import FEW, _cast, add_product
from crosscut.parallel import ColumnParallelLinear, Multiplication, RowParallelLinear, make_mesh, normal_
from crosscut.parallel.fused import multiply_inside
from crosscut.parallel.linear import ReplicatedLinear
from tests.ranks import RankPool

CPU = torch.device("cpu")
B, S, IN, OUT = 2, 24, 64, 96


def _factors(dtype: torch.dtype, num_tokens: int = S) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((B, num_tokens, IN), (OUT, IN), (OUT,), (B, num_tokens, OUT))
    x, weight, bias, grad = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    return x, 0.02 * weight, bias, 1e-6 * grad


def _distance(actual: Tensor, expected: Tensor) -> float:
    """The size of the difference relative to that of the expected."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("num_tokens", [S, 5], ids=["a multiple", "filled up"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float8_products_are_near_the_exact_ones(dtype: torch.dtype, num_tokens: int) -> None:
    x, weight, bias, grad = _factors(dtype, num_tokens)
    exact = [t.double() for t in (x, weight, bias, grad)]
    y = FLOAT8.output(x, weight, bias)
    assert y.dtype == dtype
    # Rounding to 3 bits of mantissa errs by 2^-4 at most and 2^-5.3 on average of squares; of two factors, 0.037.
    assert _distance(y, ORDINARY.output(*exact[:3])) < 0.045
    assert _distance(FLOAT8.output(x, weight), exact[0] @ exact[1].t()) < 0.045
    # The gradient has 2 bits: 2^-4.3 and 2^-5.3 together, 0.057.
    assert _distance(FLOAT8.input_gradient(grad, weight), exact[3] @ exact[1]) < 0.07
    expected = ORDINARY.weight_gradient(exact[3], exact[0])
    assert _distance(FLOAT8.weight_gradient(grad, x), expected) < 0.07
    assert _distance(FLOAT8.output(x, weight, bias), ORDINARY.output(*exact[:3])) > 0.005, "nothing was cast"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("largest", [1e-9, 0.3, 448.0, 449.0, 7e4, 1e30])
def test_the_largest_element_fits_and_scales_are_powers_of_two(dtype: torch.dtype, largest: float) -> None:
    x = torch.tensor([largest, -largest / 3, 0.0])
    cast, back = _cast(x, dtype)
    assert cast.float().isfinite().all()
    assert torch.frexp(back).mantissa.item() == 0.5
    assert cast[0].float().abs().item() >= torch.finfo(dtype).max / 2.2
    torch.testing.assert_close(cast.float() * back, x, rtol=0.13, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_scales_are_exact_where_the_largest_element_becomes_the_largest_number(dtype: torch.dtype) -> None:
    """Trap: an approximate logarithm or a rounded largest element gives twice or half the scale here."""
    most = torch.finfo(dtype).max
    for power in range(-30, 31):
        x = torch.tensor([most * 2.0**power])
        above = torch.nextafter(x, x + x)
        assert [part.item() for part in _cast(x, dtype)] == [most, 2.0**power]
        assert _cast(above, dtype)[1].item() == 2.0 ** (power + 1)


def test_zeros_stay_zeros_and_what_is_not_finite_stays_so() -> None:
    weight = torch.ones(OUT, IN)
    assert not FLOAT8.output(torch.zeros(16, IN), weight).any()
    for value in (float("nan"), float("inf")):
        x = torch.ones(16, IN)
        x[3, 5] = value
        assert not FLOAT8.output(x, weight).isfinite().all()


def _in_8_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements of `x` after a cast to 8 bits and back, in float64, by the formula of torchao's recipe."""
    scale = torch.exp2((torch.finfo(dtype).max / x.double().abs().max()).log2().floor())
    return (x.double() * scale).to(dtype).double() / scale


@pytest.mark.parametrize("num_tokens", [S, 5], ids=["a multiple", "filled up"])
def test_float8_products_are_those_of_a_plain_emulation(num_tokens: int) -> None:
    x, weight, bias, grad = _factors(torch.float32, num_tokens)
    x8, weight8 = (_in_8_bits(factor, torch.float8_e4m3fn) for factor in (x, weight))
    grad8 = _in_8_bits(grad, torch.float8_e5m2)
    assert _distance(FLOAT8.output(x, weight, bias), x8 @ weight8.t() + bias.double()) < 1e-6
    assert _distance(FLOAT8.input_gradient(grad, weight), grad8 @ weight8) < 1e-6
    assert _distance(FLOAT8.weight_gradient(grad, x), grad8.flatten(0, 1).t() @ x8.flatten(0, 1)) < 1e-6


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what the compiler does inside is not ours to mend
def test_compiled_code_reads_each_tensor_once_for_its_largest_element() -> None:
    """Trap: a cast of a transpose, or of a tensor for each of its products, has another largest element for PyTorch."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return make_boxed_func(graph)

    def two_layers(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return multiply_inside(multiply_inside(x, first, FLOAT8).square(), second, FLOAT8)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    x, weight, _, _ = _factors(torch.float32)
    inputs = [factor.requires_grad_() for factor in (x, weight, weight.t().contiguous())]
    results = []
    for function in (two_layers, torch.compile(two_layers, backend=backend, fullgraph=True)):
        y = function(*inputs)
        results.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    assert all(map(torch.equal, *results))
    targets = [[node.target for node in graph.graph.nodes] for graph in graphs]
    largest = [found.count(torch.ops.aten.abs.default) for found in targets]
    assert largest == [4, 2], "two inputs and two weights; two gradients"


def _through_layers(layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Output, input gradient and the first weight's gradient of a column- and a row-parallel layer in 8 bits."""
    mesh = make_mesh(layout, CPU)
    first = ColumnParallelLinear(IN, OUT, mesh=mesh, how=Multiplication(FLOAT8))
    second = RowParallelLinear(OUT, IN, mesh=mesh, how=Multiplication(FLOAT8))
    model = torch.nn.Sequential(first, second)
    for name, parameter in model.named_parameters():
        normal_(parameter, std=0.1, seed=1, name=name)
    sizes = torch.linspace(0.1, 3.0, OUT)  # the parts have largest elements of their own
    with torch.no_grad():
        first.weight.to_local().mul_(sizes.chunk(mesh.tensor.size)[mesh.tensor.rank].unsqueeze(1))
    x = torch.randn(B, S, IN, generator=torch.Generator().manual_seed(2))
    x = (x.chunk(mesh.tensor.size, 1)[mesh.tensor.rank] if mesh.sequence_parallel else x).requires_grad_()
    y = model(x)
    (y * torch.linspace(-1.0, 1.0, IN)).sum().backward()
    return y.detach(), x.grad, first.weight.grad.full_tensor()


def _gradients_of_bfloat16_inputs() -> list[tuple[Tensor, Tensor]]:
    """The gradients of float32 weights of three kinds of layers with inputs in bfloat16, each beside its emulation."""
    mesh, (x, _, _, grad) = make_mesh(Layout(), CPU), _factors(torch.bfloat16)
    columns = ColumnParallelLinear(IN, OUT, mesh=mesh, how=Multiplication(FLOAT8))
    others = (kind(IN, OUT, mesh=mesh, how=Multiplication(FLOAT8)) for kind in (RowParallelLinear, ReplicatedLinear))
    factors = _in_8_bits(grad, torch.float8_e5m2), _in_8_bits(x, torch.float8_e4m3fn)
    expected = ORDINARY.weight_gradient(*factors)
    for layer in (layers := (columns, *others)):
        layer(x).backward(grad)
    columns.inside(x).backward(grad)
    gradients = [layer.weight.grad.to_local() for layer in layers]
    return [*zip(gradients, (2 * expected, expected, expected), strict=True)]


def test_gradients_of_weights_leave_float8_products_in_the_weights_type(ranks: RankPool) -> None:
    for gradient, expected in ranks.run(1, _gradients_of_bfloat16_inputs)[0]:
        assert _distance(gradient, expected) < 1e-6, "rounded to bfloat16"


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(tensor=2, sequence_parallel=True)], ids=str)
def test_cut_matrices_are_rounded_as_whole_ones(ranks: RankPool, layout: Layout) -> None:
    expected = ranks.run(1, _through_layers, Layout())[0]
    for rank, result in enumerate(ranks.run(2, _through_layers, layout)):
        for actual, whole in zip(result, expected, strict=True):
            part = whole if actual.shape == whole.shape else whole.chunk(2, 1)[rank]
            assert _distance(actual, part) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("exponent", [8, 16])
def test_parts_of_other_sizes_are_rounded_as_the_whole_where_that_has_normal_numbers(
    dtype: torch.dtype, exponent: int
) -> None:
    _, weight, _, _ = _factors(torch.float32)
    parts = weight[: OUT // 2], weight[OUT // 2 :] * 2.0**-exponent
    weight = torch.cat(parts)
    cast, back = _cast(weight, dtype)
    whole = cast.float() * back
    own = torch.cat([part.float() * scale for part, scale in (_cast(part, dtype) for part in parts)])
    limits = torch.finfo(dtype)
    normal = weight.abs() >= limits.smallest_normal * back
    assert torch.equal(own[normal], whole[normal])
    largest = weight.abs().max()
    assert limits.smallest_normal * back <= largest * (2.0**-13 if dtype == torch.float8_e4m3fn else 2.0**-28)
    lost = (whole - weight)[~normal].abs()
    assert (lost <= largest * (2.0**-17 if dtype == torch.float8_e4m3fn else 2.0**-31)).all()
    if dtype == torch.float8_e4m3fn and exponent == 16:
        assert not normal[OUT // 2 :].any()
        assert _distance(whole[OUT // 2 :], parts[1]) > 0.1
        assert _distance(own[OUT // 2 :], parts[1]) < 0.035


def test_products_with_a_part_of_small_elements_are_near_the_exact_ones_where_the_whole_is_not() -> None:
    x, weight, _, _ = _factors(torch.float32)
    parts = weight[: OUT // 2], weight[OUT // 2 :] * 2.0**-16
    together = FLOAT8.output(x, torch.cat(parts)).chunk(2, -1)
    for part, whole, is_small in zip(parts, together, (False, True), strict=True):
        exact = x.double() @ part.double().t()
        alone = FLOAT8.output(x, part)
        assert _distance(alone, exact) < 0.045
        assert _distance(alone, whole) > 0.1 if is_small else torch.equal(alone, whole)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, FEW.stop - 1, FEW.stop])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_outputs", [40, 41])  # rows that can be cut into blocks, and such that cannot
@pytest.mark.parametrize("has_onednn", [False, True])
def test_products_of_a_few_tokens_are_those_of_many(num_tokens, has_bias, num_outputs, has_onednn, monkeypatch):
    monkeypatch.setattr(onednn, "IS_THERE", has_onednn and onednn.IS_THERE)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((num_tokens, 1, 23), (num_outputs, 23)))
    bias = torch.randn(num_outputs, generator=generator) if has_bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for tokens in (x, x.permute(2, 1, 0).contiguous().permute(2, 1, 0)):  # the second one's columns lie apart
        with torch.no_grad():
            found = ORDINARY.output(tokens, weight, bias)
        assert found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_without_onednn_nothing_asks_for_it(monkeypatch):
    monkeypatch.setattr(onednn, "IS_THERE", False)
    monkeypatch.setattr(onednn, "linear", None)
    with torch.no_grad():
        for num_tokens in FEW:
            assert ORDINARY.output(torch.ones(num_tokens, 4), torch.ones(3, 4)).eq(4).all()


class _OnGpu(TorchDispatchMode):
    """Notes the operators of fake CUDA tensors. PyTorch without CUDA has no product with a float32 result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, object]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func.name(), kwargs.get("beta", 1)))
        return kwargs["out"] if "out" in kwargs else func(*args, **kwargs)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_adds_narrow_products_to_a_float32_sum_in_one_kernel(dtype: torch.dtype, is_first: bool) -> None:
    with FakeTensorMode():
        a, b = (torch.empty(size, dtype=dtype, device="cuda") for size in ((S, OUT), (S, IN)))
        total = torch.empty(OUT, IN, device="cuda")
        with _OnGpu() as seen:
            add_product(total, a.t(), b, is_first=is_first)
    assert [call for call in seen.calls if "mm" in call[0]] == [("aten::addmm.dtype_out", 0 if is_first else 1)]
    assert all("mm" in name or name.startswith(("aten::t", "prim::")) for name, _ in seen.calls), seen.calls


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_sum_of_narrow_products_is_rounded_to_float32_only(dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    factors = [
        [torch.randn(size, generator=generator, device="cuda").to(dtype) for size in ((256, OUT), (256, IN))]
        for _ in range(3)
    ]
    total = torch.full((OUT, IN), torch.nan, device="cuda")
    for i, (a, b) in enumerate(factors):
        add_product(total, a.t(), b, is_first=i == 0)
    assert _distance(total, sum(a.double().t() @ b.double() for a, b in factors)) < 1e-5
