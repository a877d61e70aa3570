"""Steps from the hidden states of a text to its embedding, from the files that sentence-transformers writes beside a
model. `modules.json` lists the steps in their order, and names the folder of each step:

    Transformer -> Pooling -> Dense and Normalize, in any order and number

The files are read as version 6.2.0 of the library reads them, with the spellings of its older versions. A module or a
value that Crosscut does not compute is refused by its name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosscut.config.checks import listed, shown
from crosscut.config.errors import ConfigError
from crosscut.config.published.keys.sentences import DENSE, MODULES, NORMALIZE, POOLING, SENTENCE, TRANSFORMER
from crosscut.config.system.files import json_or_none, read_json

MODULES_FILE = "modules.json"
SENTENCE_FILE = "config_sentence_transformers.json"
TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file with the settings of the first module. The library reads the first one that has content."""
MODULE_FILE = "config.json"
"""Name of a module's own file, in the module's folder."""

_LIBRARY = "sentence_transformers."
_FIRST, _SECOND = "Transformer", "Pooling"
_REMEDY = "Choose another model, or compute the embeddings with sentence-transformers."

MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Modes of pooling, keyed by their older spelling, in the order in which the library joins their results."""

ACTIVATIONS = (
    "Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU", "ELU", "CELU", "SELU", "LeakyReLU", "ReLU6", "Mish",
    "Softplus", "Softsign", "Hardtanh", "Hardswish", "Hardsigmoid", "LogSigmoid", "Tanhshrink",
)  # fmt: skip
"""Classes of `torch.nn` that may follow a dense layer, with their default arguments. None of them has parameters."""
_DEFAULT_ACTIVATION = "torch.nn.modules.activation.Tanh"


@dataclass(frozen=True, kw_only=True)
class Normalize:
    """Step that scales an embedding to length 1."""


@dataclass(frozen=True, kw_only=True)
class Dense:
    """Step that multiplies an embedding by a matrix, and applies a function to each element."""

    folder: Path
    """Folder of the layer's weights."""
    num_inputs: int
    num_outputs: int
    has_bias: bool = True
    activation: str = "Tanh"
    """One of `ACTIVATIONS`."""
    has_residual: bool = False
    """Whether the step's input is added to its result, through a second matrix if the sizes differ."""


@dataclass(frozen=True, kw_only=True)
class SentenceSteps:
    """Steps that make an embedding. The defaults are those of a model without a list of modules."""

    poolings: tuple[str, ...] = ("mean",)
    """Modes of pooling, whose results are joined."""
    after: tuple[Dense | Normalize, ...] = (Normalize(),)
    """Steps after the pooling."""
    num_dimensions: int | None = None
    """Number of elements that an embedding keeps at the end; None for all."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that precede a text, by name."""
    default_prompt: str | None = None
    """Name of the prompt of every text; None for no prompt."""
    skips_prompt: bool = False
    """Whether the tokens of the prompt are left out of the pooling."""
    max_tokens: int | None = None
    """Maximum number of tokens of a text; None if only the model limits it."""
    lower_case: bool = False
    """Whether texts are put in lower case before the tokenizer reads them."""
    notices: tuple[str, ...] = ()
    """Lines for the user about keys that are ignored."""

    @property
    def is_normalized(self) -> bool:
        """Whether every embedding has the length 1."""
        return bool(self.after) and isinstance(self.after[-1], Normalize) and self.num_dimensions is None

    def size(self, hidden_size: int) -> int:
        """Number of elements of an embedding, for a model with this hidden size."""
        size = len(self.poolings) * hidden_size
        for step in self.after:
            size = step.num_outputs if isinstance(step, Dense) else size
        return size if self.num_dimensions is None else min(size, self.num_dimensions)

    def prompt(self, name: str | None = None) -> str:
        """Return the prompt with a name, by default the prompt of every text. Raises `ConfigError` for a name that the
        model does not have.
        """
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = f"one of {', '.join(map(repr, self.prompts))}" if self.prompts else "left out"
            raise ConfigError(
                f"`prompt_name` must be {known} (the prompts of the model's `{SENTENCE_FILE}`), but is {shown(name)}."
            )
        return self.prompts[name]


