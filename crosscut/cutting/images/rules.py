"""Layers over images that a plan can list, and the checks of such a plan before a module changes."""

from collections.abc import Callable, Mapping

from torch import nn

from crosscut.config import ConfigError, LayoutError
from crosscut.cutting.plan import IMAGES, Rule, Style
from crosscut.parallel import ParallelMesh
from crosscut.parallel.spatial import (
    SpatialAdaptiveAvgPool,
    SpatialAdaptiveMaxPool,
    SpatialAvgPool,
    SpatialBatchNorm,
    SpatialConv1d,
    SpatialConv2d,
    SpatialConv3d,
    SpatialConvTranspose1d,
    SpatialConvTranspose2d,
    SpatialConvTranspose3d,
    SpatialGroupNorm,
    SpatialMaxPool,
    SpatialUpsample,
)
from crosscut.parallel.spatial.parameters import require_directions_of, require_kind

_OF_PARAMETERS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.Conv1d: SpatialConv1d,
    nn.Conv2d: SpatialConv2d,
    nn.Conv3d: SpatialConv3d,
    nn.ConvTranspose1d: SpatialConvTranspose1d,
    nn.ConvTranspose2d: SpatialConvTranspose2d,
    nn.ConvTranspose3d: SpatialConvTranspose3d,
    nn.BatchNorm1d: SpatialBatchNorm,
    nn.BatchNorm2d: SpatialBatchNorm,
    nn.BatchNorm3d: SpatialBatchNorm,
    nn.GroupNorm: SpatialGroupNorm,
}
_OTHERS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.MaxPool1d: SpatialMaxPool,
    nn.MaxPool2d: SpatialMaxPool,
    nn.MaxPool3d: SpatialMaxPool,
    nn.AvgPool1d: SpatialAvgPool,
    nn.AvgPool2d: SpatialAvgPool,
    nn.AvgPool3d: SpatialAvgPool,
    nn.AdaptiveMaxPool1d: SpatialAdaptiveMaxPool,
    nn.AdaptiveMaxPool2d: SpatialAdaptiveMaxPool,
    nn.AdaptiveMaxPool3d: SpatialAdaptiveMaxPool,
    nn.AdaptiveAvgPool1d: SpatialAdaptiveAvgPool,
    nn.AdaptiveAvgPool2d: SpatialAdaptiveAvgPool,
    nn.AdaptiveAvgPool3d: SpatialAdaptiveAvgPool,
    nn.Upsample: SpatialUpsample,
}


def kind_of(module: nn.Module) -> type[nn.Module] | None:
    """Kind of a layer that mixes positions and has a spatial counterpart. None for other modules."""
    return next((kind for kind in (*_OF_PARAMETERS, *_OTHERS) if isinstance(module, kind)), None)


def spatial_layer(module: nn.Module, mesh: ParallelMesh) -> nn.Module | None:
    """Return the spatial layer with the settings of a layer. None for modules that have no spatial counterpart."""
    kind = kind_of(module)
    if kind is None:
        return None
    return _OTHERS[kind](module) if kind in _OTHERS else _OF_PARAMETERS[kind](module, mesh=mesh)


def require_listable(name: str, module: nn.Module, rule: Rule, num_directions: int) -> None:
    """Raise `ConfigError` unless a module can have the style of its rule on a grid of `num_directions`."""
    kind = kind_of(module)
    if kind is None:
        if rule.style is Style.SPATIAL:
            raise ConfigError(
                f"`{name}` must be a convolution, pooling, batch norm, group norm or upsampling of PyTorch for the "
                f"style `{rule.style}`, but is a {type(module).__name__}. Remove the rule: code that computes each "
                "position on its own needs none."
            )
        return
    try:
        require_kind(module, kind)
        if kind in _OTHERS:
            _OTHERS[kind](module)
        if kind.__name__.endswith("d"):
            require_directions_of(kind, num_directions)
    except LayoutError as error:
        raise ConfigError(f"`{name}` cannot have the style `{rule.style}`. {error}") from None


def require_listed(module: nn.Module, rules: Mapping[str, Rule]) -> None:
    """Raise `ConfigError` if a plan cuts images, but a layer that mixes positions has no rule."""
    if not any(rule.style in IMAGES for rule in rules.values()):
        return
    for name, each in module.named_modules():
        if kind_of(each) is not None and name not in rules:
            raise ConfigError(
                f"`{name}` must have a rule, because it is a {type(each).__name__}, which mixes positions, but has "
                "none. Give it the style `spatial`, or `replicate` if it computes on whole images."
            )
