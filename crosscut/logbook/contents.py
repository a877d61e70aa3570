"""Whole contents of the files in a run's folder. `following` reads the same files while they grow."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from crosscut.config import ConfigError, CrosscutError, RunConfig, load_run
from crosscut.config.conventions import CONFIG_FILE
from crosscut.config.system.deletion import remove_file
from crosscut.config.system.files import parse_toml, read_small
from crosscut.logbook.objects import read_object
from crosscut.logbook.rows import Row, read_rows, require_readable_rows, without_undone
from crosscut.logbook.schema import (
    BY_NAME,
    HANG_REPORTS,
    LOADS_FILE,
    METRICS_FILE,
    RESTARTS_FILE,
    RUN_FILES,
    SUMMARY_FILE,
    Form,
    Lifetime,
)


def read_metrics(folder: Path) -> list[Row]:
    """Read the rows of a run's `metrics.jsonl` (`rows.read_rows`)."""
    return without_undone(read_rows(folder / METRICS_FILE))


def read_loads(folder: Path) -> list[Row]:
    """Read the rows of a run's `experts.jsonl`, sorted by their steps. Rows of another shape than the last one are
    left out.
    """
    rows = read_rows(folder / LOADS_FILE)
    return sorted((row for row in rows if _shape(row) == _shape(rows[-1])), key=lambda row: int(row["step"]))


def _shape(row: Row) -> dict[str, int]:
    return {name: len(loads) for name, loads in row["loads"].items()}


def read_restarts(folder: Path) -> list[Row]:
    """Read the rows of a run's `restarts.jsonl`, oldest first. Empty if the run was never continued."""
    return read_rows(folder / RESTARTS_FILE)


def read_summary(folder: Path) -> Mapping[str, object] | None:
    """Read a run's `summary.json`. Returns None if the run has none that can be read."""
    return read_object(folder / SUMMARY_FILE)


def read_settings(folder: Path) -> Mapping[str, object]:
    """Read a run's `config.toml` as a table. Empty if the run has none that can be read."""
    try:
        return parse_toml(read_small(folder / CONFIG_FILE))
    except (OSError, ValueError):
        return {}


def former_run(settings: Mapping[str, object]) -> RunConfig | None:
    """Return the run that began with these settings, without its folder of initial weights, which may be gone. Returns
    None if the settings are not those of a run that can be loaded.
    """
    training = settings.get("training")
    if not isinstance(training, dict):
        return None
    try:
        return load_run({**settings, "training": {**training, "initialize_from": ""}})
    except CrosscutError:
        return None


def hang_steps(folder: Path) -> Iterator[int]:
    """Yield the step of each report about a hang."""
    for path in BY_NAME[HANG_REPORTS].paths(folder):
        yield int(path.stem.split("-")[1])


def free_hang_report(folder: Path, step: int) -> Path:
    """Return a path in a run's folder at which no report exists yet. `step` is the step at which the run hangs."""
    path, number = folder / f"hang-{step}.txt", 1
    while path.exists():
        number += 1
        path = folder / f"hang-{step}-{number}.txt"
    return path


def remove_outlived(folder: Path, end: Lifetime) -> None:
    """Remove the files of a run's folder whose lifetime is `end` or shorter. Links stay. Raises `ConfigError` if the
    system refuses the removal.
    """
    lifetimes = list(Lifetime)
    removed = lifetimes[: lifetimes.index(end) + 1]
    for path in (path for file in RUN_FILES if file.lifetime in removed for path in file.paths(folder)):
        try:
            remove_file(path)
        except OSError as error:
            raise ConfigError(
                f"`{path}` of an earlier start must be removable, but is not: {error.strerror}. Grant access, or set "
                "`output.folder` to another folder."
            ) from None


def require_known_versions(folder: Path) -> None:
    """Raise `NewerFileError` if a newer Crosscut wrote a file of the run, so that this one would misread it."""
    for name, file in BY_NAME.items():
        if file.form is Form.OBJECT:
            read_object(folder / name)
        elif file.form is Form.ROWS and (folder / name).is_file():
            require_readable_rows(folder / name)
