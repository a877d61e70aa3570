"""The whole training of a run: its tokens, its FLOPs and its checkpoints."""

from dataclasses import replace

from crosscut.config import Layout, RunConfig
from crosscut.planner.candidate import Candidate
from crosscut.planner.compute import flops_per_step
from crosscut.planner.memory import forecast_memory


def training_tokens(run: RunConfig) -> int:
    """Number of tokens of all steps, with a batch that may grow."""
    return run.training.samples_before(run.training.steps) * run.training.sequence_length


def training_flops(run: RunConfig, tokens: float) -> float:
    """FLOPs of the model for `tokens` tokens, forward and backward, without those that recomputation repeats."""
    return flops_per_step(run) / (run.training.batch_size * run.training.sequence_length) * tokens


def checkpoint_bytes(run: RunConfig) -> int:
    """Bytes of one checkpoint: the weights in the accumulation type and the moments, each once, whatever the layout."""
    alone = replace(Candidate.at(run, 0), layout=Layout())
    held = forecast_memory(alone, device="cpu")
    return (held.master_weights or held.weights) + held.optimizer
