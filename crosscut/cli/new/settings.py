"""The settings of a new run, each with the reason that stands beside it in the file."""

from dataclasses import dataclass, fields, replace
from math import log

from crosscut.cli.new.answers import DEMO_TEXT, Devices, Size, Source
from crosscut.cli.new.shape import PROPORTION, nearest_shape
from crosscut.cli.plan.asked import with_vocabulary
from crosscut.cli.plan.forecast import require_fitting
from crosscut.cli.plan.ranking import duration_text
from crosscut.config import (
    PRESETS,
    ConfigError,
    DataConfig,
    DataError,
    LayoutError,
    ModelConfig,
    RunConfig,
    TrainingConfig,
    load_run,
)
from crosscut.config.loading.commented import Reasoned, nested
from crosscut.config.published.presets import GPT2_VOCAB_SIZE
from crosscut.config.recipes import LARGE, RECIPES, default_recipe, steps_between_checkpoints
from crosscut.config.run import objective_of
from crosscut.config.system.wording import short
from crosscut.planner.parameters import count_active_parameters, count_parameters
from crosscut.planner.search import Plan, Plans, search_layouts

TOKENS_PER_PARAMETER = 20
"""Tokens for each parameter with which a given amount of computing gives the lowest loss (Hoffmann et al. 2022, arXiv
2203.15556)."""

MOST_READINGS = 4
"""Number of times that data can be read with little loss compared with new data (Muennighoff et al. 2023, arXiv
2305.16264)."""

_DEMO_VOCABULARY = 4096
"""Vocabulary of the demo, whose corpus is small."""

_MOST_DEVIATION = 1.5
"""Largest factor between the asked and the actual number of parameters."""

_PLANNED = {
    "layout.tensor": "ranks that share the matrices of every layer; the planner chose the layout",
    "layout.data": "copies of the model, each of which trains on its part of the batch",
    "layout.pipeline": "stages, each with some of the layers",
    "layout.expert": "ranks that share the experts of a layer",
    "layout.sequence_parallel": "the tensor ranks also share the activations between the matrices",
    "layout.sharding": "state that the data ranks share instead of copying it",
    "training.precision": "the default on this device, and the plan is for it",
    "training.micro_batch_size": "sequences in one forward pass of a rank: the fastest number that fits",
    "training.recompute": "activations that the backward pass computes again, which saves memory",
}
"""Reasons of what the planner chooses."""


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """A new run, and the plan of its layout."""

    settings: dict[str, Reasoned]
    """Settings that the file holds, keyed by dotted name. `load_run` makes `run` of them."""
    run: RunConfig
    plan: Plan
    plans: Plans
    source_tokens: float
    """Number of training tokens in the data. 0 if it is unknown."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model, with the vocabulary of the plan."""
        return count_parameters(self.plans.asked.model)

    @property
    def num_tokens(self) -> int:
        """Number of tokens on which the run trains."""
        return self.run.training.steps * self.step_tokens

    @property
    def epochs(self) -> float:
        """Number of times that each token of the data is read. 0 if the size of the data is unknown."""
        return self.num_tokens / self.source_tokens if self.source_tokens else 0.0

    @property
    def step_tokens(self) -> int:
        """Number of tokens of one step."""
        return self.run.training.batch_size * self.run.training.sequence_length


def new_run(folder: str, devices: Devices, size: Size, tokens: float | None, source: Source) -> NewRun:
    """Choose the settings of a run with these answers. `folder` is the folder of the run.

    Raises `ConfigError` if there is no model of this size, or if no layout of it fits into the devices' memory.
    """
    settings = {**_recipe_and_model(size, source), **_data(size, source)}
    settings, asked, plans = _searched(settings, devices, tokens, source)
    remedy = "Name more devices or larger ones with `--gpus`, or a smaller model with `--size`."
    require_fitting(plans, f"A model of {short(count_parameters(plans.asked.model))} parameters needs", remedy)
    plan = plans.best
    run = replace(plan.run(plans.asked), model=asked.model)
    settings |= _planned(run, asked)
    if devices.number == 1 and not devices.has_gpus:
        settings["layout.tensor"] = Reasoned(1, "ranks without GPUs would share the cores, so one is the fastest")
    every = steps_between_checkpoints(plan.time.total, most=run.checkpoint.every)
    if every != run.checkpoint.every:
        lost = duration_text(every * plan.time.total / 86_400)
        settings["checkpoint.every"] = Reasoned(
            every, f"steps that a failure can undo: {lost}, as the planner forecasts"
        )
    settings["output.folder"] = Reasoned(folder, "metrics, checkpoints and samples of the run")
    run = replace(run, checkpoint=replace(run.checkpoint, every=every), output=replace(run.output, folder=folder))
    return NewRun(settings=settings, run=run, plan=plan, plans=plans, source_tokens=source.num_tokens)


