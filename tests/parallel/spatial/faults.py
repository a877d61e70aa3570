"""Faults of spatial layers, as others have made them, and cases that must find them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crosscut.config import Layout
from crosscut.parallel import make_mesh
from crosscut.parallel.exchange import Range
from crosscut.parallel.exchange import operators as exchange
from crosscut.parallel.spatial import (
    Span,
    convolution,
    make_grid,
    norm,
    overlap,
    plan,
    pooling,
    reaches,
    resizing,
    windows,
)
from tests.parallel.spatial.cases import CHANNELS, Case, differences, overlapped
from tests.parallel.twins import CPU

Patch = pytest.MonkeyPatch
SIZES = (2, 2)
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(CHANNELS, 4, 3, padding=1),
    "strided convolution": lambda: nn.Conv2d(CHANNELS, 4, (4, 3), (2, 3), 2, dilation=2),
    "reflected padding": lambda: nn.Conv2d(CHANNELS, 4, 3, padding=2, padding_mode="reflect"),
    "transposed convolution": lambda: nn.ConvTranspose2d(CHANNELS, 4, 3, 2, 1),
    "maxima": lambda: nn.MaxPool2d(3, 2, 1),
    "averages": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "adaptive maxima": lambda: nn.AdaptiveMaxPool2d(4),
    "average of the image": lambda: nn.AdaptiveAvgPool2d(1),
    "interpolation": lambda: nn.Upsample(scale_factor=1.5, mode="bilinear"),
    "batch norm": lambda: nn.BatchNorm2d(CHANNELS),
    "group norm": lambda: nn.GroupNorm(2, CHANNELS),
}


def case(name: str) -> Case:
    """A layer on an image of negative numbers, whose parts are not equal."""
    torch.manual_seed(3)
    x = torch.randn(2, CHANNELS, 9, 8, dtype=torch.float64) - 3.0
    return Case(LAYERS[name]().double(), x, (Span.of_parts(5, 4), Span.of_parts(2, 6)))


def no_halos(patch: Patch) -> None:
    """Zeros in place of all that other ranks send."""
    _scaled_from_others(patch, 0.0)


def _scaled_from_others(patch: Patch, factor: float) -> None:
    arrived = exchange._Exchange._arrived

    def scaled(self: Any, outgoing: Any) -> Any:
        of_ranks = enumerate(arrived(self, outgoing))
        return [each if rank == self.axis.rank else [factor * piece for piece in each] for rank, each in of_ranks]

    patch.setattr(exchange._Exchange, "_arrived", scaled)


def halo_gradients_dropped(patch: Patch) -> None:
    """Gradients of fetched positions that their ranks do not add."""
    _on_the_way_back(patch, 0.0)


def _halo_gradients_twice(patch: Patch) -> None:
    _on_the_way_back(patch, 2.0)


def _on_the_way_back(patch: Patch, factor: float) -> None:
    add = exchange._Exchange.add_given

    def added(self: Any, outgoing: Any, total: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as inner:
            _scaled_from_others(inner, factor)
            return add(self, outgoing, total)

    patch.setattr(exchange._Exchange, "add_given", added)


def _wrong_side(patch: Patch) -> None:
    reads = reaches.Window.reads

    def shifted(self: Any, outputs: Range) -> Range:
        return Range(*(bound + 1 for bound in reads(self, outputs)))

    patch.setattr(reaches.Window, "reads", shifted)


def _lost_corners(patch: Patch) -> None:
    copy = windows.copy_windows

    def copied(image: Any, *arguments: Any, **options: Any) -> Any:
        found = copy(image, *arguments, **options)
        outside = torch.ones_like(found.x)
        for i, (read, span) in enumerate(zip(found.reads, image.spans, strict=True)):
            part = span.part(image.grid.place[i])
            positions = torch.arange(*read)
            shape = [-1 if dim == i + 2 else 1 for dim in range(4)]
            outside = outside * ((positions < part.start) | (positions >= part.stop)).view(shape)
        return replace(found, x=found.x.masked_fill(outside.bool(), 0.0))

    patch.setattr(convolution, "copy_windows", copied)


def _halo_terms_dropped(patch: Patch) -> None:
    patch.setattr(overlap.OwnWindows, "with_halos", lambda self, y, _: y)


def _halo_terms_beside_their_outputs(patch: Patch) -> None:
    readers = reaches.Window.readers

    def shifted(self: Any, inputs: Range, outputs: Range) -> Range:
        found = readers(self, inputs, outputs)
        return Range(found.start - 1, found.stop - 1) if found.start > outputs.start else found

    patch.setattr(reaches.Window, "readers", shifted)


def _halo_terms_without_gradient(patch: Patch) -> None:
    def without(ctx: Any, grad: Tensor) -> Any:
        return grad, 0.0 * grad.narrow(*ctx.place), None, None

    patch.setattr(overlap._Added, "backward", staticmethod(without))


def _maxima_padded_with_zeros(patch: Patch) -> None:
    copy = windows.copy_windows
    patch.setattr(pooling, "copy_windows", lambda image, reaches, **_: copy(image, reaches))


def _counts_of_a_part(patch: Patch) -> None:
    counts = pooling.SpatialAvgPool._counts

    def of_part(self: Any, reach: Any, outputs: Range, size: int, *, device: Any) -> Tensor:
        return counts(self, reach, Range(0, outputs.size), size, device=device)

    patch.setattr(pooling.SpatialAvgPool, "_counts", of_part)


def _bins_rounded_down(patch: Patch) -> None:
    def rounded(num: int, size: int) -> reaches.Listed:
        return reaches.Listed(tuple(Range(o * size // num, (o + 1) * size // num) for o in range(num)))

    patch.setattr(pooling, "bins", rounded)


def _norm_of_a_part(patch: Patch) -> None:
    gathered = norm._gathered
    patch.setattr(norm, "_gathered", lambda x, rule: gathered(x, rule._replace(axis=rule.axis.alone("part"))))


def _mean_of_means(patch: Patch) -> None:
    gather = norm.all_gather

    def unweighted(x: Tensor, axis: Any, dim: int) -> Tensor:
        of_ranks = gather(x, axis, dim).view(axis.size, -1)
        counts = of_ranks[:, -1:].mean().expand(axis.size, 1)
        return torch.cat((of_ranks[:, :-1], counts), 1).flatten()

    patch.setattr(norm, "all_gather", unweighted)


def _mean_of_variances(patch: Patch) -> None:
    gathered = norm._gathered

    def within(x: Tensor, rule: Any) -> Any:
        found = gathered(x, rule)
        dims = (0, *range(2, x.dim()))
        own = (x - x.mean(dims, keepdim=True)).square().sum(dims)
        return found._replace(squares=norm.all_reduce(own, rule.axis))

    patch.setattr(norm, "_gathered", within)


def _norm_gradient_of_a_part(patch: Patch) -> None:
    patch.setattr(norm, "all_reduce", lambda x, axis: x * axis.size)


def _weights_of_one_rank(patch: Patch) -> None:
    own = convolution.local

    def of_first(parameter: Tensor, dtype: Any) -> Tensor:
        part = own(parameter, dtype)
        return part if torch.distributed.get_rank() == 0 else part.detach() + 0.0 * part

    patch.setattr(convolution, "local", of_first)


def _reflection_not_reversed(patch: Patch) -> None:
    padded = windows._padded
    patch.setattr(
        windows,
        "_padded",
        lambda x, dim, want, mode, fill: padded(x, dim, want, "circular" if mode == "reflect" else mode, fill),
    )


def _outputs_not_cropped(patch: Patch) -> None:
    result = windows.Windows.result
    patch.setattr(windows.Windows, "result", lambda self, y, _firsts=None: result(self, y))


def _interpolation_of_a_part(patch: Patch) -> None:
    planned = resizing.plan_linear_step

    def shifted(*arguments: Any) -> Any:
        step = planned(*arguments)
        return step._replace(reads=tuple(Range(0, read.size) for read in step.reads))

    patch.setattr(resizing, "plan_linear_step", shifted)


def _gradient_of_own_terms(patch: Patch) -> None:
    fetch = exchange._Exchange.fetch

    def own_only(self: Any, grad: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as inner:
            no_halos(inner)
            return fetch(self, grad)

    patch.setattr(exchange._Exchange, "fetch", own_only)


FAULTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "no halos": (no_halos, "convolution"),
    "halo of the wrong side": (_wrong_side, "strided convolution"),
    "corners lost": (_lost_corners, "convolution"),
    "gradients of halos dropped": (halo_gradients_dropped, "convolution"),
    "gradients of halos counted twice": (_halo_gradients_twice, "convolution"),
    "maxima padded with zeros": (_maxima_padded_with_zeros, "maxima"),
    "averages that count the positions of a part": (_counts_of_a_part, "averages"),
    "bins rounded down": (_bins_rounded_down, "adaptive maxima"),
    "average of a part": (no_halos, "average of the image"),
    "average whose gradient is of a part": (_gradient_of_own_terms, "average of the image"),
    "norm of a part": (_norm_of_a_part, "batch norm"),
    "group norm of a part": (_norm_of_a_part, "group norm"),
    "mean of means of unequal parts": (_mean_of_means, "batch norm"),
    "mean of variances": (_mean_of_variances, "group norm"),
    "norm whose gradient is of a part": (_norm_gradient_of_a_part, "batch norm"),
    "weights with the gradient of one rank": (_weights_of_one_rank, "convolution"),
    "reflection that is not reversed": (_reflection_not_reversed, "reflected padding"),
    "outputs of neighbours kept": (_outputs_not_cropped, "transposed convolution"),
    "interpolation that begins at the part": (_interpolation_of_a_part, "interpolation"),
}
OF_OVERLAP: dict[str, tuple[Callable[[Patch], None], str]] = {
    "no late halos": (no_halos, "convolution"),
    "gradients of late halos dropped": (halo_gradients_dropped, "convolution"),
    "gradients of late halos counted twice": (_halo_gradients_twice, "strided convolution"),
    "late halos that no output reads": (_halo_terms_dropped, "convolution"),
    "terms of halos added to other outputs": (_halo_terms_beside_their_outputs, "convolution"),
    "terms of halos without a gradient": (_halo_terms_without_gradient, "convolution"),
}
"""Faults of convolutions that overlap with their messages."""


@contextmanager
def planted(plant: Callable[[Patch], None]) -> Iterator[None]:
    """Plant a fault, with an empty cache of plans."""
    plan.plan_step.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        yield
    plan.plan_step.cache_clear()


def find() -> tuple[dict[str, float], dict[str, float]]:
    """Job of a rank: the largest difference of each case without a fault, and with each fault."""
    mesh = make_mesh(Layout(context=4), CPU)
    grid = make_grid(mesh, *SIZES)
    sound = {name: max(value for _, value in differences(case(name), mesh, grid)) for name in LAYERS}
    found = {}
    for fault, (plant, name) in {**FAULTS, **OF_OVERLAP}.items():
        with planted(plant), overlapped(fault in OF_OVERLAP):
            found[fault] = max(value for _, value in differences(case(name), mesh, grid))
    return sound, found
