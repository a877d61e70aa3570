"""The lists of `crosscut plan --list`: all presets and all devices."""

import dataclasses

import click

from crosscut.config import PRESETS, DataConfig, ModelConfig
from crosscut.config.system.console import figures_table
from crosscut.config.system.terminal import new_console
from crosscut.planner.facts import three_digits
from crosscut.planner.hardware import KNOWN_HARDWARE
from crosscut.planner.parameters import count_active_parameters, count_parameters


def show_lists(context: click.Context, _option: click.Parameter, is_asked: bool) -> None:
    """Print the presets and the devices, and end the command."""
    if not is_asked or context.resilient_parsing:
        return
    presets = figures_table("preset (--model)", "layers", "hidden", "window", "parameters", "for a token")
    for name, fields in PRESETS.items():
        model = ModelConfig(**fields)
        model = model if model.vocab_size else dataclasses.replace(model, vocab_size=DataConfig().vocab_size)
        sizes = (model.num_layers, model.hidden_size, model.max_sequence_length)
        parameters, active = (_counted(count(model)) for count in (count_parameters, count_active_parameters))
        presets.add_row(name, *(f"{size:,}" for size in sizes), parameters, "" if active == parameters else active)
    devices = figures_table("device (--gpu)", "GB", "TB/s", "TFLOP/s", "in")
    for key, device in KNOWN_HARDWARE.items():
        precision, peak = max(
            ((name, rate) for name, rate in device.flops.items() if name != "float8"),
            key=lambda rated: (rated[1], rated[0] == "bfloat16"),
        )
        figures = (device.memory / 1e9, device.memory_bandwidth / 1e12, peak / 1e12)
        devices.add_row(key, *(three_digits(figure) for figure in figures), precision)
    console = new_console(width=100)
    console.print(presets)
    console.print(devices)
    context.exit()


def _counted(parameters: int) -> str:
    """A number of parameters such as 8.31B."""
    unit, name = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{three_digits(parameters / unit)}{name}"
