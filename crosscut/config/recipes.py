"""Named recipes: defaults for the settings that a run leaves out.

`RECIPES[name]` gives the settings in which a recipe differs from the paper. The dataclasses of a run hold the paper's
values, so the recipe "paper" is empty. A setting of the run always replaces the recipe's.
"""

from collections import Counter

from crosscut.config.checks import Settings
from crosscut.config.data import DataConfig
from crosscut.config.model import ModelConfig, NormKind
from crosscut.config.parts.kinds import ATTENTIONS, KINDS, MLPS, gated
from crosscut.config.parts.rotary import Positions
from crosscut.config.published.presets import DEMO_PRESET, MODERN
from crosscut.config.run import RunConfig

_BETWEEN_CHECKPOINTS = 3600.0
"""Most seconds of steps between two checkpoints, if a step is shorter. A failure repeats half of them on average."""


def _llama(learning_rate: float) -> dict[str, Settings]:
    """Optimizer of Llama 2 (arXiv 2307.09288, section 2.2)."""
    rates = {"learning_rate": learning_rate, "min_learning_rate": learning_rate / 10, "warmup_steps": 2000}
    return {"optimizer": {**rates, "beta2": 0.95, "epsilon": 1e-5, "weight_decay": 0.1}}


RECIPES: dict[str, dict[str, Settings]] = {
    # Sections 4.1.1 and 4.1.3 of the paper, for models of hundreds of millions of parameters on a cluster.
    "paper": {},
    # For models of the Llama kind: Llama 2 of 7B and 13B, and of 34B and 70B.
    "llama": _llama(3e-4),
    "llama-large": _llama(1.5e-4),
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


LARGE = 100_000_000
"""Number of parameters from which a model has the recipe of its family by default, and not "small"."""

_LARGE_LLAMA = 30_000_000_000
"""Number of parameters from which a model of the Llama kind has the recipe "llama-large" by default."""

_DEFAULTS = {
    "small": "the default below 100M parameters",
    "paper": "the default from 100M parameters on",
    "llama": "the default with RMS norms from 100M parameters on",
    "llama-large": "the default with RMS norms from 30B parameters on",
}


def default_recipe(model: ModelConfig | None, *, preset: str, initialize_from: object) -> str:
    """Name of the recipe for a run without `recipe`. `preset` and `initialize_from` are the run's `model.preset` and
    `training.initialize_from`, or empty. `model` is None if its settings are wrong.

    A run from published weights has the recipe "continued", and the preset of the demo has "modern". Every other model
    has "small" below `LARGE` parameters. Of the larger models, those with RMS norms, such as Llama and its successors,
    have "llama" or "llama-large", and all others have "paper".
    """
    if initialize_from:
        return "continued"
    if preset == DEMO_PRESET:
        return "modern"
    if model is None or (number := num_parameters(model)) < LARGE:
        return "small"
    if model.norm != NormKind.RMS:
        return "paper"
    return "llama" if number < _LARGE_LLAMA else "llama-large"


def steps_between_validations(steps: int) -> int:
    """Number of steps between the validation passes of a run of `steps` steps that does not set it: a tenth of the
    steps, but at least 10, so that a short run does not mainly validate. A run of fewer than 40 steps has a pass in
    each quarter.
    """
    return max(1, steps // 10, min(10, -(-steps // 4)))


def steps_between_checkpoints(seconds: float, *, most: int) -> int:
    """Return the largest number of steps of at most an hour that is `most`, or 1, 2 or 5 times a power of ten below
    it. `seconds` is the time of a step. At least 1.
    """
    steps = max(1, int(_BETWEEN_CHECKPOINTS / seconds))
    if steps >= most:
        return most
    digits = str(steps)
    first = max(digit for digit in "125" if digit <= digits[0])
    return int(first.ljust(len(digits), "0"))


def num_parameters(model: ModelConfig) -> int:
    """Number of parameters in the matrices of a model, without biases and norms. If the vocabulary is the tokenizer's,
    the default of `data.vocab_size` is used. The planner counts all parameters exactly.
    """
    kinds = Counter(kind for i in range(model.num_layers) for _, kind in model.parts_of(i))
    hidden, heads = model.hidden_size, model.num_heads
    attention = hidden * ((2 + model.attention_gate) * model.query_size + model.key_value_size)
    num_matrices = sum(kinds[kind] * (3 if gated(kind) else 2) for kind in MLPS)
    rows = (model.vocab_size or DataConfig.vocab_size) * (1 if model.tied else 2)
    rows += model.max_sequence_length if model.positions is Positions.LEARNED else 0
    mixers = sum(kinds[KINDS[name]] * section.num_parameters(hidden, heads) for name, section in model.sections.items())
    attentions = sum(kinds[kind] for kind in ATTENTIONS) * attention
    return attentions + mixers + hidden * (num_matrices * model.mlp_size + rows)


def describe_recipe(run: RunConfig) -> str:
    """Recipe and learning rates of a run in words, for its banner and its plan."""
    rates = {
        "learning rate": run.optimizer.learning_rate,
        "matrices": run.optimizer.matrix_learning_rate,
        "embedding": run.optimizer.embedding_learning_rate,
        "head": run.optimizer.head_learning_rate,
    }
    told = ", ".join(f"{name} {rate:g}" for name, rate in rates.items() if rate)
    if not run.recipe:
        return told
    is_default = run.recipe == default_recipe(run.model, preset="", initialize_from=run.training.initialize_from)
    reason = f" ({_DEFAULTS[run.recipe]})" if is_default and run.recipe in _DEFAULTS else ""
    return f"{run.recipe}{reason}: {told}"
