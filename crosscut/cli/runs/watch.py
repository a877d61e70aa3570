"""`crosscut watch`."""

from pathlib import Path

import click

from crosscut.cli.arguments import file_option
from crosscut.watch.pages import write_page
from crosscut.watch.server import PORT
from crosscut.watch.server import watch as watch_runs


@click.command()
@click.argument("places", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="Port of the page on this machine; 0 chooses a free port.",
)
@file_option(
    "--html",
    help="Write the page to this file instead, with all figures. It opens in a browser without a network.",
)
def watch(places: tuple[str, ...], port: int, html: Path | None) -> None:
    """Show runs in the browser while they train, or later.

    RUN is the folder of a run, a copy of it, a folder that holds runs (new ones appear by themselves), or a pattern
    such as 'runs/*'. The page is served on 127.0.0.1 only, and loads nothing from the network.
    """
    if html is None:
        watch_runs(places, port)
    else:
        write_page(places, html)