def read_steps(folder: Path) -> SentenceSteps:
    """Read the steps from the files in a model's folder. Raises `ConfigError` for a file that is missing or damaged,
    and for a module or value that Crosscut does not support.
    """
    if not is_sentence_encoder(folder):
        _require_none(folder)
        return SentenceSteps()
    modules = _modules(folder)
    notices = [MODULES.notice({key: None for module in modules for key in module}, folder / MODULES_FILE)]
    kinds = [_kind(module, folder) for module in modules]
    if kinds[:2] != [_FIRST, _SECOND] or {_FIRST, _SECOND} & {*kinds[2:]}:
        raise _refused(folder, "list one Transformer, one Pooling, and then Dense and Normalize", ", ".join(kinds))
    fields: dict[str, Any] = {"after": ()}
    for kind, module in zip(kinds, modules, strict=True):
        own, notice = _READERS[kind](_folder_of(module, folder))
        notices.append(notice)
        fields = {**fields, **own, "after": (*fields["after"], *own.get("after", ()))}
    own, notice = _sentence(folder / SENTENCE_FILE)
    steps = SentenceSteps(**fields, **own, notices=tuple(filter(None, (*notices, notice))))
    steps.prompt()
    return steps


def is_sentence_encoder(folder: Path | None) -> bool:
    """Whether a folder has a list of modules. False for None."""
    return folder is not None and (folder / MODULES_FILE).is_file()


def module_files(folder: Path) -> Iterator[str]:
    """Yield the names of the files of sentence-transformers in a model's folder, relative to it. Yields nothing if the
    model has no list of modules. Raises the errors of `read_steps`.
    """
    if is_sentence_encoder(folder):
        read_steps(folder)
        found = [MODULES_FILE, SENTENCE_FILE, *TRANSFORMER_FILES]
        for module in _modules(folder)[1:]:
            at = _folder_of(module, folder)
            found += [f"{at.relative_to(folder)}/{name}" for name in (MODULE_FILE, "model.safetensors")]
        yield from (name for name in found if (folder / name).is_file())


def _require_none(folder: Path) -> None:
    """Raise `ConfigError` if a folder without a list of modules has another file of sentence-transformers."""
    for name in (SENTENCE_FILE, *TRANSFORMER_FILES, f"1_Pooling/{MODULE_FILE}"):
        if (folder / name).is_file():
            raise ConfigError(
                f"`{folder / MODULES_FILE}` must exist beside `{name}`, but is missing. It lists the steps of the "
                f"embedding. Copy it from the place where the folder comes from, or remove `{name}` for the "
                "normalised mean of the tokens."
            )


def _modules(folder: Path) -> list[dict[str, Any]]:
    path = folder / MODULES_FILE
    found = json_or_none(path)
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        raise ConfigError(f"`{path}` must be a JSON list of modules, but is not. Download the file again.")
    names = [str(module.get("name")) for module in found]
    if len({*names}) < len(names):  # the library keeps the last of two modules with the same name
        raise _refused(folder, "give each module a `name` of its own", ", ".join(names))
    return found


def _kind(module: Mapping[str, Any], folder: Path) -> str:
    """Name of a module's class. Raises `ConfigError` for a class that Crosscut does not compute, or that is not the
    library's own.
    """
    kind = str(module.get("type"))
    name = kind.rpartition(".")[2]
    if not kind.startswith(_LIBRARY) or name not in _READERS:
        raise ConfigError(
            f"`type` in `{folder / MODULES_FILE}` must be a module of sentence-transformers, {listed(_READERS)}, but "
            f"is {shown(kind)}. {_REMEDY}"
        )
    return name


def _folder_of(module: Mapping[str, Any], folder: Path) -> Path:
    """Folder of a module's files. The first module's files are in the model's folder, and no other module's are."""
    path, is_first = module.get("path"), str(module.get("type")).endswith(f".{_FIRST}")
    inside = isinstance(path, str) and (folder / path).resolve().is_relative_to(folder.resolve())
    if not inside or (path in ("", ".")) is not is_first:
        must = 'be "" for the Transformer' if is_first else "be a folder inside the model's"
        raise ConfigError(f"`path` in `{folder / MODULES_FILE}` must {must}, but is {shown(path)}. {_REMEDY}")
    return folder / str(path)


def _refused(folder: Path, must: str, told: str) -> ConfigError:
    return ConfigError(f"`{folder / MODULES_FILE}` must {must}, but lists {told}. {_REMEDY}")


_Read = tuple[dict[str, Any], str]
"""Fields of `SentenceSteps` from one file, and a line about the keys that are ignored."""


