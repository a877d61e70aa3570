"""A network on images that ranks share: training beside one rank, images that are divided anew, and refusals."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from crosscut.config import Layout, LayoutError
from crosscut.parallel import ParallelMesh, global_gradient_norm, make_mesh, make_reducer, shard_model
from crosscut.parallel.spatial import (
    CutImage,
    Span,
    SpatialAdaptiveAvgPool,
    SpatialAdaptiveMaxPool,
    SpatialAvgPool,
    SpatialBatchNorm,
    SpatialConv1d,
    SpatialConv2d,
    SpatialConvTranspose1d,
    SpatialMaxPool,
    SpatialUpsample,
    convolution,
    gather_image,
    make_grid,
    move_image,
    pointwise,
    pooling,
    resizing,
    scatter_image,
    windows,
)
from tests.parallel.spatial.cases import part_of, spatial
from tests.parallel.twins import CLOSE, CPU
from tests.ranks import RankPool
from tests.refusals import refusal

SHAPE = (4, 3, 13, 11)
STEPS = 2


def _layers() -> nn.ModuleDict:
    torch.manual_seed(5)
    layers = {
        "first": nn.Conv2d(3, 4, 3, padding="same"),
        "batch": nn.BatchNorm2d(4),
        "pool": nn.MaxPool2d(3, 2, 1),
        "second": nn.Conv2d(4, 8, 3, 2, 1, bias=False),
        "group": nn.GroupNorm(2, 8),
        "up": nn.ConvTranspose2d(8, 4, 5, 4, 2, 2),
        "resize": nn.Upsample(SHAPE[2:], mode="bilinear"),
        "last": nn.Conv2d(8, 2, 1),
    }
    return nn.ModuleDict(layers).double()


class _Net(nn.Module):
    """A small U-Net, on whole images or on images that ranks share."""

    def __init__(self, layers: nn.ModuleDict, apply: Callable[..., Any], align: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.layers, self.apply_each, self.align = layers, apply, align

    def forward(self, x: Any) -> Any:
        layers, apply = self.layers, self.apply_each
        wide = apply(F.relu, layers["batch"](layers["first"](x)))
        deep = apply(F.relu, layers["group"](layers["second"](layers["pool"](wide))))
        up = self.align(layers["resize"](layers["up"](deep)), wide)
        return layers["last"](apply(lambda a, b: torch.cat((a, b), 1), wide, up))


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    x, target = (torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, target[:, :2]


def _trained(layout: Layout, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Job of a rank: train the network, and return what differs if a gradient or a statistic is wrong."""
    mesh = make_mesh(layout, CPU)
    grid = make_grid(mesh, *sizes)
    layers = nn.ModuleDict({name: spatial(layer, mesh) for name, layer in _layers().items()})
    net = _Net(layers, pointwise, lambda a, b: move_image(a, b.spans))
    shard_model(net, mesh, units=[layers["first"], layers["second"]], always_used=True)
    reducer = make_reducer(net, mesh)
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    share = slice(mesh.data.rank, None, mesh.data.size)
    x, target = (each[share] for each in _data())
    norms = []

    for _ in range(STEPS):
        optimizer.zero_grad()
        reducer.begin()
        y = net(scatter_image(x, grid))
        reducer.arm()
        ((y.x - part_of(target, y.spans, grid)).square().sum() / target.numel() / mesh.data.size).backward()
        reducer.finish()
        norms.append(global_gradient_norm(parameters))
        optimizer.step()
    weights = {name: parameter.full_tensor().detach() for name, parameter in layers.named_parameters()}
    net.eval()
    with torch.no_grad():
        y = gather_image(net(scatter_image(x, grid)))
    return {**weights, **dict(layers.named_buffers()), "norms": norms, "y": y}