def _searched(
    settings: dict[str, Reasoned], devices: Devices, tokens: float | None, source: Source
) -> tuple[dict[str, Reasoned], RunConfig, Plans]:
    """Settings with the recipe's batch, their run, and its layouts. If no layout of this batch fits on all devices, the
    batch is made larger.
    """
    number = devices.number
    own, larger = (settings | _training(settings, ranks, tokens, source.num_tokens) for ranks in (1, number))
    asked = _loaded(own)
    asked.require_objective()
    _require_sentences(asked, source)
    is_last = own == larger
    try:
        plans = search_layouts(with_vocabulary(asked), devices.hardware, number)
        is_last |= bool(plans.fitting)
    except LayoutError:
        if is_last:
            raise
    if is_last:
        return own, asked, plans
    asked = _loaded(larger)
    return larger, asked, search_layouts(with_vocabulary(asked), devices.hardware, number)


def _require_sentences(run: RunConfig, source: Source) -> None:
    """Raise `DataError` for tokens from which a masked language model cannot make samples."""
    if source.tokens and run.data.has_sentences and not source.has_sentences:
        raise DataError(
            f"`--data` must name text, or tokens with an index of sentences, for a model that predicts masked tokens, "
            f"but the tokens in `{source.tokens}` have none. Name the text, or prepare the tokens again with "
            'data.objective="masked".'
        )


def _loaded(settings: dict[str, Reasoned]) -> RunConfig:
    return load_run(nested(settings))


def _recipe_and_model(size: Size, source: Source) -> dict[str, Reasoned]:
    found = _preset(size.preset) if size.preset else _shape(size.parameters, _vocabulary(size, source))
    if source.vocab_size:
        found["model.vocab_size"] = Reasoned(source.vocab_size, "the vocabulary of the tokens")
    return found


def _preset(name: str) -> dict[str, Reasoned]:
    model = ModelConfig(**PRESETS[name])
    recipe = default_recipe(model, preset=name, initialize_from="")
    return {
        "recipe": Reasoned(recipe, "the default of this model; it gives all settings that this file leaves out"),
        "model.preset": Reasoned(name, "the model of --size"),
    }


def _shape(number: float, vocab_size: int) -> dict[str, Reasoned]:
    """Recipe and sizes of the model with about this number of parameters."""
    recipe = "modern" if number < LARGE else "paper"
    length = _length(recipe)
    style = {**RECIPES[recipe].get("model", {}), "vocab_size": vocab_size, "max_sequence_length": length}
    model = nearest_shape(number, style)
    count = count_parameters(model)
    if abs(log(count / number)) > log(_MOST_DEVIATION):
        raise ConfigError(
            f"`--size` must be a number of parameters that a model can have, but is {short(number)}. The nearest model "
            f"has {short(count)}. Try {short(count)}."
        )
    why = "learns most in few steps" if recipe == "modern" else "is the paper's"
    sizes = {
        "num_layers": f"{short(count)} parameters, near --size and with proportions as close to GPT-2's as possible",
        "hidden_size": f"about {model.hidden_size / model.num_layers:.0f} x num_layers; GPT-2 small has {PROPORTION} x",
        "num_heads": "heads of attention, which the tensor ranks share",
        "max_sequence_length": "most tokens that the model reads at once",
    }
    return {
        "recipe": Reasoned(recipe, f"this recipe {why}; it gives all settings that this file leaves out"),
        **{f"model.{name}": Reasoned(getattr(model, name), reason) for name, reason in sizes.items()},
    }


