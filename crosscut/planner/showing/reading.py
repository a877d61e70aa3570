"""Reading of a run's description: steps, tensors and messages of its layers on one rank.

Nothing here knows a kind of layer. A step's action is f, g, or the words in the name of its class.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from crosscut.architecture import Device, Parameter, Step, Target, Value, describe, lower, lower_root, run_again
from crosscut.architecture.lowering import Lowered
from crosscut.architecture.messages import Phase, Sent
from crosscut.architecture.parameters import Cut
from crosscut.architecture.parts import Layer
from crosscut.architecture.readings import saved
from crosscut.architecture.steps import Enter, Leave, Message
from crosscut.architecture.words import model_in_words
from crosscut.config import ConfigError
from crosscut.config.parts.kinds import Mixer, parts_of
from crosscut.config.precision import precision_on
from crosscut.config.system.wording import short
from crosscut.config.training import Recompute
from crosscut.planner.candidate import Candidate, Planned, recomputation_step, target_of
from crosscut.planner.messages.collective import Collective
from crosscut.planner.messages.traffic import collective_of, loss_messages, step_traffic
from crosscut.planner.parameters import count_parameters, known_vocab_size
from crosscut.planner.showing.shown import Shown, ShownBlock, ShownStep, Tensor, elements

_ALONE = Target(tensor=1, split=False, context=1, expert=1)

_CUTS = {Cut.COLUMNS: "columns", Cut.ROWS: "rows", Cut.HEADS: "heads", Cut.VOCABULARY: "vocabulary"}


def shown(run: Planned, *, device: Device = "cuda", layer: int | None = None) -> Shown:
    """Read the embedding, each distinct layer and the head of a run on one rank, or only the layer with the number
    `layer`.

    Raises `ConfigError` if there is no such layer, or if `model.vocab_size` is still 0.
    """
    known_vocab_size(run.model)
    planned = Candidate.of(run, precision_on(device))
    target = target_of(planned, device=device)
    blocks = _blocks(planned, target)
    named = {message.purpose for block in blocks for message in (*block.forward, *block.backward)}
    traffic = step_traffic(planned, compiled=target.compiled, target=target)
    return Shown(
        model=model_in_words(run.model, short(count_parameters(run.model))),
        layout=str(run.layout),
        tensor=target.tensor,
        splits_sequence=target.split,
        micro_batch=(target.sequences, target.length),
        compute=target.compute,
        recompute=str(planned.training.recompute),
        blocks=blocks if layer is None else (_with_layer(blocks, layer),),
        others=tuple(message for message in traffic if message.purpose not in named),
    )


def _with_layer(blocks: Sequence[ShownBlock], number: int) -> ShownBlock:
    found = [block for block in blocks if number in block.numbers]
    if not found:
        last = max(index for block in blocks for index in block.numbers)
        raise ConfigError(
            f"`--layer` must be the number of a layer, from 0 to {last}, but is {number}. Try `--layer 0`."
        )
    return found[0]


def _blocks(run: Candidate, target: Target) -> tuple[ShownBlock, ...]:
    """The embedding, each distinct layer and the head. Two layers are alike if they have the same steps and recompute
    the same of them.
    """
    decoder, every = describe(run.model), recomputation_step(run)
    alike: dict[tuple[Layer, bool], list[int]] = {}
    for index, layer in enumerate(decoder.layers):
        alike.setdefault((layer, bool(every) and index % every == 0), []).append(index)
    embedding, head = lower_root(decoder, target)
    *before, loss = _steps((head,), ("head",), target)
    if decoder.head.vocabulary is not None and decoder.head.uses_embedding:
        loss = replace(loss, weights=(_weight(decoder.head.vocabulary, target), *loss.weights))
    loss = replace(loss, forward=(*loss.forward, *_sent(loss_messages(run, target))))
    return (
        ShownBlock(title="embedding", numbers=(), steps=_steps((embedding,), ("embedding",), target)),
        *(
            _of_layer(layer, numbers, run, target, Recompute(run.training.recompute if again else Recompute.NONE))
            for (layer, again), numbers in alike.items()
        ),
        ShownBlock(title="head", numbers=(), steps=(*before, loss)),
    )


def _of_layer(layer: Layer, numbers: list[int], run: Candidate, target: Target, mode: Recompute) -> ShownBlock:
    again = f", recomputed ({mode})" if mode is not Recompute.NONE else ""
    return ShownBlock(
        title=f"{_in_words(numbers)}: {_kinds(run.model.layer(numbers[0]))}{again}",
        numbers=tuple(numbers),
        steps=_steps(
            lower(layer, target), [part.name for part in layer.parts], target, mode, _repeated(layer, target, mode)
        ),
        repeats_first=mode is Recompute.FULL,
    )


def _kinds(layer: str) -> str:
    """Kinds of the parts of a layer, with the name that the module of a mixer other than attention has."""
    return " ".join(
        f"{kind} (its module: {name})" if isinstance(kind, Mixer) and "attention" not in kind else kind
        for name, kind in parts_of(layer)
    )


def _in_words(numbers: list[int]) -> str:
    """Numbers of layers in words, such as `layers 0 to 23`, `layers 0, 2 and 4` or `24 layers from 0 to 46`."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"layer {first}"
    if last - first == len(numbers) - 1:
        return f"layers {first} to {last}"
    if len(numbers) > 6:
        return f"{len(numbers)} layers from {first} to {last}"
    return f"layers {', '.join(map(str, numbers[:-1]))} and {last}"


