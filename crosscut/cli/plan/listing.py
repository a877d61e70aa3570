"""The lists of `crosscut plan --list`: all presets and all devices."""

import dataclasses

from rich.text import Text

from crosscut.cli.arguments import echo_json
from crosscut.config import PRESETS, DataConfig, ModelConfig
from crosscut.config.system.console import figures_table
from crosscut.config.system.terminal import new_console
from crosscut.planner.facts import three_digits
from crosscut.planner.hardware import KNOWN_HARDWARE, Hardware
from crosscut.planner.parameters import count_active_parameters, count_parameters


def show_lists(*, as_json: bool) -> None:
    """Print the presets and the devices, as two tables or as JSON."""
    presets = {name: _sizes(ModelConfig(**fields)) for name, fields in PRESETS.items()}
    if as_json:
        echo_json({"presets": presets, "devices": {key: _rates(device) for key, device in KNOWN_HARDWARE.items()}})
        return
    models = figures_table("preset (--model)", "layers", "hidden", "window", "parameters", "for a token")
    for name, sizes in presets.items():
        *counts, parameters, active = sizes.values()
        last = "" if active == parameters else _counted(active)
        models.add_row(name, *(f"{count:,}" for count in counts), _counted(parameters), last)
    devices = figures_table("device (--gpu)", "GB", "TB/s", "TFLOP/s", "in")
    for key, device in KNOWN_HARDWARE.items():
        precision, peak = max(
            ((name, rate) for name, rate in device.flops.items() if name != "float8"),
            key=lambda rated: (rated[1], rated[0] == "bfloat16"),
        )
        figures = (device.memory / 1e9, device.memory_bandwidth / 1e12, peak / 1e12)
        devices.add_row(key, *(three_digits(figure) for figure in figures), precision)
    console = new_console(width=100)
    console.print(models)
    size = DataConfig().vocab_size
    console.print(Text(f"A preset without a vocabulary has that of its tokenizer; {size:,} entries are counted.\n"))
    console.print(devices)


def _sizes(model: ModelConfig) -> dict[str, int]:
    """Sizes of a preset. A preset without a vocabulary gets that of a trained tokenizer."""
    model = model if model.vocab_size else dataclasses.replace(model, vocab_size=DataConfig().vocab_size)
    return {
        "layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "max_sequence_length": model.max_sequence_length,
        "parameters": count_parameters(model),
        "parameters_for_a_token": count_active_parameters(model),
    }


def _rates(device: Hardware) -> dict[str, object]:
    """Memory of a device in bytes, its bandwidth in bytes per second, and its peak rates by precision in FLOP/s."""
    return {
        "memory": device.memory,
        "memory_bandwidth": device.memory_bandwidth,
        "flops": dict(device.flops),
    }


def _counted(parameters: int) -> str:
    """A number of parameters such as 8.31B."""
    unit, name = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f"{three_digits(parameters / unit)}{name}"
