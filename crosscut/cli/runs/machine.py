"""Report of `crosscut doctor` about this machine: what it has, what a run would use, and what is missing."""

import platform
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.text import Text

import crosscut
from crosscut.config.system.console import facts_panel
from crosscut.config.system.extras import EXTRAS, install_command, missing_packages
from crosscut.config.system.machine import available_cores, available_memory, processor_name
from crosscut.config.system.terminal import new_console, typed_command


def show_machine() -> None:
    """Print what this machine has, what a run would use, and the command for every extra that is missing."""
    console = new_console(width=100)
    console.print(facts_panel("this machine", [*_machine(), *_device()]))
    console.print(facts_panel("extras", _extras()))
    console.print(
        f"next  {typed_command()} doctor --attach RUN explains what every rank of a run is doing", markup=False
    )


def _machine() -> Iterator[tuple[str, str]]:
    """Facts that need no torch."""
    yield "crosscut", f"{crosscut.__version__}, {Path(crosscut.__file__).parent}"
    yield "python", platform.python_version()
    yield "processor", f"{processor_name()}, {available_cores()} cores"
    yield "memory", f"{available_memory() / 1e9:.0f} GB"
    with suppress(OSError):  # the folder is gone
        yield "disk", f"{shutil.disk_usage(Path.cwd()).free / 1e9:,.0f} GB free in this folder"


def _device() -> Iterator[tuple[str, str]]:
    """The devices that ranks would use, and what the planner and the compiler make of them."""
    import torch

    from crosscut.checkpoint.in_memory import free_bytes, memory_root
    from crosscut.launch.processes import choose_device
    from crosscut.planner.hardware import find_hardware
    from crosscut.training.speed.compilation import reason_against_compiler

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield "torch", f"{torch.__version__} ({built})"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    for name in dict.fromkeys(names):
        known = find_hardware(name)
        command = f"{typed_command()} plan"
        plan = f"{command} --gpu {known.key}" if known else f"{command} --calibrate gpu.toml measures it"
        yield "GPU", f"{names.count(name)} x {name}; {plan}"
    if not names:
        yield "GPU", "none is found" + ("" if torch.version.cuda else "; docs/install.md installs torch with CUDA")
    device = choose_device("auto")
    backend = "nccl" if device.type == "cuda" else "gloo"
    yield "a run uses", f"{device.type}, with {backend} between ranks"
    if len(names) > 1:
        yield "ranks", f"up to {len(names)} on this machine, such as layout.tensor={len(names)}"
    elif not names:
        yield "ranks", "any number that memory holds; they share the cores, so one is the fastest"
    reason = reason_against_compiler(device)
    if (shared := memory_root()).is_dir():
        yield str(shared), f"{free_bytes(shared) / 1e9:.1f} GB free for checkpoint.in_memory"
    yield "training.compile", f"off, because {reason}" if reason else "works"


def _extras() -> Iterator[tuple[str, str | Text]]:
    """Each extra, and the command that installs what it lacks."""
    for extra, purpose in EXTRAS.items():
        missing = missing_packages(extra)
        if missing:
            yield extra, Text(f"{purpose}: {', '.join(missing)} missing; {install_command(extra)}", overflow="fold")
        else:
            yield extra, f"{purpose}: installed"
