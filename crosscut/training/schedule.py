"""Learning rate of each step (paper, section 4.1.1): linear warm-up, then one cosine down to a minimum."""

import math

from crosscut.config import OptimizerConfig


def learning_rate(step: int, *, config: OptimizerConfig, num_steps: int) -> float:
    """Return the learning rate of step `step`, counted from 0, in a run of `num_steps` steps.

    The rate rises linearly to `learning_rate` at step `warmup_steps`, then falls along a cosine to `min_learning_rate`
    at the last step.
    """
    highest, lowest = config.learning_rate, config.min_learning_rate
    if step < config.warmup_steps:
        return highest * (step + 1) / (config.warmup_steps + 1)
    progress = (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps)
    return lowest + (highest - lowest) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
