"""Model arguments of lm-eval's own command line (`--model_args`, `--device`, `--batch_size`), converted to settings of
Crosscut.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from crosscut.config import ConfigError, Layout, LayoutError
from crosscut.config.checks import listed, require_one_of
from crosscut.config.precision import OF_MODELS
from crosscut.evaluation.ranks import Machinery
from crosscut.launch.processes import started_world_size
from crosscut.parallel.mesh import world_size_message

MODEL = "crosscut"
"""Name of Crosscut's models in lm-eval."""

_NAMES = ("pretrained", "tensor", "data", "precision")
"""Names of the arguments that `--model_args` may contain."""

_UNTOLD = "cuda:0"
"""Device that lm-eval's command passes if the user gives no device, even on a machine without GPUs."""


@dataclass(frozen=True)
class ModelArguments:
    """The model to evaluate, with its layout, device and batch size."""

    place: str
    """A run's folder, one of its checkpoints, or a Hugging Face folder."""
    on: Machinery
    batch_size: int

    @classmethod
    def of(cls, arguments: Mapping[str, object], options: Mapping[str, object]) -> "ModelArguments":
        """Parse `--model_args` (`arguments`) and the other options that lm-eval passes to a model (`options`). An
        option that is None counts as not given.

        Raises `ConfigError` or `LayoutError` for invalid values. The messages name lm-eval's options.
        """
        given = {name: value for name, value in {**arguments, **options}.items() if value is not None}
        most, batch_size = given.pop("max_batch_size", None), str(given.pop("batch_size", 1))
        if most is not None or not batch_size.isdecimal() or int(batch_size) < 1:
            told = batch_size if most is None else f"{batch_size} with `--max_batch_size {most}`"
            raise ConfigError(f"`--batch_size` must be one whole number above 0, but is {told}. Try `--batch_size 8`.")
        device = given.pop("device", "auto")
        device = "auto" if device == _UNTOLD else device  # each rank chooses its own GPU
        require_one_of("--device", device, ("auto", "cpu", "cuda"))
        if unknown := sorted(given.keys() - set(_NAMES)):
            raise ConfigError(
                f"`--model_args` may only contain {listed(f'`{name}`' for name in _NAMES)}, but has `{unknown[0]}`. "
                f"Remove `{unknown[0]}`."
            )
        if not given.get("pretrained"):
            raise ConfigError("`--model_args` must name a model, but does not. Try pretrained=runs/demo.")
        precision = given.get("precision", "float32")
        require_one_of("precision", precision, OF_MODELS)
        layout = Layout(tensor=_ranks("tensor", given), data=_ranks("data", given))
        on = Machinery(layout=layout, device=str(device), precision=str(precision))
        return cls(str(given["pretrained"]), on, int(batch_size))

    def require_ranks(self) -> None:
        """Raise `LayoutError` unless the number of started ranks is equal to the number of ranks in the layout."""
        if self.on.layout.world_size != started_world_size():
            raise LayoutError(
                f"{world_size_message(self.on.layout, started_world_size())} `crosscut lm-eval` starts the processes "
                "by itself, but lm-eval's own command `lm_eval` does not: start `lm_eval` under torchrun."
            )


def _ranks(axis: str, given: Mapping[str, object]) -> int:
    number = given.get(axis, 1)
    if type(number) is not int or number < 1:
        raise ConfigError(
            f"`{axis}` in `--model_args` must be a whole number of ranks above 0, but is {number!r}. Try {axis}=1."
        )
    return number


def refuse_chat_template() -> NoReturn:
    """Raise the `ConfigError` for `--apply_chat_template`."""
    raise ConfigError(
        f"`--apply_chat_template` must be omitted with `--model {MODEL}`. Crosscut scores every text unchanged. Remove "
        "`--apply_chat_template`."
    )


def refuse_cache() -> NoReturn:
    """Raise the `ConfigError` for `--use_cache` on several ranks."""
    raise ConfigError(
        f"`--use_cache` must be omitted if `--model {MODEL}` runs on several ranks. lm-eval gives each rank a cache of "
        "its own, and ranks with different cached answers would wait for each other forever. Remove `--use_cache`."
    )
