"""The page, with a server or as one file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from crosscut.config import ConfigError
from crosscut.config.pages.inlined import inline_page
from crosscut.config.system.files import write_whole
from crosscut.watch.found import Runs

PAGE = Path(__file__).parent / "page"


def live_page() -> str:
    """Return the page that asks its server for the runs."""
    return inline_page(PAGE / "watch.html", {"frozen": None}, connects=True)


def frozen_page(runs: Runs) -> str:
    """Return a page that contains all that is known of the runs now."""
    found = runs.refresh()
    for run in found:
        run.source.refresh()
    told = {run.id: run.tell("") for run in found}
    words = f"as of {time.strftime('%Y-%m-%d %H:%M')}"
    frozen = {**runs.listed(), "told": told, "words": words}
    return inline_page(PAGE / "watch.html", {"frozen": frozen})


def write_page(places: Sequence[str], path: Path) -> None:
    """Write the page of the runs at some places as one file. Raises `ConfigError` if there is no run."""
    runs = Runs(places)
    runs.require_any()
    if not runs.refresh():
        raise ConfigError(f"`{places[0]}` must be the folder of a run or hold runs, but does not. Name a run's folder.")
    write_whole(path, frozen_page(runs))
