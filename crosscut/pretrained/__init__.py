"""Import and export of weights: models are loaded from Hugging Face folders and runs, and runs are exported to Hugging
Face folders.

While a model is loaded, no rank holds a whole published tensor. While a model is exported, a process holds at most one
whole tensor.
"""

from crosscut.pretrained.adapters import read_adapter
from crosscut.pretrained.companions import keep_companions, keep_labels, notices_of, speech_of_run
from crosscut.pretrained.export import Exported, export_adapter, export_checkpoint, export_model
from crosscut.pretrained.finite import require_finite
from crosscut.pretrained.loading import load_weights, model_in, require_weights
from crosscut.pretrained.source import ModelSource, find_model
from crosscut.pretrained.trunk import load_trunk, notice_of_classes

__all__ = [
    "Exported",
    "ModelSource",
    "export_adapter",
    "export_checkpoint",
    "export_model",
    "find_model",
    "keep_companions",
    "keep_labels",
    "load_trunk",
    "load_weights",
    "model_in",
    "notice_of_classes",
    "notices_of",
    "read_adapter",
    "require_finite",
    "require_weights",
    "speech_of_run",
]
