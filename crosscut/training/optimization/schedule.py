"""Learning rate of each step: linear warm-up, then one of the schedules.

The paper's schedule is one cosine down to a minimum (section 4.1.1). The schedule `wsd` (warm-up, stable, decay) is
from Hu et al. 2024 (arXiv 2404.06395), and the linear decay to zero from Bergsma et al. 2025 (arXiv 2502.15938).
"""

import math

from crosscut.config import OptimizerConfig, RunConfig
from crosscut.config.optimizer import RateSchedule


def learning_rate(step: int, *, config: OptimizerConfig, num_steps: int) -> float:
    """Return the learning rate of step `step`, counted from 0, in a run of `num_steps` steps.

    The rate rises linearly to `learning_rate` at step `warmup_steps`, and then follows the schedule. A cosine reaches
    `min_learning_rate` at the last step. A linear decay would reach `min_learning_rate` at step `num_steps`, one step
    after the last.
    """
    highest, lowest = config.learning_rate, config.min_learning_rate
    if step < config.warmup_steps:
        return highest * (step + 1) / (config.warmup_steps + 1)
    if config.schedule is RateSchedule.COSINE:
        progress = (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps)
        return lowest + (highest - lowest) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    decay = config.decay_steps if config.schedule is RateSchedule.WSD else num_steps - config.warmup_steps
    left = max(0, num_steps - step)
    if config.schedule is RateSchedule.CONSTANT or left >= decay:
        return highest
    return lowest + (highest - lowest) * left / decay


def last_stable_step(config: OptimizerConfig, num_steps: int) -> int | None:
    """Return the number of steps before the decay of the schedule `wsd`; None for any other schedule. A run that
    continues from a checkpoint of this step can be extended without a jump in the learning rate.
    """
    return num_steps - config.decay_steps if config.schedule is RateSchedule.WSD else None


_SETTINGS = ("schedule", "learning_rate", "min_learning_rate", "warmup_steps", "decay_steps")


def describe_jump(done: int, *, saved: RunConfig, run: RunConfig) -> str:
    """Return a message about a jump in the learning rate in a run that resumes after `done` steps. `saved` holds the
    settings in the checkpoint, and `run` the settings of the resumed run. The message is empty if the learning rate of
    the next step stays the same.
    """
    before, after = (learning_rate(done, config=one.optimizer, num_steps=one.training.steps) for one in (saved, run))
    if math.isclose(before, after, rel_tol=1e-9):
        return ""
    settings = {"training.steps": (saved.training.steps, run.training.steps)}
    settings.update(
        {f"optimizer.{name}": (getattr(saved.optimizer, name), getattr(run.optimizer, name)) for name in _SETTINGS}
    )
    changes = [f"`{name}` is {new!r} instead of {old!r}" for name, (old, new) in settings.items() if old != new]
    text = (
        f"The learning rate of step {done + 1} is {after:.3g} instead of {before:.3g}, because {' and '.join(changes)}."
    )
    if after > before and saved.training.steps != run.training.steps:
        text += (
            ' The loss may rise at first. With optimizer.schedule="wsd" or "constant", a run can be extended without '
            "such a jump (docs/recipe.md)."
        )
    return text
