import time

from tests.cli.conftest import run_python


def test_help_is_quick_and_imports_no_torch():
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = run_python("-m", "crosscut", "--help")
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0
        assert "train" in done.stdout
    assert min(seconds) < 0.5
    imports = run_python("-X", "importtime", "-m", "crosscut", "train", "--help").stderr
    loaded = {line.split("|")[-1].strip().split(".")[0] for line in imports.splitlines() if "|" in line}
    assert "click" in loaded
    assert not loaded & {"torch", "numpy", "rich", "matplotlib", "tokenizers"}


def test_every_command_has_help(crosscut):
    for command in ("plan", "train", "prepare", "evaluate", "generate", "serve", "study"):
        done = crosscut(command, "--help")
        assert done.returncode == 0
        assert done.stdout.startswith(f"Usage: crosscut {command}")


def test_version_is_told(crosscut):
    from crosscut import __version__

    assert crosscut("--version").stdout.strip().endswith(__version__)
