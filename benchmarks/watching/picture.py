"""Draw `docs/watch.png`: train five small runs, and take a picture of their page in Chromium.

python benchmarks/watching/picture.py                 # trains for a quarter of an hour on two cores
python benchmarks/watching/picture.py --runs FOLDER   # runs that are trained already
"""

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.commands import ROOT, command_line, run_crosscut, work_folder

SETTINGS = (
    "data.text=builtin:state-of-the-union", "data.vocab_size=2048", "model.num_layers=3", "model.hidden_size=96",
    "model.num_heads=4", "model.max_sequence_length=128", "training.sequence_length=128", "training.batch_size=8",
    "training.steps=700", "training.validate_every=100", "checkpoint.every=200", "output.sample_every=100",
    "optimizer.warmup_steps=50", "training.device=cpu",
)  # fmt: skip
RUNS = {
    "baseline": (),
    "adamw": ("optimizer.matrices=adamw",),
    "experts": (
        'model.layers=["attention relu2", "attention experts"]',
        "model.num_layers=4",
        "model.experts.number=8",
    ),
    "narrower": ("model.hidden_size=48",),
    "wider": ("model.hidden_size=160",),
}
"""Settings of each run, besides `SETTINGS`."""
SIZE = {"width": 1280, "height": 860}


def train(runs: Path) -> None:
    """Train all runs, with shared tokens."""
    for name, settings in RUNS.items():
        places = (f"data.tokens={runs.parent / 'tokens'}", f"output.folder={runs / name}")
        run_crosscut("train", *SETTINGS, *places, *settings)


def arrange(page: Any) -> None:
    """Show the losses over the tokens, with the figures at one place."""
    page.locator("#runs .name", has_text="baseline").click()
    page.locator("#controls label", has_text="Tokens").click()
    page.get_by_label("smoothing").press("ArrowLeft")
    page.locator("#controls label", has_text="log y").click()
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + 0.35 * box["width"], box["y"] + 0.2 * box["height"])
    page.wait_for_timeout(500)


def take(runs: Path, path: Path) -> None:
    """Serve the runs, and write a picture of their page."""
    from playwright.sync_api import sync_playwright

    from crosscut.watch.found import Runs
    from crosscut.watch.server import WatchServer

    server = WatchServer(Runs([str(runs)]), 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    program = os.environ.get("CROSSCUT_BROWSER") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.locator(".u-over").first.wait_for()
        arrange(page)
        page.screenshot(path=path)
        browser.close()
    server.shutdown()
    _in_few_colours(path)


def _in_few_colours(path: Path) -> None:
    from PIL import Image

    Image.open(path).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """Run the program."""
    parser = command_line(__doc__)
    parser.add_argument("--runs", type=Path, help="folder of runs to show, instead of training")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "watch.png", help="file to write")
    options = parser.parse_args()
    if options.runs is not None:
        take(options.runs, options.output)
        return
    with work_folder(None) as folder:
        train(folder / "runs")
        take(folder / "runs", options.output)


if __name__ == "__main__":
    main()