def _length(recipe: str) -> int:
    length = RECIPES[recipe].get("training", {}).get("sequence_length", TrainingConfig.sequence_length)
    assert isinstance(length, int)
    return length


def _vocabulary(size: Size, source: Source) -> int:
    """Vocabulary size of the tokens, or of the tokenizer that the run trains on the text."""
    of_preset = PRESETS[size.preset].get("vocab_size", 0) if size.preset else 0
    if source.vocab_size or of_preset:
        return int(source.vocab_size or of_preset)
    if source.text == DEMO_TEXT:
        return _DEMO_VOCABULARY
    return DataConfig.vocab_size if size.preset or size.parameters < LARGE else GPT2_VOCAB_SIZE


def _data(size: Size, source: Source) -> dict[str, Reasoned]:
    found = {}
    if source.tokens:
        found["data.tokens"] = Reasoned(source.tokens, "the token shards of --data")
    else:
        vocabulary = "most tokens of the tokenizer that the run trains on the text"
        if size.preset and PRESETS[size.preset].get("vocab_size"):
            vocabulary = (
                'at most, as the published model has; `tokenizer = "tokenizer.json"` would take its own tokenizer'
            )
        found["data.text"] = (
            Reasoned((source.text,), "the text of --data, which becomes tokens before the first step")
            if source.text
            else Reasoned((), 'name files, folders or globs of text here, or shards as `tokens = "FOLDER"`, to train')
        )
        found["data.vocab_size"] = Reasoned(_vocabulary(size, source), vocabulary)
    if size.preset and (objective := objective_of(ModelConfig(**PRESETS[size.preset]))) != DataConfig.objective:
        found["data.objective"] = Reasoned(str(objective), "what the model is made to predict")
    return found


def _training(
    settings: dict[str, Reasoned], num_ranks: int, tokens: float | None, source_tokens: float
) -> dict[str, Reasoned]:
    """Batch of the recipe, made larger unless `num_ranks` data ranks can share it, and the steps for `tokens`."""
    of_recipe = _loaded(settings).training.batch_size
    asked = with_vocabulary(_loaded(settings | {"layout.data": Reasoned(num_ranks, "")}))
    batch, length = asked.training.batch_size, asked.training.sequence_length
    if tokens is None:
        parameters = count_active_parameters(asked.model)
        tokens = TOKENS_PER_PARAMETER * parameters
        why = f"{short(tokens)} tokens, {TOKENS_PER_PARAMETER} for each of {short(parameters)} parameters"
        if 0 < (most := MOST_READINGS * source_tokens) < tokens:
            why = f"{short(most)} tokens, all of the data {MOST_READINGS} times; the model could use {short(tokens)}"
            tokens = most
        elif not most:
            why += "; the size of the data is unknown"
    else:
        why = f"{short(tokens)} tokens, as --tokens says"
    steps = max(1, round(tokens / (batch * length)))
    enlarged = f" {of_recipe}, made larger for {num_ranks} devices" if batch != of_recipe else ""
    return {
        "training.steps": Reasoned(steps, f"{why}, in steps of {batch * length:,}"),
        "training.batch_size": Reasoned(batch, f"sequences of a step, over all ranks: the recipe's{enlarged}"),
        "training.sequence_length": Reasoned(length, "tokens of a sequence: the recipe's"),
    }


def _planned(run: RunConfig, asked: RunConfig) -> dict[str, Reasoned]:
    """Settings that the planner has changed, and the sizes of the layout."""
    found = {}
    for section, before, after in (("layout", asked.layout, run.layout), ("training", asked.training, run.training)):
        for field in fields(after):
            name, value = f"{section}.{field.name}", getattr(after, field.name)
            if value != getattr(before, field.name) or name in ("layout.tensor", "layout.data"):
                found[name] = Reasoned(value, _PLANNED.get(name, "part of the layout that the planner chose"))
    return found
