"""Real weights in and out: models from Hugging Face folders and runs, and runs to Hugging Face folders.

A published tensor is never whole on a rank that reads, and at most one is on a process that writes.
"""

from crosscut.pretrained.companions import begin_of_run, keep_companions
from crosscut.pretrained.export import Exported, export_checkpoint, export_model
from crosscut.pretrained.loading import load_weights, require_weights
from crosscut.pretrained.source import ModelSource, find_model

__all__ = [
    "Exported",
    "ModelSource",
    "begin_of_run",
    "export_checkpoint",
    "export_model",
    "find_model",
    "keep_companions",
    "load_weights",
    "require_weights",
]
