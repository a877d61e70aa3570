"""Dropout of whole values between layers that are cut: all ranks must draw the same numbers there."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from crosscut.cutting.finding.playback import Call, Draw
from crosscut.cutting.finding.search import Cut, is_same, play_rank

_Seen = list[tuple[str, Tensor, bool]]
"""Names of dropout modules, their inputs, and whether each call was between layers by columns and by rows."""


def whole_dropouts(draw: Draw, cuts: Sequence[Cut], size: int) -> list[str]:
    """Names of the dropout modules that run between layers by columns and layers by rows, but get whole values."""
    if not cuts:
        return []
    columns = {call for cut in cuts for call in cut.group.columns}
    rows = {call for cut in cuts for call in cut.group.rows}
    is_open: list[bool] = [False]

    def reply(call: Call) -> Tensor:
        is_open[0] = call in columns or (is_open[0] and call not in rows)
        return draw.outputs[call].clone()

    whole: _Seen = []
    with _seen(draw.subject.module, whole, is_open), torch.no_grad():
        draw.play(reply)
    part: _Seen = []
    values = {read: value for cut in cuts for read, value in cut.integers[size].items()}
    with _seen(draw.subject.module, part, is_open):
        play_rank(draw, cuts, size - 1, size, values, to_end=True)
    found = {
        name: None for (name, x, inside), (_, mine, _) in zip(whole, part, strict=True) if inside and is_same(mine, x)
    }
    return [*found]


@contextmanager
def _seen(module: nn.Module, seen: _Seen, is_open: list[bool]) -> Iterator[None]:
    """Note the inputs of all dropout modules, which are recognised by their class's name and a probability."""
    with ExitStack() as stack:
        for name, each in module.named_modules():
            if "drop" in type(each).__name__.lower() and isinstance(getattr(each, "p", None), float):

                def note(_: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                    seen.append((name, args[0].clone(), is_open[0]))

                stack.callback(each.register_forward_pre_hook(note).remove)
        yield