def _expected() -> dict[str, Any]:
    layers, (x, target), norms = _layers(), _data(), []
    net = _Net(layers, lambda function, *images: function(*images), lambda a, _: a)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ((net(x) - target).square().sum() / target.numel()).backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in layers.parameters() if p.grad is not None]))
        optimizer.step()
    net.eval()
    weights = {name: parameter.detach() for name, parameter in layers.named_parameters()}
    return {**weights, **dict(layers.named_buffers()), "norms": norms, "y": net(x).detach()}


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (Layout(data=2, context=2), (1, 2)),
        pytest.param(Layout(context=4), (2, 2), marks=pytest.mark.slow),  # random layers are compared on this grid
        pytest.param(Layout(context=4, sharding="zero2"), (1, 4), marks=pytest.mark.slow),
        pytest.param(Layout(data=2, context=2, sharding="zero3"), (2, 1), marks=pytest.mark.slow),
        pytest.param(Layout(context=2, tensor=2), (2, 1), marks=pytest.mark.slow),
        pytest.param(Layout(context=4), (4, 1), marks=pytest.mark.slow),
    ],
)
def test_a_network_learns_as_on_one_rank(ranks: RankPool, layout: Layout, sizes: tuple[int, ...]) -> None:
    of_ranks, expected = ranks.run(4, _trained, layout, sizes), _expected()
    for rank, found in enumerate(of_ranks):
        data_rank = rank // (4 // layout.data)
        y = expected["y"][data_rank :: layout.data]
        torch.testing.assert_close(found, {**expected, "y": y}, **CLOSE)


def _moved() -> list[bool]:
    mesh = make_mesh(Layout(context=4), CPU)
    grid = make_grid(mesh, 4)
    x = torch.arange(20.0).view(1, 2, 10)
    image = scatter_image(x, grid, [Span.of_parts(0, 7, 1, 2)])
    image = CutImage(image.x.requires_grad_(), image.spans, grid)
    moved = move_image(image, [Span.of_parts(5, 0, 5, 0)])
    whole = gather_image(moved)
    (whole * x * (grid.ranks.rank + 1)).sum().backward()
    expected = 10 * part_of(x, image.spans, grid)  # 1 + 2 + 3 + 4 times
    parts = torch.equal(moved.x, part_of(x, moved.spans, grid))
    return [parts, torch.equal(whole, x), torch.equal(image.x.grad, expected)]


def test_images_are_divided_anew_and_gathered_with_the_gradients_of_all_ranks(ranks: RankPool) -> None:
    assert ranks.run(4, _moved) == [[True] * 3] * 4


def _resized_narrowly() -> list[float]:
    """Differences of changes of size from PyTorch's, in an image of float32 under autocast to bfloat16."""
    grid = make_grid(make_mesh(Layout(context=2), CPU), 1, 2)
    x = torch.randn(2, 3, 8, 8)
    differences = []
    for layer in (nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((3, 5)), nn.Upsample(scale_factor=2, mode="bilinear")):
        spatial_layer = {nn.Upsample: SpatialUpsample}.get(type(layer), SpatialAdaptiveAvgPool)(layer)
        with torch.autocast("cpu", torch.bfloat16):
            y = spatial_layer(scatter_image(x, grid))
        differences.append(float((gather_image(y) - layer(x)).abs().max()))
    return differences


def test_changes_of_size_are_not_rounded_under_autocast(ranks: RankPool) -> None:
    assert max(map(max, ranks.run(2, _resized_narrowly))) < 1e-6


