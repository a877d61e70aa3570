"""Configuration of a run: frozen dataclasses, loading, checking and presets.

This package is plain Python. It imports neither torch nor numpy nor any other package of Crosscut, so that every
mistake in a run's file is found before a process starts.
"""

from crosscut.config.conventions import IGNORED, default_loss_chunk, padded_vocab_size
from crosscut.config.corpora import CorpusConfig
from crosscut.config.data import DataConfig
from crosscut.config.errors import (
    CheckpointError,
    ConfigError,
    CrosscutError,
    DamagedCheckpointError,
    DamagedDataError,
    DamagedError,
    DataError,
    GenerationError,
    LayoutError,
    OutputClosed,
    RankFailure,
    RunHung,
    RunStopped,
    TrainingError,
)
from crosscut.config.evaluation import EvaluationConfig
from crosscut.config.layout import Layout, ZeroStage
from crosscut.config.loading import dump_toml, is_corpus, load_corpus, load_layout, load_run, write_toml
from crosscut.config.loading.resolved import ResolvedRun, resolve
from crosscut.config.model import ModelConfig
from crosscut.config.optimizer import OptimizerConfig
from crosscut.config.published.presets import PRESETS
from crosscut.config.run import CheckpointConfig, OutputConfig, RunConfig
from crosscut.config.system.files import write_json, write_whole
from crosscut.config.training import TrainingConfig

__all__ = [
    "IGNORED",
    "PRESETS",
    "CheckpointConfig",
    "CheckpointError",
    "ConfigError",
    "CorpusConfig",
    "CrosscutError",
    "DamagedCheckpointError",
    "DamagedDataError",
    "DamagedError",
    "DataConfig",
    "DataError",
    "EvaluationConfig",
    "GenerationError",
    "Layout",
    "LayoutError",
    "ModelConfig",
    "OptimizerConfig",
    "OutputClosed",
    "OutputConfig",
    "RankFailure",
    "ResolvedRun",
    "RunConfig",
    "RunHung",
    "RunStopped",
    "TrainingConfig",
    "TrainingError",
    "ZeroStage",
    "default_loss_chunk",
    "dump_toml",
    "is_corpus",
    "load_corpus",
    "load_layout",
    "load_run",
    "padded_vocab_size",
    "resolve",
    "write_json",
    "write_toml",
    "write_whole",
]
