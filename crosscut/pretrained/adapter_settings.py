"""Settings of an adapter in PEFT's format (`adapter_config.json`).

PEFT 0.21 writes about forty settings. The table `ADAPTER` (`config.published.keys`) says what Crosscut does with each.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosscut.config import CheckpointError, ConfigError
from crosscut.config.checks import shown
from crosscut.config.published.keys import ADAPTER
from crosscut.config.system.files import load_json
from crosscut.pretrained.module_patterns import ModulePatterns

CONFIG_NAME = "adapter_config.json"

_READ: Mapping[str, Any] = {"r": 8, "lora_alpha": 8, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
"""Settings that Crosscut reads, with PEFT's defaults. A pattern may also be null."""

_CHOOSING = ("target_modules", "exclude_modules", "layers_to_transform")


@dataclass(frozen=True)
class AdapterSettings:
    """Ranks and scales of an adapter. Create the object with `read_settings`."""

    path: Path
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    base: str
    """Name of the model with which the adapter was trained. Empty if the file does not give it."""
    modules: Mapping[str, Any]
    """Settings that choose the modules with an adapter (`_CHOOSING`), as the file gives them."""
    notice: str
    """Line for the user about settings that Crosscut does not know. Empty if there are none."""
    _patterns: dict[str, ModulePatterns] = field(default_factory=dict, init=False, compare=False)

    def rank(self, module: str) -> int:
        """LoRA rank r of a module. Raises `ConfigError` if the patterns are not supported."""
        rank: int = self._value("rank_pattern", module, self.r)
        return rank

    def scale(self, module: str) -> float:
        """Factor of B A for a module. Raises `ConfigError` if the patterns are not supported."""
        rank = self.rank(module)
        alpha: float = self._value("alpha_pattern", module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def excluded_by(self, module: str) -> str:
        """Return the setting that says that a module has no adapter. PEFT then ignores the module's tensors. Empty if
        the module has an adapter, and if a regular expression is too complicated to be matched.
        """
        target, excluded, layers = (self.modules.get(key) for key in _CHOOSING)
        if excluded and self._names("exclude_modules", excluded, module):
            return "exclude_modules"
        if target is not None and target != "all-linear" and not self._names("target_modules", target, module):
            return "target_modules"
        numbers = layers if isinstance(layers, list) else [] if layers is None else [layers]
        number = re.search(r"\.(\d{1,9})\.", module)
        is_outside = numbers and not isinstance(target, str) and number and int(number[1]) not in numbers
        return "layers_to_transform" if is_outside else ""

    def _names(self, key: str, named: object, module: str) -> bool:
        """Whether a list of ends of module names, or a regular expression, names a module."""
        if isinstance(named, list):
            return any(f".{module}".endswith(f".{end}") for end in named)
        try:
            if key not in self._patterns:
                self._patterns[key] = ModulePatterns([str(named)], whole=True)
            return self._patterns[key].first(module) is not None
        except ValueError:
            return key == "target_modules"

    def _value(self, table: str, module: str, default: Any) -> Any:
        try:
            if table not in self._patterns:
                self._patterns[table] = ModulePatterns(getattr(self, table))
            key = self._patterns[table].first(module)
        except ValueError as reason:
            raise ConfigError(
                f"`{table}` in `{self.path}` must have ends of module names, or simple regular expressions, as keys, "
                f"but {reason}. Merge the adapter with PEFT (`merge_and_unload`), and load the merged model."
            ) from None
        return default if key is None else getattr(self, table)[key]


def read_settings(path: Path) -> AdapterSettings:
    """Read `adapter_config.json`. Raises `CheckpointError` if the file cannot be read, and `ConfigError` for a setting
    of a wrong type and for a value that Crosscut does not support.
    """
    table = _table(path)
    notice = ADAPTER.check(table, path)
    read = {key: default if (value := table.get(key)) is None else value for key, default in _READ.items()}
    for key in ("r", "use_rslora"):
        _require(path, key, read[key], type(_READ[key]))
    _require_number(path, "lora_alpha", read["lora_alpha"])
    for key, require in (("rank_pattern", _require_rank), ("alpha_pattern", _require_number)):
        _require(path, key, read[key], dict)
        for name, value in read[key].items():
            require(path, f"{key}.{name[:80]}", value)
    _require_rank(path, "r", read["r"])
    base = table.get("base_model_name_or_path")
    modules = {key: table.get(key) for key in _CHOOSING}
    return AdapterSettings(
        path=path, base=base if isinstance(base, str) else "", modules=modules, notice=notice, **read
    )


def _table(path: Path) -> dict[str, Any]:
    try:
        table = load_json(path)
    except OSError as error:
        raise CheckpointError(
            f"`{path.parent}` must be the folder of an adapter with `{path.name}`, but the file cannot be read: "
            f"{error.strerror}. Check the path."
        ) from None
    except ValueError:
        table = None
    if not isinstance(table, dict):
        raise CheckpointError(f"`{path}` must hold a JSON object, but does not. Download the adapter again.")
    return table


_NAMES = {bool: "true or false", int: "a whole number", dict: "a table"}


def _require(path: Path, key: str, value: object, kind: type) -> None:
    if type(value) is not kind:
        raise ConfigError(f"`{key}` in `{path}` must be {_NAMES[kind]}, but is {shown(value)}. Correct the file.")


def _require_rank(path: Path, key: str, value: object) -> None:
    _require(path, key, value, int)
    if not (isinstance(value, int) and 1 <= value < 1 << 31):
        raise ConfigError(f"`{key}` in `{path}` must be at least 1 and below 2^31, but is {shown(value)}.")


def _require_number(path: Path, key: str, value: object) -> None:
    if type(value) is bool or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise ConfigError(f"`{key}` in `{path}` must be a number below 1e30, but is {shown(value)}. Correct the file.")
