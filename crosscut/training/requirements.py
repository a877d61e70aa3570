"""Requirements of a run on this machine and on its output folder, checked before its ranks start."""

from pathlib import Path

from crosscut.config import ConfigError, ModelConfig, ResolvedRun
from crosscut.config.conventions import CHECKPOINTS_FOLDER, CONFIG_FILE, INITIAL_FOLDER
from crosscut.launch.processes import choose_device
from crosscut.parallel import require_symmetric_memory
from crosscut.training.precision import require_imitable_precision, require_precision
from crosscut.training.speed.compilation import require_compilation
from crosscut.training.watching.metrics import METRICS_FILE, TENSORBOARD_FOLDER
from crosscut.training.watching.profiling import PROFILE_FOLDER
from crosscut.training.watching.run_report import PLOT_FILE, SAMPLE_FILE, SUMMARY_FILE

_FILES = (METRICS_FILE, CONFIG_FILE, PLOT_FILE, SAMPLE_FILE, SUMMARY_FILE)
_FOLDERS = (TENSORBOARD_FOLDER, PROFILE_FOLDER, CHECKPOINTS_FOLDER, INITIAL_FOLDER)


def require_capabilities(run: ResolvedRun, *, only_to_verify: bool = False) -> None:
    """Check that this machine supports the precision, the compilation and the symmetric memory that the run asks for.

    With `only_to_verify`, a precision is also accepted if PyTorch emulates its 8-bit matrix products in software.
    Raises `ConfigError`, or `LayoutError` if symmetric memory is not supported.
    """
    device = choose_device(run.device)
    (require_imitable_precision if only_to_verify else require_precision)(run.precision, device)
    require_compilation(run, device)
    require_symmetric_memory(run.layout, device)


def require_unseen_targets(model: ModelConfig) -> None:
    """Raise `ConfigError` if a token would attend to the token that it has to predict, or if the model predicts masked
    tokens, for which a run has no batches yet.
    """
    if model.predicts_masked:
        raise ConfigError(
            '`model.head` must be "next_token" for `crosscut train`, but is "masked_tokens". `crosscut verify` and '
            '`crosscut plan` support masked tokens. Set model.head="next_token" and model.attention="causal".'
        )
    if not model.is_causal:
        raise ConfigError(
            '`model.attention` must be "causal" for training on the next token, but is "bidirectional". Every token '
            'would see the token that it has to predict. Set model.attention="causal".'
        )


def require_own_names(folder: Path) -> None:
    """Raise `ConfigError` if something else in a run's output folder has the name of a file or a folder that the run
    writes. A folder in place of a file would end the run at its first step, and a FIFO would halt it.
    """
    for name in (*_FILES, *_FOLDERS):
        path, is_file = folder / name, name in _FILES
        if path.exists() and not (path.is_file() if is_file else path.is_dir()):
            raise ConfigError(
                f"`{path}` must be a {'regular file' if is_file else 'folder'}, because the run writes it, but is not. "
                "Remove it, or set `output.folder` to another folder."
            )
