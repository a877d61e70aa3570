"""The whole measured study, from the user's arguments to the results."""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from crosscut.config import ConfigError, RunConfig, load_run
from crosscut.config.system.machine import available_cores, processor_name
from crosscut.config.system.terminal import echo
from crosscut.planner.hardware import Hardware, named_hardware
from crosscut.planner.search import require_precision
from crosscut.scaling.cases import DEFAULT_RUNS, Devices, choose_devices, study_cases
from crosscut.scaling.measure import measure
from crosscut.scaling.results import Results, row_of
from crosscut.training.precision import resolve_on


def measured_study(arguments: Sequence[str], *, gpu: str | None, ranks: int | None, turns: int) -> Results:
    """Measure all studies. `arguments` are a run's file and overrides; without a file, the default model is used. `gpu`
    names the device to forecast, or is None for no forecasts. `ranks` is the maximum number of ranks, or None for the
    default. Numbers of ranks that the run does not allow are left out, and the reason is printed before a rank starts.

    Raises `ConfigError` or `LayoutError` before a rank starts.
    """
    asked, devices = _run_and_devices(arguments, ranks)
    if asked.teacher.teaches:
        raise ConfigError("A study of scaling must have no teacher, but the run has one. Remove the section `teacher`.")
    run = resolve_on(asked, torch.device(devices.kind))
    hardware = None if gpu is None else _hardware(gpu, run.config, devices)
    studies, left_out = study_cases(run, devices)
    for sentence in left_out:
        echo(sentence)
    cases = [case for found in studies.values() for case in found]
    unique = [case for index, case in enumerate(cases) if case not in cases[:index]]
    seconds = measure(unique, devices, turns=turns)
    return Results(
        machine=_machine(devices),
        devices=devices,
        batch_size=run.layout.share_of(run.training.batch_size),
        sequence_length=run.training.sequence_length,
        precision=run.precision,
        turns=turns,
        device_file="" if hardware is None else hardware.name,
        studies={
            study: [row_of(case, seconds[unique.index(case)], devices, hardware) for case in found]
            for study, found in studies.items()
        },
        left_out=left_out,
    )


def _run_and_devices(arguments: Sequence[str], ranks: int | None) -> tuple[RunConfig, Devices]:
    """Return the run for one rank, and the devices. The default run depends on the kind of device, which an override of
    `training.device` may choose.
    """
    cores, gpus = available_cores(), torch.cuda.device_count()
    if arguments and "=" not in arguments[0]:
        run = load_run(Path(arguments[0]), arguments[1:]).with_vocabulary()
        return run, choose_devices(run.training.device, ranks, cores=cores, gpus=gpus)
    asked = load_run(DEFAULT_RUNS["cpu"], [text for text in arguments if text.startswith("training.device=")])
    devices = choose_devices(asked.training.device, ranks, cores=cores, gpus=gpus)
    return load_run(DEFAULT_RUNS[devices.kind], arguments), devices


def _hardware(name: str, run: RunConfig, devices: Devices) -> Hardware:
    hardware = named_hardware(name)
    if hardware.device != devices.kind:
        raise ConfigError(
            f"`--gpu` must describe the measured device ({devices.kind}), but `{name}` describes {hardware.device}. "
            "Write a file for this machine with `crosscut plan --calibrate FILE.toml`."
        )
    require_precision(run, hardware)
    return hardware


def _machine(devices: Devices) -> dict[str, str]:
    return {
        "device": torch.cuda.get_device_name() if devices.kind == "cuda" else processor_name(),
        "date": datetime.now(tz=UTC).date().isoformat(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }
