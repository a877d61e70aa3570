"""Code shared by fine-tuning on conversations and fine-tuning for tasks."""

from pathlib import Path

from crosscut.config import ConfigError, RunStopped
from crosscut.training.watching.run_report import typed_command


def require_new_folder(folder: Path, names: tuple[str, ...]) -> None:
    """Raise `ConfigError` if the folder for a new run already holds one of `names`, the files and folders of an earlier
    run.
    """
    if held := [name for name in names if (folder / name).exists()]:
        raise ConfigError(
            f"`--output` must name a new folder, but `{folder}` already holds `{held[0]}` of a run. Pass --resume to "
            "continue that run, or choose another folder."
        )


def run_stopped(step: int, again: str, *, interrupted: bool) -> RunStopped:
    """Return the exception for a run that a signal has stopped. `again` holds the arguments of the `crosscut` command
    that resumes the run.
    """
    return RunStopped(
        f"The run has stopped after step {step}, and its checkpoint is written. Resume with `{typed_command()} "
        f"{again}`.",
        interrupted=interrupted,
    )
