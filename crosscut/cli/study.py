"""`crosscut study`."""

from pathlib import Path

import click

from crosscut.config import write_whole


@click.group()
def study() -> None:
    """Hold forecasts against what others published."""


@study.command()
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("scaling"),
    show_default=True,
    help="The folder of the report: scaling.md and scaling.html.",
)
def scaling(output: Path) -> None:
    """Write the paper's scaling figures and NVIDIA's for H100s beside the planner's, as Markdown and HTML."""
    from crosscut.planner.study import scaling_study, to_html, to_markdown

    sections = scaling_study()
    output.mkdir(parents=True, exist_ok=True)
    for name, text in (("scaling.md", to_markdown(sections)), ("scaling.html", to_html(sections))):
        write_whole(output / name, text)
        click.echo(output / name)
