"""Named recipes: defaults for the settings that a run leaves out.

`RECIPES[name]` gives the settings in which a recipe differs from the paper. The dataclasses of a run hold the paper's
values, so the recipe "paper" is empty. A setting of the run always replaces the recipe's.
"""

from typing import Any

from crosscut.config.published.presets import DEMO_PRESET, LAPTOP_PRESETS, MODERN, PRESETS

RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    # Sections 4.1.1 and 4.1.3 of the paper, for models of hundreds of millions of parameters on a cluster.
    "paper": {},
    # For a model that trains in minutes on a laptop or on one GPU.
    "small": {
        "training": {"steps": 500, "batch_size": 8, "sequence_length": 256, "validation_sequences": 64},
        "optimizer": {"learning_rate": 1e-3, "min_learning_rate": 1e-4, "beta2": 0.95},
    },
    # A small model that learns as much as possible in few steps (docs/recipe.md).
    "modern": {
        "model": MODERN,
        "training": {
            "steps": 500,
            "batch_size": 8,
            "sequence_length": 256,
            "validation_sequences": 64,
            "initial_spread": "fan_in",
            "zero_initial_outputs": True,
        },
        "optimizer": {
            "learning_rate": 6e-3,
            "matrices": "muon",
            "matrix_learning_rate": 0.012,
            "embedding_learning_rate": 0.05,
            "head_learning_rate": 5e-3,
            "schedule": "linear",
            "warmup_steps": 10,
            "min_learning_rate": 0.0,
            "weight_decay": 0.0,
            "beta2": 0.95,
        },
    },
    # Further training of published weights, which a high learning rate would undo.
    "continued": {
        "training": {"steps": 500, "batch_size": 8, "sequence_length": 1024, "validation_sequences": 64},
        "optimizer": {"learning_rate": 5e-5, "min_learning_rate": 5e-6, "beta2": 0.95},
    },
}


def default_recipe(*, preset: str, initialize_from: object) -> str:
    """Name of the recipe for a run without `recipe`. `preset` and `initialize_from` are the run's `model.preset` and
    `training.initialize_from`, or empty.

    A run from published weights has the recipe "continued", the preset of the demo has "modern", a preset of the paper
    or of another published model has "paper", and every other model has "small".
    """
    if initialize_from:
        return "continued"
    if preset == DEMO_PRESET:
        return "modern"
    return "paper" if preset in PRESETS and preset not in LAPTOP_PRESETS else "small"
