"""Section of the plan's page that shows each distinct layer, closed until the reader opens it."""

from base64 import b64encode
from dataclasses import replace
from html import escape

from crosscut.architecture import Device
from crosscut.planner.candidate import Planned
from crosscut.planner.showing.picture import described, picture
from crosscut.planner.showing.reading import shown
from crosscut.planner.showing.shown import Shown, ShownBlock


def section(run: Planned, device: Device) -> str:
    """Return the section as HTML. Each picture is an image, whose style follows the reader's theme."""
    found = shown(run, device=device)
    layers = "\n".join(_layer(found, block) for block in found.blocks)
    words = f"Shapes and messages of the fastest layout without a pipeline ({escape(found.layout)})."
    return (
        '<section aria-labelledby="layers-title">\n<h2 id="layers-title">Layers on their ranks</h2>\n'
        f"<p>{words} Open a layer to see its steps.</p>\n{layers}\n</section>"
    )


def _layer(whole: Shown, block: ShownBlock) -> str:
    alone = replace(whole, blocks=(block,))
    drawn = b64encode(picture(alone).encode()).decode()
    image = f'<img src="data:image/svg+xml;base64,{drawn}" alt="{escape(described(alone))}">'
    return f"<details><summary>{escape(block.title)}</summary>{image}</details>"
