"""Facts about the processor of this machine."""

import os
import platform

import pytest

from crosscut.config import ConfigError
from crosscut.config.system import machine

GB = 10**9

INFO = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\n"


def test_linux_tells_name_and_vendor(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text(INFO)
    monkeypatch.setattr(machine, "Path", lambda _: tmp_path / "cpuinfo")
    assert (machine.processor_name(), machine.processor_vendor()) == ("AMD EPYC", "AuthenticAMD")


@pytest.mark.parametrize(
    ("told", "vendor"), [("AMD64 Family 25 Model 33 Stepping 2, AuthenticAMD", "AuthenticAMD"), ("arm", ""), ("", "")]
)
def test_other_systems_tell_one_line(monkeypatch, tmp_path, told, vendor):
    monkeypatch.setattr(machine, "Path", lambda _: tmp_path / "none")
    monkeypatch.setattr(platform, "processor", lambda: told)
    assert machine.processor_vendor() == vendor
    assert machine.processor_name() == (told or platform.machine())


@pytest.mark.parametrize(
    ("cores", "memory", "most"),
    [(2, 64 * GB, 64), (64, 512 * GB, 2048), (64, 8 * GB, 39), (1, GB, 4), (1, GB // 10, 1)],
)
def test_processes_must_fit_cores_and_memory(monkeypatch, cores, memory, most):
    monkeypatch.setattr(machine, "available_cores", lambda: cores)
    monkeypatch.setattr(machine, "available_memory", lambda: memory)
    machine.require_room("`workers`", most, remedy="Use fewer.")
    with pytest.raises(
        ConfigError,
        match=rf"^`workers` must be at most {most:,} on this .* but is {most + 1:,}\. The machine has too few",
    ):
        machine.require_room("`workers`", most + 1, remedy="Use fewer.")


@pytest.mark.parametrize(("limit", "expected"), [("1000000\n", 10**6), ("max\n", None), (None, None)])
def test_container_limits_the_memory(monkeypatch, tmp_path, limit, expected):
    whole = machine.available_memory()
    assert whole > 10**8
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(machine, "Path", lambda _: tmp_path / "memory.max")
    unlimited = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.available_memory() == (expected or unlimited)
