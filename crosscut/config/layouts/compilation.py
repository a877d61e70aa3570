"""Conditions under which the layers of a run can be compiled."""

from crosscut.config.errors import ConfigError
from crosscut.config.layout import Layout, PipelineSchedule
from crosscut.config.model import ModelConfig
from crosscut.config.training import Compile, TrainingConfig


def require_compilable(model: ModelConfig, layout: Layout, training: TrainingConfig) -> None:
    """Raise `ConfigError` if the run must compile its layers and cannot."""
    if training.compile is Compile.ON and (reason := reason_against_compiling(model, layout)):
        raise ConfigError(not_compilable(reason))


def reason_against_compiling(model: ModelConfig, layout: Layout) -> str:
    """Reason why layers cannot be compiled on any machine, as a clause to follow a colon. Empty if the layers can be
    compiled.
    """
    if layout.pipeline > 1 and layout.schedule is PipelineSchedule.ZERO_BUBBLE:
        return (
            "compiled code computes the gradients of weights and of activations together, and layout.schedule = "
            '"zero_bubble" separates them'
        )
    if layout.tensor > 1 and model.dropout and not layout.sequence_parallel:
        return (
            "dropout under tensor parallelism switches between two random streams, and a compiler cannot trace the "
            f"switches (`model.dropout` is {model.dropout} and `layout.tensor` is {layout.tensor}). With "
            "layout.sequence_parallel=true, each rank has only one stream"
        )
    return ""


def not_compilable(reason: str) -> str:
    """Error message for a run that must be compiled but cannot be."""
    return (
        f'`training.compile` must be "auto" or "off" for this run, but is "on": {reason}. Remove the cause, or set '
        'training.compile="auto".'
    )
