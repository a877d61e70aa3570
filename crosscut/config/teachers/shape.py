"""Model of a teacher, from the settings in its folder."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from crosscut.config.conventions import CONFIG_FILE
from crosscut.config.errors import ConfigError
from crosscut.config.model import ModelConfig
from crosscut.config.published.folders import is_published, read_published


@lru_cache(maxsize=16)
def teacher_model(folder: str) -> ModelConfig:
    """Return the model of the teacher in a folder: of a run, of a checkpoint, or a Hugging Face folder. It has no
    dropout, because a teacher does not learn. Raises `ConfigError` if the folder holds no model.
    """
    from crosscut.config.loading import load_run  # a run has a teacher's settings

    place = Path(folder)
    if is_published(place):
        return replace(read_published(place).model, dropout=0.0)
    files = (place / CONFIG_FILE, *(parent / CONFIG_FILE for parent in [*place.absolute().parents][:2]))
    file = next((file for file in files if file.is_file()), None)
    if file is None or not place.is_dir():
        raise ConfigError(
            f"`teacher.folder` must name the folder of a run or a Hugging Face folder, but `{folder}` holds neither "
            f"`{CONFIG_FILE}` nor `config.json`. Check the path."
        )
    return replace(load_run(file).model, dropout=0.0)
