"""`crosscut checkpoint`: inspect, verify, compare, repair and export checkpoints."""

import dataclasses
import sys

import click

from crosscut.cli.arguments import adapter_option, echo_json, last_weights_option
from crosscut.config import ConfigError
from crosscut.config.system.terminal import echo

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}

_WHERE = "PLACE is a run's folder, the folder or URL of a run's checkpoints, or a single checkpoint."

_as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


@click.group()
def checkpoint() -> None:
    """Inspect, verify, compare, repair and export checkpoints."""


@checkpoint.command(
    help=f"Show the step, layout, tensors and settings of a checkpoint.\n\n{_WHERE} If there are several "
    "checkpoints, the newest is shown."
)
@click.argument("place")
@_as_json
def inspect(place: str, as_json: bool) -> None:
    """Show the step, layout, tensors and settings of a checkpoint."""
    from crosscut.checkpoint.maintenance.inspection import checkpoints_at, describe

    facts = describe(checkpoints_at(place)[-1])
    if as_json:
        echo_json(facts)
        return
    from crosscut.cli.tables import show_checkpoint

    show_checkpoint(facts)


@checkpoint.command(
    help=f"Check all files against their stored hashes; exit 1 on damage.\n\n{_WHERE} All checkpoints at PLACE are "
    "checked."
)
@click.argument("place")
@_as_json
def verify(place: str, as_json: bool) -> None:
    """Check all files of one checkpoint, or of all checkpoints of a run, against their stored hashes."""
    from crosscut.checkpoint.maintenance.inspection import checkpoints_at
    from crosscut.checkpoint.maintenance.inspection import verify as verify_one

    verdicts = [verify_one(folder, progress=not as_json) for folder in checkpoints_at(place)]
    if as_json:
        echo_json([dataclasses.asdict(verdict) for verdict in verdicts])
    else:
        for verdict in verdicts:
            rate = f"{verdict.num_bytes / 1e6:,.1f} MB, {verdict.num_bytes / 1e6 / verdict.seconds:,.0f} MB/s"
            echo(f"{'damaged' if verdict.damage else 'good   '}  {verdict.folder}" + f"  {rate}" * (not verdict.damage))
            for line in verdict.damage:
                echo(f"  {line}")
    sys.exit(any(verdict.damage for verdict in verdicts))


@checkpoint.command(
    help="Compare two checkpoints; exit 1 if they differ.\n\nFIRST and SECOND are two runs' folders (the newest "
    "checkpoints are compared) or two checkpoints. The layouts of the two checkpoints may differ."
)
@click.argument("first")
@click.argument("second")
@_as_json
def diff(first: str, second: str, as_json: bool) -> None:
    """Compare two checkpoints."""
    from crosscut.checkpoint.maintenance.comparison import compare
    from crosscut.checkpoint.maintenance.inspection import checkpoints_at
    from crosscut.cli.tables import counting, show_comparison

    with counting("compare", shown=not as_json) as advance:
        result = compare(checkpoints_at(first)[-1], checkpoints_at(second)[-1], advance=advance)
    if as_json:
        echo_json({"same": result.same, **dataclasses.asdict(result)})
    else:
        show_comparison(result)
    sys.exit(not result.same)


@checkpoint.command(
    help="Export a checkpoint as a Hugging Face folder.\n\nPLACE is a run's folder (its newest undamaged checkpoint is "
    "exported) or a single checkpoint. With --adapter, PLACE may also be a Hugging Face folder. OUT is the folder to "
    "write, which must be new or empty. The run's own adapters are merged into the weights."
)
@click.argument("place")
@click.argument("out")
@click.option(
    "--max-file-size", default="5GB", show_default=True, help="Maximum size of a tensor file, such as 500MB or 5GB."
)
@last_weights_option
@adapter_option
@_as_json
def export(place: str, out: str, max_file_size: str, last_weights: bool, adapter: str, as_json: bool) -> None:
    """Export a checkpoint as a Hugging Face folder."""
    max_file_bytes = _bytes_of(max_file_size)
    from crosscut.cli.tables import counting
    from crosscut.pretrained import export_checkpoint, find_model

    with counting("export", shown=not as_json) as advance:
        source = find_model(place, last_weights=last_weights, adapter=adapter)
        done = export_checkpoint(source, out, max_file_bytes=max_file_bytes, advance=advance)
    if as_json:
        echo_json(dataclasses.asdict(done))
        return
    averaged = ", averaged weights" if done.is_averaged else ""
    files = f"{len(done.files)} file" + "s" * (len(done.files) > 1)
    echo(f"{done.folder}: {done.num_tensors} tensors, {done.num_bytes / 1e6:,.1f} MB in {files}{averaged}")


@checkpoint.command(
    help="Export the adapters of a run in PEFT's format.\n\nPLACE is the folder of a run that trained adapters "
    "(`model.lora_rank`), or a single checkpoint. For a run, the newest undamaged checkpoint is exported. OUT is the "
    "folder to write, which must be new or empty."
)
@click.argument("place")
@click.argument("out")
@click.option("--base", default="", help="Name or folder of the base model, to record in PEFT's config.")
@last_weights_option
def adapter(place: str, out: str, base: str, last_weights: bool) -> None:
    """Export the adapters of a run."""
    from crosscut.pretrained import export_adapter, find_model

    names = export_adapter(find_model(place, last_weights=last_weights), out, base=base)
    echo(f"{out}: adapters of {len(names)} matrices")


def _bytes_of(size: str) -> int:
    """Number of bytes in a size such as `500MB`. Raises `ConfigError` for any other notation."""
    number, unit = size[:-2], _UNITS.get(size[-2:].upper())
    if unit is None or not number.isdigit() or int(number) == 0:
        raise ConfigError(
            f"`--max-file-size` must be a size such as 500MB or 5GB, but is {size!r}. Write a whole number above 0, "
            "followed by KB, MB or GB."
        )
    return int(number) * unit


@checkpoint.command()
@click.argument("place")
@click.option("--dry-run", is_flag=True, help="Only print the repairs; change nothing.")
@_as_json
def repair(place: str, dry_run: bool, as_json: bool) -> None:
    """Repair the checkpoints of a run. The run must not be training.

    The command deletes half-written checkpoints of a stopped run, moves damaged checkpoints aside without deleting
    them, and rebuilds a damaged manifest if every tensor still passes its checksum.

    PLACE is a run's folder, or the folder or URL of a run's checkpoints.
    """
    from crosscut.checkpoint.maintenance.inspection import folder_to_repair
    from crosscut.checkpoint.maintenance.repair import repair as repair_folder
    from crosscut.checkpoint.storage import LocalFolder
    from crosscut.config.system.folder_lock import require_unused

    root = folder_to_repair(place)
    if isinstance(root, LocalFolder) and not dry_run:
        for folder in (root.path, root.path.parent):  # a run locks its folder and `checkpoint.folder`
            require_unused(folder)
    actions = repair_folder(root, dry_run=dry_run)
    if as_json:
        echo_json([dataclasses.asdict(action) for action in actions])
        return
    for action in actions:
        echo(f"{'would ' if dry_run else ''}{action.done}  {action.folder}\n  {action.why}")
    if not actions:
        echo("Nothing to repair.")
