"""Messages of spatial layers: the recorder's list beside the plan's, and the plan beside a count of positions."""

from typing import Any

import pytest
import torch
from torch import nn

from crosscut.config import Layout
from crosscut.parallel import CollectiveRecorder, Sent, make_mesh
from crosscut.parallel.spatial import (
    CutImage,
    Message,
    Span,
    halo_messages,
    make_grid,
    plan_linear_step,
    plan_step,
    scatter_image,
)
from crosscut.parallel.spatial.reaches import Listed, Spread, Window, bins
from tests.parallel.spatial.cases import CHANNELS, overlapped, spatial
from tests.parallel.twins import CPU
from tests.ranks import RankPool

SPANS = {
    "even": (Span.even(12, 2), Span.even(10, 2)),
    "uneven": (Span.of_parts(1, 11), Span.of_parts(7, 3)),
    "empty part": (Span.of_parts(12, 0), Span.of_parts(2, 8)),
}
LAYERS: dict[str, tuple[Any, list[Any]]] = {
    "3 x 3": (nn.Conv2d(CHANNELS, 4, 3, padding=1), [Window(3, 1, 1, 1, 1)] * 2),
    "1 x 1": (nn.Conv2d(CHANNELS, 4, 1), [Window()] * 2),
    "wide": (nn.Conv2d(CHANNELS, 4, 5, 1, 8, 4), [Window(5, 1, 4, 8, 8)] * 2),
    "strided": (nn.Conv2d(CHANNELS, 4, (4, 3), 2, 1), [Window(4, 2, 1, 1, 1), Window(3, 2, 1, 1, 1)]),
    "pooling": (nn.MaxPool2d(2), [Window(2, 2)] * 2),
    "transposed": (nn.ConvTranspose2d(CHANNELS, 4, 2, 2), [Spread(2, 2, 1, 0, 0)] * 2),
    "average": (nn.AdaptiveAvgPool2d(1), [bins(1, 12), bins(1, 10)]),
    "averages of rows": (nn.AdaptiveAvgPool2d((5, 1)), [bins(5, 12), bins(1, 10)]),
}


def _planned(span: Span, reach: Any) -> Any:
    return plan_linear_step(span, reach) if isinstance(reach, Listed) else plan_step(span, reach)


def _messages(overlaps: bool) -> list[tuple[str, list[Sent], list[Message]]]:
    mesh = make_mesh(Layout(context=4), CPU)
    grid = make_grid(mesh, 2, 2)
    found = []
    for name, (layer, reaches) in LAYERS.items():
        for kind, spans in SPANS.items():
            image = scatter_image(torch.randn(2, CHANNELS, 12, 10), grid, spans)
            image = CutImage(image.x.requires_grad_(), spans, grid)
            with overlapped(overlaps), CollectiveRecorder(mesh, grid=grid.axes) as recorder:
                spatial(layer, mesh)(image).x.sum().backward()
            steps = [_planned(span, reach) for span, reach in zip(spans, reaches, strict=True)]
            forward, backward = halo_messages(steps, grid.place, 2 * CHANNELS)
            found.append((f"{name}, {kind}", recorder.sent, forward + backward))
    return found


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_rank_sends_the_messages_of_the_plan_and_no_other(ranks: RankPool, overlaps: bool) -> None:
    of_ranks = ranks.run(4, _messages, overlaps)
    for results in of_ranks:
        for name, sent, planned in results:
            assert sent == [Sent("send", message.axis, message.elements) for message in planned], name
    counts = {name: len(planned) for name, _, planned in of_ranks[0]}
    assert counts["3 x 3, even"] == 4  # one message per direction and neighbour, forward and backward
    assert [counts[f"{name}, even"] for name in ("1 x 1", "pooling", "transposed")] == [0, 1, 0]
    assert halo_messages(_average(), (0, 0), 1).forward == [Message("height", 1, 1)]  # one term, not an image


def _average() -> list[Any]:
    return [plan_linear_step(span, bins(1, span.size)) for span in SPANS["even"]]


def _messages_beside_a_norm() -> list[Sent]:
    mesh = make_mesh(Layout(context=2), CPU)
    grid = make_grid(mesh, 1, 2)
    layers = [spatial(layer, mesh) for layer in (nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2))]
    same = make_grid(mesh, 1, 2)  # its axes have the same groups
    with torch.no_grad(), CollectiveRecorder(mesh, grid=same.axes) as recorder:
        image = scatter_image(torch.randn(1, 2, 8, 8), grid)
        for layer in layers:
            image = layer(image)
    return recorder.sent


def test_messages_of_a_norm_do_not_have_the_name_of_a_direction(ranks: RankPool) -> None:
    assert ranks.run(2, _messages_beside_a_norm) == [[Sent("send", "width", 20), Sent("all_gather", "context", 10)]] * 2


@pytest.mark.parametrize("spans", [Span.even(11, 4), Span.of_parts(1, 0, 7, 3)])
@pytest.mark.parametrize(("kernel", "stride", "dilation", "padding"), [(3, 1, 1, 1), (2, 3, 1, 0), (3, 2, 4, 4)])
def test_a_rank_gets_the_positions_that_its_outputs_read(
    spans: Span, kernel: int, stride: int, dilation: int, padding: int
) -> None:
    step = plan_step(spans, Window(kernel, stride, dilation, padding, padding))
    held = [set(range(*spans.part(rank))) for rank in range(4)]
    for taker in range(4):
        taps = [o * stride - padding + j * dilation for o in range(*step.outputs.part(taker)) for j in range(kernel)]
        read = set(range(min(taps), max(taps) + 1)) if taps else set()
        for giver in range(4):
            assert step.exchange.rows(giver, taker) == len(read & held[giver])
