"""Settings of an adapter in PEFT's format (`adapter_config.json`).

PEFT 0.21 writes about forty settings. Each of them is in one of three tables: settings that Crosscut reads, settings
with which Crosscut supports only some values, and settings that do not change a trained adapter's weights. A setting in
none of the tables is ignored, and the user is told.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosscut.config import CheckpointError, ConfigError
from crosscut.config.checks import shown
from crosscut.config.system.files import load_json
from crosscut.pretrained.module_patterns import ModulePatterns

CONFIG_NAME = "adapter_config.json"

_READ: Mapping[str, Any] = {"r": 8, "lora_alpha": 8, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
"""Settings that Crosscut reads, with PEFT's defaults. A pattern may also be null."""

_ONLY: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    **dict.fromkeys(("enable_lora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"), (None,)),
}
"""Settings with which Crosscut supports only the values listed here. A missing setting has the first value. The other
values of `init_lora_weights` change the model's own weights, too, when PEFT loads the adapter."""

_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type",
    "target_modules", "exclude_modules", "layers_pattern", "layers_to_transform", "ensure_weight_tying",
    "fan_in_fan_out", "lora_dropout", "megatron_config", "megatron_core", "merge_weights", "qalora_group_size",
    "runtime_config", "corda_config", "eva_config", "loftq_config", "lora_ga_config", "velora_config",
})  # fmt: skip
"""Settings that name modules (the tensors in the file do, too) or belong to the training of the adapter."""
_MOST_NAMED = 5


@dataclass(frozen=True)
class AdapterSettings:
    """Ranks and scales of an adapter. Create the object with `read_settings`."""

    path: Path
    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    unknown: tuple[str, ...]
    """Settings that Crosscut does not know and ignores."""
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

    @property
    def message_about_unknown(self) -> str:
        """Line for the user about the settings in `unknown`. Empty if there are none."""
        if not self.unknown:
            return ""
        rest = len(self.unknown) - _MOST_NAMED
        names = ", ".join(f"`{shown(name)[1:-1]}`" for name in self.unknown[:_MOST_NAMED])
        more = f" and {rest:,} more" if rest > 0 else ""
        return f"Crosscut does not know these settings in `{self.path}` and ignores them: {names}{more}."

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
    for key, allowed in _ONLY.items():
        value = table.get(key, allowed[0])
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise ConfigError(
                f"`{key}` in `{path}` must be {json.dumps(allowed[0])}, but is {shown(value)}. Crosscut does not "
                "support this value. Merge the adapter with PEFT (`merge_and_unload`), and load the merged model."
            )
    read = {key: default if (value := table.get(key)) is None else value for key, default in _READ.items()}
    for key in ("r", "use_rslora"):
        _require(path, key, read[key], type(_READ[key]))
    _require_number(path, "lora_alpha", read["lora_alpha"])
    for key, require in (("rank_pattern", _require_rank), ("alpha_pattern", _require_number)):
        _require(path, key, read[key], dict)
        for name, value in read[key].items():
            require(path, f"{key}.{name[:80]}", value)
    _require_rank(path, "r", read["r"])
    unknown = tuple(key for key in table if key not in _READ and key not in _ONLY and key not in _WITHOUT_EFFECT)
    return AdapterSettings(path=path, unknown=unknown, **read)


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
