"""`crosscut plan --dry-run`."""

import json
from dataclasses import replace

import click

from crosscut.config import RunConfig, load_layout


def show_dry_run(run: RunConfig, *, layout: str | None, rank: int, on_cpu: bool, as_json: bool) -> None:
    """Do a step of one rank without memory and print what it holds, computes and sends, beside the formulas."""
    from crosscut.rehearsal import print_rehearsal, rehearse, to_json

    if layout is not None:
        run = replace(run, layout=load_layout(layout))
    rehearsal = rehearse(run, rank=rank, device="cpu" if on_cpu else "cuda")
    if as_json:
        click.echo(json.dumps(to_json(rehearsal), indent=2))
    else:
        print_rehearsal(rehearsal)
