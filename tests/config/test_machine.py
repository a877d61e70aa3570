"""What the machine tells of its processor."""

import platform

import pytest

from crosscut.config import machine

INFO = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel name\t: AMD EPYC\n\nprocessor\t: 1\n"


def test_linux_tells_name_and_vendor(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text(INFO)
    monkeypatch.setattr(machine, "Path", lambda _: tmp_path / "cpuinfo")
    assert (machine.processor_name(), machine.processor_vendor()) == ("AMD EPYC", "AuthenticAMD")


@pytest.mark.parametrize(
    ("told", "vendor"),
    [("AMD64 Family 25 Model 33 Stepping 2, AuthenticAMD", "AuthenticAMD"), ("arm", ""), ("", "")],
)
def test_other_systems_tell_one_line(monkeypatch, tmp_path, told, vendor):
    monkeypatch.setattr(machine, "Path", lambda _: tmp_path / "none")
    monkeypatch.setattr(platform, "processor", lambda: told)
    assert machine.processor_vendor() == vendor
    assert machine.processor_name() == (told or platform.machine())