def _copies(size: int) -> int:
    """Number of copies of its inputs that a convolution makes."""
    mesh, copies = make_mesh(Layout(context=2), CPU), []
    image = scatter_image(torch.randn(1, 2, size, size), make_grid(mesh, 1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "copy_windows", lambda *a, **o: copies.append(a) or windows.copy_windows(*a, **o))
        SpatialConv2d(nn.Conv2d(2, 2, 3, padding=1), mesh=mesh)(image)
    return len(copies)


def test_large_parts_are_not_copied(ranks: RankPool) -> None:
    assert [ranks.run(2, _copies, size) for size in (16, 18)] == [[1, 1], [0, 0]]


def _kept(is_changed: bool) -> list[bool]:
    """Whether each layer's copy of its inputs is in memory until the backward pass, which then runs."""
    mesh = make_mesh(Layout(context=2), CPU)
    grid = make_grid(mesh, 1, 2)
    copies = []

    def copied(image: CutImage, *arguments: Any, **options: Any) -> windows.Windows:
        found = windows.copy_windows(image, *arguments, **options)
        copies.append(weakref.ref(found.x))
        return found

    image = scatter_image(torch.randn(1, 2, 8, 8, requires_grad=True), grid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "copy_windows", copied)
        patch.setattr(pooling, "copy_windows", copied)
        y = SpatialConv2d(nn.Conv2d(2, 2, 3, padding=1), mesh=mesh)(image)
        y = SpatialMaxPool(nn.MaxPool2d(3, 1, 1))(y)
    kept = [copy() is not None for copy in copies]
    if is_changed:
        image.x.detach().add_(1.0)
    y.x.sum().backward()
    return kept


def test_halos_are_saved_for_the_backward_pass_and_not_the_part_once_more(ranks: RankPool) -> None:
    assert ranks.run(2, _kept, False) == [[False, False]] * 2


def test_an_image_that_is_changed_before_the_backward_pass_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RuntimeError, match="An image must not be changed in place before the backward pass"):
        ranks.run(2, _kept, True)


def _evaluated_first() -> list[Tensor]:
    grid = make_grid(make_mesh(Layout(context=2), CPU), 1, 2)
    x = torch.randn(1, 2, 6, 6, requires_grad=True)
    upsample, pool = nn.Upsample((9, 9), mode="bilinear"), nn.AdaptiveAvgPool2d(4)
    for layer in (SpatialUpsample(upsample), SpatialAdaptiveAvgPool(pool)):
        resizing._matrix.cache_clear()
        with torch.inference_mode():
            layer(scatter_image(x, grid))
        gather_image(layer(scatter_image(x * x, grid))).sum().backward()
    return [x.grad]


def test_layers_that_were_evaluated_first_can_be_trained(ranks: RankPool) -> None:
    assert all(grad.isfinite().all() for grads in ranks.run(2, _evaluated_first) for grad in grads)


def _averages() -> list[tuple[Tensor, Tensor]]:
    grid = make_grid(make_mesh(Layout(context=2), CPU), 1, 2)
    found = []
    for dtype, layer in ((torch.float16, nn.AvgPool2d(8)), (torch.bfloat16, nn.AvgPool2d(19, 19, 2))):
        x = torch.full((1, 1, 16, 16), 1500.0, dtype=dtype)
        found.append((gather_image(SpatialAvgPool(layer)(scatter_image(x, grid))), layer(x)))
    return found


def test_averages_of_narrow_types_neither_overflow_nor_round_counts(ranks: RankPool) -> None:
    for found in ranks.run(2, _averages):
        for average, expected in found:
            torch.testing.assert_close(average, expected, rtol=0.0, atol=0.0)


def _checkpointed() -> tuple[int, Tensor, Tensor]:
    """Number of results of six layers in memory until the backward pass, and the gradient with and without this."""
    mesh = make_mesh(Layout(context=2), CPU)
    grid = make_grid(mesh, 1, 2)
    torch.manual_seed(7)
    layers = [SpatialConv2d(nn.Conv2d(2, 2, 3, padding=1).double(), mesh=mesh) for _ in range(6)]
    x = torch.randn(1, 2, 8, 8, dtype=torch.float64, requires_grad=True)
    results: list[StorageWeakRef] = []

    def apply(x: Tensor) -> Tensor:
        image = scatter_image(x, grid)
        for layer in layers:
            image = layer(image)
            results.append(StorageWeakRef(image.x.untyped_storage()))
        return image.x

    y = checkpoint(apply, x, use_reentrant=False)
    kept = sum(not result.expired() for result in results)
    (recomputed,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(apply(x).sum(), x)
    return kept, recomputed, expected


def test_recomputed_layers_keep_only_the_last_result(ranks: RankPool) -> None:
    for kept, recomputed, expected in ranks.run(2, _checkpointed):
        assert kept == 1
        torch.testing.assert_close(recomputed, expected)


def _copied_states() -> list[list[bool]]:
    mesh = make_mesh(Layout(context=2), CPU)
    frozen = [layer.requires_grad_(False).eval() for layer in (nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))]
    layers = [spatial(layer, mesh) for layer in (nn.Conv2d(2, 2, 1), *frozen)]
    return [[layer.training, *(p.requires_grad for p in layer.parameters())] for layer in layers]


