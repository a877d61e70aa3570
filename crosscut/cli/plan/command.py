"""`crosscut plan`."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from crosscut.cli.arguments import has_file, require_file, run_arguments
from crosscut.config import PRESETS, ConfigError, RunConfig, load_run, write_toml, write_whole
from crosscut.config.checks import listed

if TYPE_CHECKING:
    from crosscut.planner.search import Plans

_SCALES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_MOST = 1e18
"""Upper limit of tokens, and of the price of an hour, so that no product of the two is infinite."""
_ALONE = {
    "calibrate": ("which plans nothing", {"calibrate"}),
    "dry_run": (
        "which is a step of one rank of the run's layout or of `--layout`",
        {"dry_run", "arguments", "model", "gpu", "layout", "rank", "as_json"},
    ),
}
"""Options that ask for something other than a plan: what each asks for, and the options that it can be given with."""
_OF_A_DRY_RUN = {"layout": "a plan tries every one", "rank": "a plan is of all ranks"}


@click.command()
@run_arguments
@click.option("--model", metavar="NAME", help="A preset, or the end of one's name such as 8.3B, in place of RUN.toml.")
@click.option("--gpus", type=int, help="How many devices.  [default: the run's ranks, or 1]")
@click.option("--gpu", metavar="NAME|FILE", help="Such as h100-sxm or v100-32gb-dgx2h, or a .toml file of one.")
@click.option("--tokens", metavar="300B", help="Tell days, and with --price money, for so many tokens.")
@click.option("--price", type=float, help="Of one device for an hour, in any currency.")
@click.option("--top", type=click.IntRange(min=1), default=8, show_default=True, help="Layouts to show.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, rejected layouts too.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with figures to play with.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the best layout's run, for crosscut train.")
@click.option(
    "--calibrate",
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="Measure this machine's device in under a minute and write a file that --gpu takes.",
)
@click.option("--dry-run", is_flag=True, help="Do the real step of one rank, without its memory, and count it.")
@click.option("--layout", metavar="tensor=8,data=64", help="With --dry-run: the layout, in place of the run's.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="With --dry-run: which one.")
def plan(
    arguments: tuple[str, ...],
    model: str | None,
    gpus: int | None,
    gpu: str | None,
    tokens: str | None,
    price: float | None,
    top: int,
    as_json: bool,
    html: Path | None,
    write: Path | None,
    calibrate: Path | None,
    dry_run: bool,
    layout: str | None,
    rank: int,
) -> None:
    """Say what a model costs before it runs: which layouts fit, how fast each is, which to take.

    Takes a run's file or a preset (--model 8.3B), and the device and number of them; any key can be set after it, such
    as training.batch_size=1024. Every layout that the model and the batch allow is forecast, with each recomputation
    that is worth a look and each micro-batch, whatever the run has of them: bytes of a rank, what it sends, the time of
    a step. docs/planner.md has the formulas and how far they were off.
    """
    _require_used(click.get_current_context())
    for option, path in (("--html", html), ("--write", write), ("--calibrate", calibrate)):
        if path is not None:
            require_file(option, path)
    if calibrate is not None:
        _calibrate(calibrate)
    elif dry_run:
        _dry_run(arguments, model, gpu, layout=layout, rank=rank, as_json=as_json)
    elif price is not None and tokens is None:
        raise ConfigError(f"`--price` must come with `--tokens`, since it is for so many, but is {price:g} without.")
    elif price is not None and not 0 <= price <= _MOST:
        raise ConfigError(f"`--price` must be at least 0 and at most {_MOST:g}, but is {price:g}.")
    else:
        budget = None if tokens is None else _number(tokens)
        plans = _search(arguments, model, gpu, gpus)
        if html is not None:
            _write_page(plans, html)
        if write is not None:
            _write(plans, write, budget)
        _show(plans, arguments, top=top, tokens=budget, price=price, as_json=as_json)


def _require_used(context: click.Context) -> None:
    """Raise `ConfigError` where something is given that would be ignored."""
    given = {
        parameter.name: parameter.opts[0] if isinstance(parameter, click.Option) else "RUN.toml"
        for parameter in context.command.params
        if parameter.name and context.get_parameter_source(parameter.name) is not ParameterSource.DEFAULT
    }
    mode = next((mode for mode in _ALONE if mode in given), "")
    for name, option in given.items():
        value = _told(context.params[name])
        if mode and name not in _ALONE[mode][1]:
            raise ConfigError(f"`{option}` must be left out with `{given[mode]}`, {_ALONE[mode][0]}, but is {value}.")
        if not mode and (why := _OF_A_DRY_RUN.get(name)):
            raise ConfigError(f"`{option}` must come with `--dry-run`, since {why}, but is {value} alone.")


def _told(value: object) -> str:
    if value is True:
        return "given"
    return " ".join(value) if isinstance(value, tuple) else str(value)


def _dry_run(
    arguments: tuple[str, ...], model: str | None, gpu: str | None, *, layout: str | None, rank: int, as_json: bool
) -> None:
    from crosscut.cli.plan.dry_run import show_dry_run
    from crosscut.planner.hardware import named_hardware
    from crosscut.planner.search import require_device

    device = None if gpu is None else named_hardware(gpu)
    run = _run(arguments, model)
    if device is not None:
        require_device(run, device)
        run = run.settled(device.fast_precision)
    on_cpu = run.training.device == "cpu" if device is None else device.device == "cpu"
    show_dry_run(run, layout=layout, rank=rank, on_cpu=on_cpu, as_json=as_json)


def _search(arguments: tuple[str, ...], model: str | None, gpu: str | None, gpus: int | None) -> "Plans":
    from crosscut.planner.hardware import KNOWN_HARDWARE, named_hardware
    from crosscut.planner.search import search_layouts

    if gpu is None:
        known = listed(f"`{key}`" for key in KNOWN_HARDWARE)
        raise ConfigError(f"`--gpu` must name the device to plan for, but is missing. Known are {known}.")
    hardware = named_hardware(gpu)
    run = _run(arguments, model)
    return search_layouts(run, hardware, run.layout.world_size if gpus is None else gpus)


def _show(
    plans: "Plans", arguments: tuple[str, ...], *, top: int, tokens: float | None, price: float | None, as_json: bool
) -> None:
    if as_json:
        from crosscut.planner.report import to_json

        click.echo(json.dumps(to_json(plans, top=top, tokens=tokens, price=price), indent=2))
    else:
        from crosscut.cli.plan.table import show_plans

        show_plans(plans, top=top, tokens=tokens, price=price, arguments=arguments)


def _write_page(plans: "Plans", path: Path) -> None:
    from crosscut.planner.paper.figures import page

    write_whole(path, page(plans))


def _run(arguments: tuple[str, ...], model: str | None) -> RunConfig:
    """The run to plan: a file's, or a preset's."""
    if has_file(arguments) == (model is not None):
        both = "both are" if has_file(arguments) else "neither is"
        raise ConfigError(f"There must be a model to plan, either RUN.toml or `--model`, but {both} given.")
    if has_file(arguments):
        return load_run(Path(arguments[0]), arguments[1:])
    preset = PRESETS[_preset(str(model))]
    length = min(1024, preset.get("max_sequence_length", 1024))
    table: dict[str, Any] = {"model": dict(preset), "training": {"sequence_length": length, "steps": 300_000}}
    return load_run(table, arguments)


def _preset(name: str) -> str:
    wanted = name.lower()
    found = [preset for preset in PRESETS if preset == wanted] or [
        preset for preset in PRESETS if preset.endswith(f"-{wanted}")
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"`--model` must name one preset, but {name!r} is the end of {listed(found)}.")
    import difflib

    ends = {preset.partition("-")[2]: preset for preset in reversed(PRESETS)} | {preset: preset for preset in PRESETS}
    close = difflib.get_close_matches(wanted, ends, n=1, cutoff=0.5)
    hint = (
        f"The nearest is `{ends[close[0]]}`." if close else f"Known are {listed(f'`{preset}`' for preset in PRESETS)}."
    )
    raise ConfigError(f"`--model` must name a preset, but is `{name}`. {hint}")


def _number(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([KMBT]?)", text.strip(), re.IGNORECASE)
    number = 0.0 if match is None else float(match[1]) * _SCALES[match[2].upper()]
    if not number:
        raise ConfigError(f"`--tokens` must be a number above 0 such as 300B or 1.5T, but is `{text}`.")
    if number > _MOST:
        raise ConfigError(f"`--tokens` must be at most {_MOST:g}, but is `{text}`. Try 300B or 1.5T.")
    return number


def _write(plans: "Plans", path: Path, tokens: float | None) -> None:
    """The best layout as a run, of as many steps as the tokens take."""
    from dataclasses import replace

    if not plans.fitting:
        raise ConfigError(f"`--write` must have a layout that fits, but none does: {plans.leanest[0].reason}.")
    run = plans.fitting[0].run(plans.asked)
    if tokens is not None:
        steps = max(1, round(tokens / (run.training.batch_size * run.training.sequence_length)))
        warmup = min(run.optimizer.warmup_steps, steps // 10)
        run = replace(
            run,
            training=replace(run.training, steps=steps),
            optimizer=replace(run.optimizer, warmup_steps=warmup),
        )
    write_toml(run, path)


def _calibrate(path: Path) -> None:
    from crosscut.calibration import calibrate

    hardware = calibrate(path)
    click.echo(f"{hardware} is measured: crosscut plan --gpu {path}")
