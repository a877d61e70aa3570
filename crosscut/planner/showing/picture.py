"""Picture of a description, as SVG: one step below the other, with lanes for the ranks.

The picture is 520 pixels wide, so that its text of 16 pixels has 11 on a phone that shows 358. A weight is a box, X A
as in the paper: its columns are outputs, and its rows are inputs. The part of the first rank is coloured.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from textwrap import wrap
from xml.sax.saxutils import escape

from crosscut.planner.showing.shown import Shown, ShownBlock, ShownStep, Tensor, steps_inside
from crosscut.planner.showing.words import in_units, of_message, shape_in_words, weights_in_words

_WIDTH, _LINE, _GAP = 520, 21, 16
_LEFT, _RIGHT = 30, 122
"""Edges of the lanes and of the boxes."""
_TEXT = 158
_LETTERS = 38
"""Letters in a line beside the lanes."""
_BOX = 62
_MOST_LANES = 8

_STYLE = """
svg { max-width: 100%; height: auto; --paper: #fffdf9; --ink: #26231e; --soft: #6f695e; --line: #b9b1a2;
  --part: #2f5d57; --other: #e4ded2; --sent: #9a4a12; }
@media (prefers-color-scheme: dark) { svg { --paper: #1e2022; --ink: #e4e0d7; --soft: #a8a398; --line: #62666a;
  --part: #7fb8ae; --other: #33373a; --sent: #eeb07c; } }
text { font: 16px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; fill: var(--ink); }
.title { font-weight: 600; } .soft { fill: var(--soft); } .sent { fill: var(--sent); }
.letter { font-weight: 600; fill: var(--paper); text-anchor: middle; }
.paper { fill: var(--paper); } .part { fill: var(--part); } .other { fill: var(--other); }
.edge { fill: none; stroke: var(--line); } .lane { stroke: var(--line); stroke-width: 2; }
.first { stroke: var(--part); stroke-width: 3; } .dot { fill: var(--line); }
.arrow { stroke: var(--sent); stroke-width: 3; fill: none; }
"""


def picture(shown: Shown, title: str = "") -> str:
    """Draw a description as an SVG, legible on light and dark pages. `title` replaces the model's name."""
    drawing = _Drawing(shown)
    drawing.heading(title or shown.model)
    drawing.write(_setting(shown), "soft")
    for block in shown.blocks:
        drawing.y += _GAP
        drawing.heading(block.title)
        _draw(drawing, block)
    return drawing.svg(title or shown.model, described(shown))


def _setting(shown: Shown) -> str:
    sequences, length = shown.micro_batch
    return (
        f"{shown.layout}; {sequences:,} x {length:,} tokens in {shown.compute}. The part of the first rank is "
        "coloured. Shapes are those of one rank; weights are [outputs, inputs]. ↓ sent forward, ↑ sent backward."
    )


def described(shown: Shown) -> str:
    """Return the messages in words, for readers who do not see the picture."""
    told = []
    for block in shown.blocks:
        for way, messages in (("Forward", [*block.forward]), ("Backward", [*block.backward])):
            sent = "; ".join(f"{message.purpose}: {of_message(message)}" for message in messages) or "nothing"
            told.append(f"{way}, {block.title} sends {sent}.")
    return f"{_setting(shown)} {' '.join(told)}"


def _draw(drawing: "_Drawing", block: ShownBlock) -> None:
    lanes = drawing.num_lanes if drawing.shown.splits_sequence and block.numbers else 1
    for step, inside in steps_inside(block):
        after = drawing.num_lanes if inside or drawing.shown.splits_sequence else 1
        drawing.step(step, lanes, after)
        lanes = after
    again = sum(step.runs_again for step in block.steps)
    repeated = f" {again} of {len(block.steps)} steps run again (↻)." if again else ""
    drawing.write(f"Saved for the backward pass: {in_units(block.saved_bytes)}.{repeated}", "soft")


@dataclass
class _Drawing:
    """Elements of a picture, from its top to `y`."""

    shown: Shown
    y: int = 12
    elements: list[str] = field(default_factory=list)

    @property
    def num_lanes(self) -> int:
        return min(self.shown.tensor, _MOST_LANES)

    def add(self, name: str, text: str = "", **attributes: float | str) -> None:
        """Add an element. An attribute's underscores become hyphens, and `kind` is its class."""
        attributes["class"] = attributes.pop("kind", "")
        written = " ".join(f'{key.replace("_", "-")}="{value}"' for key, value in attributes.items() if value != "")
        self.elements.append(f"<{name} {written}>{escape(text)}</{name}>")

    def write(self, text: str, kind: str, x: int = 14, letters: int = 54) -> None:
        """Write lines of text below `y`."""
        for line in wrap(text.replace(" x ", "\u00a0x\u00a0"), letters, break_on_hyphens=False):
            self.y += _LINE
            self.add("text", line, x=x, y=self.y - 5, kind=kind)

    def heading(self, text: str) -> None:
        """Write a heading."""
        self.write(text, "title", letters=46)

    def step(self, step: ShownStep, before: int, after: int) -> None:
        """Draw a step, with `before` lanes above and `after` lanes below it."""
        top = self.y
        self.y += _GAP // 2
        for text, kind in _lines(step):
            self.write(text, kind, _TEXT, _LETTERS)
        matrix = next((weight for weight in step.weights if len(weight.shape) > 1), None)
        height = _BOX + 2 * _GAP if matrix else 2 * _GAP
        self.y = max(self.y + _GAP // 2, top + height)
        middle = (top + self.y) // 2
        self._lanes(before, top, middle)
        self._lanes(after, middle, self.y)
        if step.action in ("f", "g"):
            self._letter(step, middle)
        elif matrix:
            self._box(matrix, middle - _BOX // 2)
        else:
            for x in _places(max(before, after)):
                self.add("circle", cx=x, cy=middle, r=5, kind="part" if x == _places(max(before, after))[0] else "dot")

    def _lanes(self, number: int, top: int, bottom: int) -> None:
        for index, x in enumerate(_places(number)):
            self.add("line", x1=x, y1=top, x2=x, y2=bottom, kind="lane first" if index == 0 else "lane")

    def _letter(self, step: ShownStep, middle: int) -> None:
        """Draw f or g: a bar over all lanes, with an arrow for each direction in which it sends."""
        self.add("rect", x=_LEFT - 6, y=middle - 4, width=_RIGHT - _LEFT + 12, height=8, rx=4, kind="part")
        self.add("circle", cx=(_LEFT + _RIGHT) // 2, cy=middle, r=14, kind="part")
        self.add("text", step.action, x=(_LEFT + _RIGHT) // 2, y=middle + 5, kind="letter")
        for x, tip, messages in ((_LEFT - 16, 1, step.forward), (_RIGHT + 16, -1, step.backward)):
            start, end = middle - 18 * tip, middle + 18 * tip
            path = f"M{x} {start}V{end}M{x - 6} {end - 7 * tip}L{x} {end}L{x + 6} {end - 7 * tip}"
            if messages:
                self.add("path", d=path, kind="arrow")

    def _box(self, weight: Tensor, top: int) -> None:
        """Draw a weight: columns are outputs. A vocabulary is drawn as rows, and experts as sheets."""
        wide, high = _RIGHT - _LEFT, _BOX
        for offset in (8, 4) if len(weight.shape) > 2 else ():
            self.add("rect", x=_LEFT + offset, y=top - offset, width=wide, height=high, kind="other")
            self.add("rect", x=_LEFT + offset, y=top - offset, width=wide, height=high, kind="edge")
        outputs, inputs = (own / whole for own, whole in zip(weight.shape[-2:], weight.whole[-2:], strict=True))
        across, down = (inputs, outputs) if "vocabulary" in weight.cut else (outputs, inputs)
        self.add("rect", x=_LEFT, y=top, width=wide, height=high, kind="other")
        self.add("rect", x=_LEFT, y=top, width=f"{wide * across:g}", height=f"{high * down:g}", kind="part")
        for i in range(1, min(round(1 / across), 32)):
            self.add("path", d=f"M{_LEFT + wide * across * i:g} {top}v{high}", kind="edge")
        for i in range(1, min(round(1 / down), 32)):
            self.add("path", d=f"M{_LEFT} {top + high * down * i:g}h{wide}", kind="edge")
        self.add("rect", x=_LEFT, y=top, width=wide, height=high, kind="edge")

    def svg(self, title: str, description: str) -> str:
        """Return the whole file."""
        height = self.y + _GAP
        frame = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        begin = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {frame} role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="desc">{escape(description)}</desc>',
            f"<style>{_STYLE}</style>",
            f'<rect width="{_WIDTH}" height="{height}" rx="8" class="paper"/>',
        )
        return "\n".join([*begin, *self.elements, "</svg>", ""])


def _places(number: int) -> list[float]:
    """Horizontal places of lanes."""
    width = (_RIGHT - _LEFT) / number
    return [_LEFT + width * (i + 0.5) for i in range(number)]


def _lines(step: ShownStep) -> Iterator[tuple[str, str]]:
    """Text of a step, with its class."""
    again = " ↻" if step.runs_again else ""
    title = step.name if step.action in ("f", "g") else f"{step.action} {weights_in_words(step)}".rstrip()
    yield f"{title}{again}", "title"
    for weight in step.weights:
        if len(weight.shape) > 1:
            yield shape_in_words(weight), "soft"
    for value in step.gives:
        yield f"→ {value.name}: {shape_in_words(value)}", ""
    for arrow, messages in (("↓", step.forward), ("↑", step.backward), ("↻", step.again)):
        yield from ((f"{arrow} {of_message(message)}", "sent") for message in messages)
        if not messages and step.action in ("f", "g") and arrow != "↻":
            yield f"{arrow} nothing is sent", "soft"
    if step.saves:
        yield f"saves {in_units(sum(tensor.bytes for tensor in step.saves))}", "soft"