def test_layers_stay_frozen_and_in_evaluation(ranks: RankPool) -> None:
    assert ranks.run(2, _copied_states) == [[[True] * 3, [False] * 3, [False] * 3]] * 2


class _Standardised(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


def _refused(mesh: ParallelMesh) -> dict[str, str]:
    grid = make_grid(mesh, 1, 2)

    def text(call: Callable[..., object], *arguments: object, **options: object) -> str:
        return refusal(LayoutError, call, *arguments, **options)

    def image(*sizes: int) -> CutImage:
        return scatter_image(torch.zeros(1, 2, *sizes), grid)

    def conv(kernel: int, padding: int, mode: str) -> SpatialConv2d:
        return SpatialConv2d(nn.Conv2d(2, 2, kernel, padding=padding, padding_mode=mode), mesh=mesh)

    return {
        "directions": text(make_grid, mesh, 1, 1, 1, 2),
        "product": text(make_grid, mesh, 2, 2),
        "shape": text(scatter_image, torch.zeros(1, 2, 3), grid),
        "span": text(scatter_image, torch.zeros(1, 2, 3, 4), grid, [Span.even(3, 1), Span.even(5, 2)]),
        "empty": text(image, 3, 0),
        "spans": text(pointwise, torch.add, image(3, 4), image(3, 6)),
        "small": text(conv(5, 0, "zeros"), image(5, 4)),
        "reflect": text(conv(3, 4, "reflect"), image(5, 4)),
        "circular": text(conv(3, 5, "circular"), image(5, 4)),
        "kind": text(SpatialConv1d, nn.Conv2d(2, 2, 1), mesh=mesh),
        "own": text(SpatialConv2d, _Standardised(2, 2, 1), mesh=mesh),
        "parametrised": text(SpatialConv2d, nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 2, 1)), mesh=mesh),
        "hooks": text(SpatialConv2d, nn.utils.spectral_norm(nn.Conv2d(2, 2, 1)), mesh=mesh),
        "pool": text(SpatialAvgPool, nn.MaxPool2d(2)),
        "upsample": text(SpatialUpsample, nn.Identity()),
        "indices": text(SpatialMaxPool, nn.MaxPool2d(2, return_indices=True)),
        "conv 1d": text(SpatialConv1d(nn.Conv1d(2, 2, 1), mesh=mesh), image(5, 4)),
        "transposed 1d": text(SpatialConvTranspose1d(nn.ConvTranspose1d(2, 2, 1), mesh=mesh), image(5, 4)),
        "norm 1d": text(SpatialBatchNorm(nn.BatchNorm1d(2), mesh=mesh), image(5, 4)),
        "max 1d": text(SpatialMaxPool(nn.MaxPool1d(2)), image(5, 4)),
        "mean 3d": text(SpatialAvgPool(nn.AvgPool3d(2)), image(5, 4)),
        "adaptive max 1d": text(SpatialAdaptiveMaxPool(nn.AdaptiveMaxPool1d(2)), image(5, 4)),
        "adaptive mean 1d": text(SpatialAdaptiveAvgPool(nn.AdaptiveAvgPool1d(2)), image(5, 4)),
        "mode": text(SpatialUpsample(nn.Upsample(8, mode="linear")), image(5, 4)),
        "sizes": text(SpatialUpsample(nn.Upsample((8,))), image(5, 4)),
        "scattered": text(scatter_image, torch.zeros(1, 2, 3, 4), grid, [Span.even(3, 1)]),
        "moved": text(move_image, image(5, 4), [Span.even(5, 1)]),
        "positions": text(pointwise, lambda x: x[:, :, 1:], image(3, 4)),
        "half": text(SpatialMaxPool(nn.MaxPool2d(2, padding=2)), image(5, 4)),
    }


