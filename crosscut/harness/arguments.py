"""Arguments of lm-eval's own command line for a model, `--model_args`, `--device`, `--batch_size`, in our words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from crosscut.config import ConfigError, Layout, LayoutError
from crosscut.config.checks import listed, require_one_of
from crosscut.config.precision import OF_MODELS
from crosscut.evaluation.ranks import Machinery
from crosscut.launch.processes import started_world_size
from crosscut.parallel.mesh import world_size_message

MODEL = "crosscut"
"""Name of our models in lm-eval."""

_NAMES = ("pretrained", "tensor", "data", "precision")
"""Names of the arguments that `--model_args` may hold."""

_UNTOLD = "cuda:0"
"""The device that lm-eval's command hands on where none is given, also on a machine without one."""


@dataclass(frozen=True)
class ModelArguments:
    """Model to evaluate, and the machinery that it runs on."""

    place: str
    """A run's folder, one of its checkpoints, or a Hugging Face folder."""
    on: Machinery
    batch_size: int

    @classmethod
    def of(cls, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> "ModelArguments":
        """From `--model_args` and the further options that lm-eval hands to a model; None stands for none given.

        Raises `ConfigError` or `LayoutError`, whatever is wrong in words of lm-eval's options.
        """
        given = {name: value for name, value in {**arguments, **options}.items() if value is not None}
        most, batch_size = given.pop("max_batch_size", None), str(given.pop("batch_size", 1))
        if most is not None or not batch_size.isdecimal() or int(batch_size) < 1:
            told = batch_size if most is None else f"{batch_size}, at most {most}"
            raise ConfigError(f"`--batch_size` must be one number above 0, but is {told}. Try 8.")
        device = given.pop("device", "auto")
        device = "auto" if device == _UNTOLD else device  # which of several is each rank's own affair
        require_one_of("--device", device, ("auto", "cpu", "cuda"))
        if unknown := sorted(given.keys() - set(_NAMES)):
            raise ConfigError(
                f"`--model_args` must be of {listed(f'`{name}`' for name in _NAMES)}, but has `{unknown[0]}`."
            )
        if not given.get("pretrained"):
            raise ConfigError("`--model_args` must name a model, but does not. Try pretrained=runs/demo.")
        precision = given.get("precision", "float32")
        require_one_of("precision", precision, OF_MODELS)
        layout = Layout(tensor=_ranks("tensor", given), data=_ranks("data", given))
        on = Machinery(layout=layout, device=device, precision=precision)
        return cls(str(given["pretrained"]), on, int(batch_size))

    def require_ranks(self) -> None:
        """Raise `LayoutError` where other ranks are started than the layout asks for."""
        if self.on.layout.world_size != started_world_size():
            raise LayoutError(
                f"{world_size_message(self.on.layout, started_world_size())} `crosscut lm-eval` starts them by itself, "
                "`lm_eval` under torchrun."
            )


def _ranks(axis: str, given: Mapping[str, Any]) -> int:
    number = given.get(axis, 1)
    if type(number) is not int or number < 1:
        raise ConfigError(f"`{axis}` in `--model_args` must be a number of ranks above 0, but is {number!r}.")
    return number


def refuse_chat_template() -> NoReturn:
    """Raise `ConfigError`."""
    raise ConfigError(
        f"`--apply_chat_template` must be left out with `--model {MODEL}`, which is asked each text as it is."
    )


def refuse_cache() -> NoReturn:
    """Raise `ConfigError`, where there are several ranks."""
    raise ConfigError(
        f"`--use_cache` must be left out where `--model {MODEL}` is on several ranks: lm-eval gives each rank a cache "
        "of its own, and ranks that found different answers there would wait for each other forever."
    )
