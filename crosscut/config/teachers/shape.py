"""Model of a teacher, from the settings in its folder."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from crosscut.config.conventions import CONFIG_FILE, MANIFEST_FILE
from crosscut.config.errors import ConfigError
from crosscut.config.model import ModelConfig
from crosscut.config.parts.kinds import with_layers
from crosscut.config.published.folders import is_published, read_published
from crosscut.config.system.files import read_json


@lru_cache(maxsize=16)
def teacher_model(folder: str) -> ModelConfig:
    """Return the model of the teacher in a folder: of a run, of a checkpoint, or a Hugging Face folder. It has no
    dropout, because a teacher does not learn. Raises `ConfigError` if the folder holds no model.
    """
    from crosscut.config.loading import load_run  # a run has a teacher's settings

    place = Path(folder)
    if is_published(place):
        return replace(read_published(place).model, dropout=0.0)
    if (place / CONFIG_FILE).is_file():
        return replace(load_run(place / CONFIG_FILE).model, dropout=0.0)
    if (manifest := _newest_manifest(place)) is not None:
        return replace(load_run(_settings_in(manifest)).model, dropout=0.0)
    raise ConfigError(
        f"`teacher.folder` must name the folder of a run, a checkpoint or a Hugging Face folder, but `{folder}` has no "
        f"`{CONFIG_FILE}`, `{MANIFEST_FILE}` or `config.json`. Check the path."
    )


def _newest_manifest(place: Path) -> Path | None:
    """Return the manifest of a checkpoint, or of the newest checkpoint in a folder. None if there is none."""
    if (place / MANIFEST_FILE).is_file():
        return place / MANIFEST_FILE
    return max(place.glob(f"step-*/{MANIFEST_FILE}"), key=lambda file: (len(str(file)), file), default=None)


def _settings_in(manifest: Path) -> dict[str, object]:
    """Return the settings of the run that wrote a checkpoint. The published model from which the run started may have
    changed since, so it is left out. Raises `ConfigError` for a manifest without these settings.
    """
    progress = read_json(manifest).get("progress")
    config = progress.get("config") if isinstance(progress, dict) else None
    config = config if isinstance(config, dict) else {}
    model, training = config.get("model"), config.get("training")
    if not isinstance(model, dict) or not isinstance(training, dict):
        raise ConfigError(f"`{manifest}` must hold the config of a run, but does not. Choose another checkpoint.")
    return {**config, "model": with_layers(model), "training": {**training, "initialize_from": ""}}