def _refusals() -> dict[str, str]:
    return _refused(make_mesh(Layout(context=2), CPU))


REFUSALS = {
    "directions": "A grid must have one to three sizes, one for each direction of an image, but has 4.",
    "product": "The sizes of a grid must multiply to `layout.context` (2), but are 2 x 2 = 4.",
    "shape": "Images on this grid must have 2 directions after batch and channels, but have the shape (1, 2, 3).",
    "span": "The span along width must divide at least one position, here 4, into 2 parts, but has the "
    "bounds (0, 2, 5).",
    "empty": "The span along width must divide at least one position, here 0, into 2 parts, but has the "
    "bounds (0, 0, 0).",
    "spans": "Images must have the same spans to be combined, but have [(0, 3), (0, 2, 4)] and [(0, 3), (0, 3, 6)].",
    "small": "An image must be as large as the window of a layer, but has only 4 positions for Window(kernel=5",
    "reflect": 'Padding with `padding_mode` "reflect" must be at most 3 for an image of 4 positions, but is 4.',
    "circular": 'Padding with `padding_mode` "circular" must be at most 4 for an image of 4 positions, but is 5.',
    "kind": "The layer must have the type `nn.Conv1d`, but has the type `Conv2d`.",
    "own": "The layer must compute what `nn.Conv2d` computes, but `_Standardised` has its own `_conv_forward`.",
    "parametrised": "The layer must compute what `nn.Conv2d` computes, but `ParametrizedConv2d` is parametrised.",
    "hooks": "The layer must compute what `nn.Conv2d` computes, but `Conv2d` has hooks.",
    "pool": "The layer must have the type `nn.AvgPool1d` or `nn.AvgPool2d` or `nn.AvgPool3d`, but has the "
    "type `MaxPool2d`.",
    "upsample": "The layer must have the type `nn.Upsample`, but has the type `Identity`.",
    "indices": "`return_indices` of pooling must be false for images that ranks share, but is true.",
    "conv 1d": "`nn.Conv1d` must have 2 directions, as the grid of the image has, but has 1.",
    "transposed 1d": "`nn.ConvTranspose1d` must have 2 directions, as the grid of the image has, but has 1.",
    "norm 1d": "`nn.BatchNorm1d` must have 2 directions, as the grid of the image has, but has 1.",
    "max 1d": "`nn.MaxPool1d` must have 2 directions, as the grid of the image has, but has 1.",
    "mean 3d": "`nn.AvgPool3d` must have 2 directions, as the grid of the image has, but has 3.",
    "adaptive max 1d": "`nn.AdaptiveMaxPool1d` must have 2 directions, as the grid of the image has, but has 1.",
    "adaptive mean 1d": "`nn.AdaptiveAvgPool1d` must have 2 directions, as the grid of the image has, but has 1.",
    "mode": '`mode` "linear" must have 2 directions, as the grid of the image has, but has 1.',
    "sizes": "The option (8,) of a layer must have 2 directions, as the grid of the image has, but has 1.",
    "scattered": "`spans` must have 2 directions, as the grid of the image has, but has 1.",
    "moved": "`spans` must have 2 directions, as the grid of the image has, but has 1.",
    "positions": "A function of `pointwise` must keep the positions of each part, but changes the shape (1, 2, 3, 2) "
    "to (1, 2, 2, 2).",
    "half": "`padding` of pooling must be at most half of `kernel_size` (2), but is 2.",
}


def test_what_is_impossible_is_refused_by_name(ranks: RankPool) -> None:
    for texts in ranks.run(2, _refusals):
        assert {name: text[: len(REFUSALS[name])] for name, text in texts.items()} == REFUSALS
