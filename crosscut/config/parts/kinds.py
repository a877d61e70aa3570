"""Layers of a model by the names of their parts' kinds, such as "attention swiglu"."""

from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from crosscut.config.checks import Choice, divisors, listed, shown
from crosscut.config.errors import ConfigError
from crosscut.config.system.wording import counted

_MOST_PARTS = 8
"""Maximum number of parts of a layer."""


class Mixer(Choice):
    """Kind of a part that mixes the tokens of a sequence."""

    ATTENTION = "attention"
    SLIDING_ATTENTION = "sliding_attention"
    NOPE_ATTENTION = "nope_attention"
    SPARSE_ATTENTION = "sparse_attention"
    LATENT_ATTENTION = "latent_attention"
    MAMBA = "mamba"
    MAMBA2 = "mamba2"
    GATED_DELTA = "gated_delta"


class FeedForward(Choice):
    """Kind of a part that treats each token alone: an MLP, or a mixture of experts."""

    GELU = "gelu"
    GELU_EXACT = "gelu_exact"
    RELU2 = "relu2"
    SWIGLU = "swiglu"
    GEGLU = "geglu"
    EXPERTS = "experts"


PartKind = Mixer | FeedForward

ATTENTIONS = (Mixer.ATTENTION, Mixer.SLIDING_ATTENTION, Mixer.NOPE_ATTENTION, Mixer.SPARSE_ATTENTION)
"""Kinds of attention that have the same matrices."""

MLPS = tuple(kind for kind in FeedForward if kind is not FeedForward.EXPERTS)
"""Kinds of MLPs."""

KINDS: dict[str, PartKind] = {str(kind): kind for kinds in (Mixer, FeedForward) for kind in kinds}
"""Kinds of parts by their names."""


def gated(kind: FeedForward) -> bool:
    """Whether an MLP of this kind has a third matrix, as a gate."""
    return kind in (FeedForward.SWIGLU, FeedForward.GEGLU)


def parts_of(layer: str) -> tuple[tuple[str, PartKind], ...]:
    """Return the name and the kind of each part of a layer. The name is `attention` for a part that mixes tokens and
    `mlp` for one that does not, whatever their kinds are. A second part of the same name is `attention_2`, and so on.
    """
    parts: list[tuple[str, PartKind]] = []
    counts = dict.fromkeys(("attention", "mlp"), 0)
    for kind in map(KINDS.__getitem__, layer.split()):
        name = "attention" if isinstance(kind, Mixer) else "mlp"
        counts[name] += 1
        parts.append((name if counts[name] == 1 else f"{name}_{counts[name]}", kind))
    return tuple(parts)


def pattern_of(layers: Sequence[str]) -> str:
    """Return the layers of a model in words: "24 layers of attention and swiglu", or, if the layers differ, the number
    of parts of each kind: "52 layers: 24 x mamba2, 4 x attention, 24 x relu2". `layers` has an entry for each layer.
    """
    number = counted(len(layers), "layer")
    if len(set(layers)) == 1:
        return f"{number} of {' and '.join(layers[0].split())}"
    parts = Counter(kind for layer in layers for kind in layer.split())
    return f"{number}: {', '.join(f'{count} x {kind}' for kind, count in parts.items())}"


def checked_layers(layers: Sequence[str]) -> tuple[str, ...]:
    """Return the value of `model.layers` as the shortest list that gives the same layers when it is repeated. Raises
    `ConfigError` for an unknown kind, and for an empty list or layer.
    """
    if isinstance(layers, str) or not all(isinstance(layer, str) for layer in layers):
        raise ConfigError(f"`model.layers` must be a list of strings, but is {shown(layers)}.")
    written = tuple(" ".join(layer.split()) for layer in layers)
    for layer in written:
        if not 0 < len(layer.split()) <= _MOST_PARTS or not KINDS.keys() >= set(layer.split()):
            raise ConfigError(
                f"`model.layers` must list layers of 1 to {_MOST_PARTS} parts each ({listed(KINDS)}), but has the "
                f'layer {shown(layer)}. Write for example layers = ["{_mixer_meant(layer)} swiglu"].'
            )
    if not written:
        raise ConfigError(
            '`model.layers` must list at least one layer, but is empty. Write for example layers = ["attention gelu"].'
        )
    return _shortest(written)


def _mixer_meant(layer: str) -> str:
    """Return the mixer that a layer seems to name. Attention if it names none."""
    near = (mixer for word in layer.split()[:_MOST_PARTS] for mixer in get_close_matches(word, [*Mixer], 1))
    return next(near, Mixer.ATTENTION)


_PLACES = ("before", "output")
"""Places of norms that may differ from layer to layer."""


def checked_places(places: Sequence[str]) -> tuple[str, ...]:
    """Return the value of `model.norm_places` as the shortest list that gives the same places when it is repeated.
    Raises `ConfigError` for a place that may not differ from layer to layer.
    """
    if isinstance(places, str) or not all(place in _PLACES for place in places):
        raise ConfigError(
            f"`model.norm_places` must be a list of {listed(map(repr, _PLACES))}, but is {shown(places)}. Norms after "
            'the residual sums are the same in all layers: set model.norm_place="after".'
        )
    return _shortest(tuple(places))


def _shortest(items: tuple[str, ...]) -> tuple[str, ...]:
    """Return the shortest list that gives the same items when it is repeated."""
    return next(items[:n] for n in divisors(len(items)) if items == items[:n] * (len(items) // n))


def layers_of_mlps(mlps: object) -> list[str]:
    """Return `model.layers` in place of the old keys `model.mlp` and `model.mlp_pattern`, whose value was a kind of MLP
    or a list of kinds. Empty for a value that these keys did not have.
    """
    kinds = mlps.split(",") if isinstance(mlps, str) else mlps
    if not isinstance(kinds, list | tuple) or not kinds or not all(kind in [*MLPS] for kind in kinds):
        return []
    return [*checked_layers([f"attention {kind}" for kind in kinds])]


def with_layers(model: Mapping[str, object]) -> dict[str, object]:
    """Return a model's settings with `layers` in place of the keys `mlp` and `mlp_pattern` of older checkpoints."""
    layers = layers_of_mlps(model.get("mlp_pattern") or model.get("mlp"))
    kept = {key: value for key, value in model.items() if key not in ("mlp", "mlp_pattern")}
    return {**kept, "layers": layers} if layers else dict(model)