def _transformer(folder: Path) -> _Read:
    tables = ((folder / name, _table(folder / name)) for name in TRANSFORMER_FILES)
    path, table = next(((path, table) for path, table in tables if table), (folder, {}))
    # the library removes this key of its own arguments before it uses them
    own = {key: _untrusted(value) for key, value in table.items()}
    notice = TRANSFORMER.check(own, path) if table else ""
    fields = {"lower_case": _flag(own, "do_lower_case", False, path)}
    return {**fields, "max_tokens": _number(own, "max_seq_length", path)}, notice


def _untrusted(value: object) -> object:
    return {key: each for key, each in value.items() if key != "trust_remote_code"} if type(value) is dict else value


def _pooling(folder: Path) -> _Read:
    path, table = _required(folder)
    given = table.get("pooling_mode", [mode for old, mode in MODES.items() if table.get(old)] or "mean")
    modes, known = [given] if isinstance(given, str) else given, [*MODES.values()]
    if not isinstance(modes, list) or not modes or any(mode not in known for mode in modes):
        raise ConfigError(
            f"`pooling_mode` in `{path}` must be {listed(known)}, or a list of these, but is {shown(given)}. {_REMEDY}"
        )
    fields = {"poolings": tuple(modes), "skips_prompt": not _flag(table, "include_prompt", True, path)}
    return fields, POOLING.check(table, path)


def _dense(folder: Path) -> _Read:
    path, table = _required(folder)
    notice = DENSE.check(table, path)
    sizes = [_number(table, key, path) for key in ("in_features", "out_features")]
    if None in sizes:
        raise ConfigError(f"`in_features` and `out_features` in `{path}` must be given. Download the file again.")
    whole = str(table.get("activation_function", _DEFAULT_ACTIVATION))
    *modules, activation = whole.split(".")
    if modules[:2] != ["torch", "nn"] or modules[2:3] not in ([], ["modules"]) or activation not in ACTIVATIONS:
        raise ConfigError(
            f"`activation_function` in `{path}` must be one of {', '.join(ACTIVATIONS)} of torch.nn, but is "
            f"{shown(whole)}. {_REMEDY}"
        )
    step = Dense(
        folder=folder,
        num_inputs=sizes[0] or 0,
        num_outputs=sizes[1] or 0,
        has_bias=_flag(table, "bias", True, path),
        activation=activation,
        has_residual=_flag(table, "use_residual", False, path),
    )
    return {"after": (step,)}, notice


def _normalize(folder: Path) -> _Read:
    path = folder / MODULE_FILE
    return {"after": (Normalize(),)}, NORMALIZE.check(_table(path), path)


_READERS = {_FIRST: _transformer, _SECOND: _pooling, "Dense": _dense, "Normalize": _normalize}
"""Readers of the modules' own files, by the name of the class."""


def _sentence(path: Path) -> _Read:
    table = _table(path)
    notice = SENTENCE.check(table, path)
    prompts = table.get("prompts", {})
    if not isinstance(prompts, dict) or not all(text is None or isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"`prompts` in `{path}` must map names to texts, but is {shown(prompts)}. Correct the file.")
    default = table.get("default_prompt_name")
    texts = {name: text or "" for name, text in ({"query": "", "document": ""} | prompts).items()}
    if default is not None and not (isinstance(default, str) and default in texts):
        raise ConfigError(
            f"`default_prompt_name` in `{path}` must be the name of a prompt ({', '.join(texts)}), but is "
            f"{shown(default)}. Correct the file."
        )
    number = _number(table, "truncate_dim", path)
    return {"prompts": texts, "default_prompt": default, "num_dimensions": number}, notice


def _required(folder: Path) -> tuple[Path, dict[str, Any]]:
    path = folder / MODULE_FILE
    if not path.is_file():
        raise ConfigError(f"`{path}` must exist, but is missing. `{MODULES_FILE}` lists its module. Restore the file.")
    return path, read_json(path)


def _table(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _flag(table: Mapping[str, Any], key: str, default: bool, path: Path) -> bool:
    value = table.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"`{key}` in `{path}` must be true or false, but is {shown(value)}. Correct the file.")
    return value


def _number(table: Mapping[str, Any], key: str, path: Path) -> int | None:
    value = table.get(key)
    if value is not None and not (type(value) is int and value >= 1):
        raise ConfigError(
            f"`{key}` in `{path}` must be a whole number of at least 1, but is {shown(value)}. Correct the file."
        )
    return value