def _repeated(layer: Layer, target: Target, mode: Recompute) -> Sequence[Step]:
    """Steps that recomputation runs again."""
    steps = [step for part in lower(layer, target) for step in part]
    if mode is Recompute.FULL:
        return run_again(layer, target, everything=target.compiled)
    if mode is Recompute.OPERATORS:
        return [step for step in steps if any(value.is_cheap for value in step.gives)]
    return [step for step in steps if step.is_core and mode is Recompute.SELECTIVE and not target.compiled]


def _steps(
    lowered: Lowered,
    parts: Sequence[str],
    target: Target,
    mode: Recompute = Recompute.NONE,
    repeated: Sequence[Step] = (),
) -> tuple[ShownStep, ...]:
    """Steps on one rank. Recomputation with `mode` runs the steps `repeated` again."""
    ids = {id(step) for step in repeated}
    summed = {value.name for of_part in lowered for step in of_part if isinstance(step, Leave) for value in step.reads}
    return tuple(
        _of_summands(_step(part, step, saves, target, mode if id(step) in ids else Recompute.NONE), summed)
        for part, steps, of_part in zip(parts, lowered, saved(lowered, target, mode), strict=True)
        for step, saves in zip(steps, of_part, strict=True)
    )


def _step(part: str, step: Step, saves: tuple[Value, ...], target: Target, mode: Recompute) -> ShownStep:
    """One step. `mode` is the recomputation that runs it again."""

    def messages(phase: Phase, found: Iterable[Message], *, again: bool = False) -> tuple[Collective, ...]:
        return _sent(collective_of(target, Sent(phase, step.name, message, again)) for message in found)

    repeats = {Recompute.FULL: step.forward, Recompute.SELECTIVE: step.repeated}
    return ShownStep(
        part=part,
        action=_action(step),
        name=step.name,
        weights=tuple(_weight(parameter, target) for parameter in step.parameters),
        reads=tuple(_tensor(value, target) for value in step.reads),
        gives=tuple(_tensor(value, target) for value in step.gives),
        saves=tuple(_tensor(value, target) for value in saves),
        forward=messages(Phase.FORWARD, step.forward),
        backward=messages(Phase.BACKWARD, step.backward),
        again=messages(Phase.BACKWARD, repeats.get(mode, ()), again=True),
        runs_again=mode is not Recompute.NONE,
    )


def _of_summands(step: ShownStep, summed: set[str]) -> ShownStep:
    """Mark the results that g adds up over the ranks."""
    return replace(step, gives=tuple(replace(each, is_summand=each.name in summed) for each in step.gives))


def _sent(messages: Iterable[Collective]) -> tuple[Collective, ...]:
    """Messages that are sent: an axis with one rank sends nothing."""
    return tuple(message for message in messages if message.ranks > 1 and message.count)


def _action(step: Step) -> str:
    if isinstance(step, Enter | Leave):
        return "f" if isinstance(step, Enter) else "g"
    return " ".join(re.findall("[A-Z][a-z]*", type(step).__name__)).lower()


def _tensor(value: Value, target: Target) -> Tensor:
    alone = replace(_ALONE, sequences=target.sequences, length=target.length, predicted=target.predicted)
    shape, whole = ((value.num_rows(on), value.local_width(on)) for on in (target, alone))
    cuts = [
        name for name, is_cut in (("tokens", shape[0] < whole[0]), (_between(value), shape[1] < whole[1])) if is_cut
    ]
    return Tensor(value.name, shape, whole, " and ".join(cuts), value.bytes(target))


def _between(value: Value) -> str:
    return "heads" if value.heads else "columns"


def _weight(parameter: Parameter, target: Target) -> Tensor:
    local, dim = parameter.on(target), parameter.dim_cut(target.tensor)
    cuts = ["experts"] if parameter.stacked and target.expert > 1 else []
    if dim is not None and target.tensor > 1:
        cuts.append(_CUTS[parameter.cut])
    whole = parameter.padded_shape(target.tensor)
    return Tensor(parameter.name, local.shape, whole, " and ".join(cuts), elements(local.shape) * target.sums_bytes)
