"""Lines for the terminal: step after step with shapes and messages, and then all messages in order."""

from collections.abc import Iterable, Iterator
from textwrap import wrap

from crosscut.planner.messages.collective import Collective
from crosscut.planner.showing.shown import Shown, ShownBlock, ShownStep, Tensor, message_bytes, steps_inside
from crosscut.planner.showing.words import in_units, of_message, shape_in_words, weights_in_words

_WIDTH = 100
_LABEL = 42
"""Columns of a tensor's name, before its shape."""


def lines(shown: Shown) -> Iterator[str]:
    """Yield the lines of a description, of at most 100 columns each."""
    sequences, length = shown.micro_batch
    yield from wrap(shown.model, _WIDTH)
    yield from wrap(
        f"{shown.layout}; micro-batch of {sequences:,} x {length:,} tokens in {shown.compute}. Shapes are those of one "
        "rank: weights are [outputs, inputs], and activations [rows, width] with mostly tokens as rows.",
        _WIDTH,
    )
    yield from wrap(
        "f, g: entry into a parallel region, and exit. │ outside, ┃ inside it. ↓ sent forward, ↑ sent backward, ↻ "
        "computed or sent again in the backward pass.",
        _WIDTH,
    )
    for block in shown.blocks:
        yield from ("", f"── {block.title} ".ljust(_WIDTH, "─"))
        yield from _block(block)
    if shown.others:
        yield from ("", "── once per step, beside the layers ".ljust(_WIDTH, "─"), *_table(shown.others))


def _block(block: ShownBlock) -> Iterator[str]:
    part = ""
    for step, inside in steps_inside(block):
        if step.part != part:
            part = step.part
            yield from ((f"  {part}",) if len({each.part for each in block.steps}) > 1 else ())
        yield from _step(step, "┃" if inside else "│")
    for title, messages in (("forward", [*block.forward]), ("backward", [*block.backward])):
        sent = f"{sum(message.wire_bytes for message in messages):,.0f}"
        yield (
            f"  {title}, in order: in a ring, each rank sends {sent} bytes"
            if messages
            else f"  {title}: nothing is sent"
        )
        yield from _table(messages)
    yield from wrap(_kept(block), _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _kept(block: ShownBlock) -> str:
    again = sum(step.runs_again for step in block.steps)
    repeated = f"Recomputation runs {again} of {len(block.steps)} steps again (↻)." if again else "No step runs again."
    weights = f"{block.weight_elements:,} elements of weights on this rank."
    return f"Saved for the backward pass: {in_units(block.saved_bytes)} per micro-batch. {repeated} {weights}"


def _step(step: ShownStep, line: str) -> Iterator[str]:
    mark = step.action if step.action in ("f", "g") else "●"
    title = step.name if mark != "●" else f"{step.action} {weights_in_words(step)}".rstrip()
    again = " ↻" if step.runs_again else ""
    first, *more = wrap(f"{title}{again}", _WIDTH - 8, break_on_hyphens=False) or [""]
    yield f"  {mark} {first}"
    yield from (f"  {line}   {each}" for each in more)
    for weight in step.weights:
        yield from _tensor(weight, line, "·")
    for value in step.gives:
        yield from _tensor(value, line, "→")
    for arrow, messages in (("↓", step.forward), ("↑", step.backward), ("↻", step.again)):
        yield from (f"  {line}   {arrow} {of_message(message)}" for message in messages)
    if step.saves:
        names = ", ".join(tensor.name for tensor in step.saves)
        told = f"saves {in_units(sum(tensor.bytes for tensor in step.saves))}: {names}"
        yield from (f"  {line}   {each}" for each in wrap(told, _WIDTH - 8, subsequent_indent="  "))


def _tensor(tensor: Tensor, line: str, sign: str) -> Iterator[str]:
    left = f"  {line}   {sign} {tensor.name}"
    room = max(len(left) + 2, _LABEL)
    shapes = wrap(shape_in_words(tensor), max(_WIDTH - room, 30))
    if room + max(map(len, shapes)) > _WIDTH:
        yield left
        left = f"  {line}"
        room = _LABEL
    for shape in shapes:
        yield f"{left.ljust(room)}{shape}"
        left = f"  {line}"


def _table(messages: Iterable[Collective]) -> Iterator[str]:
    rows = [_row(number, message) for number, message in enumerate(messages, 1)]
    if not rows:
        return
    head = ("", "message", "operation", "axis", "elements", "bytes")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    widths[1] = min(widths[1], _WIDTH - 2 * len(head) - sum(widths) + widths[1])
    for number, name, *others in (head, *rows):
        first, *more = wrap(name, widths[1], break_on_hyphens=False)
        cells = (
            number.rjust(widths[0]),
            first.ljust(widths[1]),
            *map(_aligned, others, widths[2:], (False, False, True, True)),
        )
        yield f"  {'  '.join(cells)}".rstrip()
        yield from (f"  {' ' * widths[0]}  {each}" for each in more)


def _aligned(cell: str, width: int, to_the_right: bool) -> str:
    return cell.rjust(width) if to_the_right else cell.ljust(width)


def _row(number: int, message: Collective) -> tuple[str, ...]:
    times = f"{message.count:,} x " if message.count > 1 else ""
    return (
        str(number),
        message.purpose,
        str(message.operation),
        f"{message.axis} ({message.ranks})",
        f"{times}{message.elements:,}",
        f"{message_bytes(message):,}",
    )
