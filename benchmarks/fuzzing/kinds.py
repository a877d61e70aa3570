"""The kinds of cases, and what must hold for those that run as commands.

Requests need a running server (`requests`). The commands on encoders and fine-tunings are in `tunings`.
"""

import bz2
import dataclasses
import gzip
import hashlib
import importlib
import json
import typing
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.fuzzing.calls import CHAT
from benchmarks.fuzzing.cases import Base, Case, files_of
from benchmarks.fuzzing.edits import BYTES, apply, copied
from benchmarks.fuzzing.metadata.run import METADATA
from benchmarks.fuzzing.repetition.run import REPETITION
from benchmarks.fuzzing.repetition.run import cases as repeated_cases
from benchmarks.fuzzing.sandbox import Outcome
from benchmarks.fuzzing.tunings import chats, encoders, tasks
from benchmarks.fuzzing.valid import REQUESTS, SOURCES
from benchmarks.fuzzing.valid_tunings import EMBEDDING_REQUESTS
from crosscut.config import CorpusConfig, RunConfig
from crosscut.config.system.markers import MARKER_FILE

_STEP = "run/checkpoints/step-00000004"
_DAMAGES = {*BYTES, "delete", "empty", "sparse"}

Oracle = Callable[[Case, Path, Path, Outcome], str]
"""Function that judges a case by the case's folder, the folder of valid inputs, and the outcome. Returns a text about
damage that the command accepted. An empty text means that there is none.
"""


@dataclass(frozen=True)
class Kind:
    """A kind of case."""

    name: str
    title: str
    count: int
    """Number of cases of a full run."""
    share: float
    """Share of the time."""
    bases: tuple[Base, ...]
    together: int = 1
    """Number of cases that one fork runs one after another."""
    oracle: Oracle = lambda *_: ""

    def base(self, case: Case) -> Base:
        """The command that a case damages."""
        return next(base for base in self.bases if base.name == case.base)


def build(base: Base, case: Case, valid: Path, folder: Path) -> tuple[str, ...]:
    """Write the files of a case to its folder, and return its arguments."""
    folder.mkdir(parents=True)
    for target, source in base.files.items():
        copied(valid / source, folder / target)
    return tuple(apply(case.edits, folder, base.arguments))


def _keys(kind: type, prefix: str = "") -> list[str]:
    """Dotted keys of a config."""
    found = []
    for field, hint in typing.get_type_hints(kind).items():
        found += _keys(hint, f"{prefix}{field}.") if dataclasses.is_dataclass(hint) else [prefix + field]
    return found


def _options(*names: str, without: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Long options of a command."""
    command: click.Command = importlib.import_module("crosscut.cli.main").commands
    for name in names:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
    return tuple(sorted({*options, "--unknown"} - {*without, "--help"}))


_RUN_KEYS, _CORPUS_KEYS = tuple(_keys(RunConfig)), tuple(_keys(CorpusConfig))
_RUN_FILES, _CORPUS_FILES = {"run.toml": "run.toml"}, {"corpus.toml": "corpus.toml"}


def _configs() -> tuple[Base, ...]:
    plan = _options("plan", without=("--calibrate", "--dry-run"))
    models = tuple(f"--model={name}" for name in ("gpt2-small", "8.3B", "llama-7b"))
    return (
        Base("train", ("train", "run.toml", "data.text=missing.txt"), _RUN_FILES, kept=3, ends_with=(2,), weight=4,
             words=_RUN_KEYS + _options("train")),
        Base("train demo", ("train", "data.text=missing.txt"), {}, kept=2, ends_with=(2,), words=_RUN_KEYS),
        Base("train any file", ("train", "data.text=missing.txt", "any.toml"), {"any.toml": "run.toml"}, kept=2,
             ends_with=(2,)),
        Base("prepare run", ("prepare", "run.toml", "data.text=missing.txt"), _RUN_FILES, kept=3, ends_with=(2,),
             words=(*_RUN_KEYS, "--explain", "--json")),
        Base("prepare corpus", ("prepare", "corpus.toml"), _CORPUS_FILES, kept=2, ends_with=(2,), weight=3,
             words=(*_CORPUS_KEYS, "--explain", "--json")),
        Base("plan", ("plan", "run.toml", "--gpus", "4", "--gpu", "h100-sxm", "--tokens", "1B", "--price", "2"),
             _RUN_FILES, kept=2, words=_RUN_KEYS + plan + models, weight=2),
        Base("plan device", ("plan", "run.toml", "--gpus", "2", "--gpu", "device.toml", "--json"),
             _RUN_FILES | {"device.toml": "device.toml"}, ("device.toml",), kept=6, words=plan),
        Base("verify", ("verify", "run.toml", "--layout", "tensor=3"), _RUN_FILES, kept=4, ends_with=(2,),
             statuses=(0, 1, 2, 65), words=_RUN_KEYS + _options("verify")),
        Base("generate", ("generate", "missing"), {"prompts.jsonl": "prompts.jsonl"}, kept=1, ends_with=(2,),
             words=(*_options("generate"), "--prompts=prompts.jsonl"), weight=2),
        Base("evaluate", ("evaluate", "missing", "--text", "prompts.jsonl"), {"prompts.jsonl": "prompts.jsonl"}, kept=1,
             ends_with=(2,), words=_options("evaluate", without=("--harness", "--harness-folder")), weight=2),
        Base("embed", ("embed", "missing", "prompts.jsonl"), {"prompts.jsonl": "prompts.jsonl"}, kept=1, ends_with=(2,),
             words=_options("embed")),
        Base("serve", ("serve", "missing"), {}, kept=1, ends_with=(2,), words=_options("serve"), weight=2),
        *(Base(f"checkpoint {name}", ("checkpoint", name, *places), {}, kept=2, ends_with=(2,), statuses=(0, 1, 2, 65),
               words=_options("checkpoint", name))
          for name, places in (("inspect", ("missing",)), ("verify", ("missing",)), ("diff", ("missing", "missing")),
                               ("export", ("missing", "out")))),
        Base("study", ("study", "scaling", "--output", "run.toml"), _RUN_FILES, kept=4, ends_with=(2,),
             words=("--unknown", "--help")),
        Base("help", ("plan", "--help"), {}, kept=1, words=("--version", "plan", "checkpoint", "study")),
    )  # fmt: skip


def _folders() -> tuple[Base, ...]:
    files = {"hf": "hf", "text.txt": "prompts.jsonl"}
    damaged = ("hf/*",)
    settings = ("hf/chat_template.jinja", "hf/tokenizer_config.json", "hf/special_tokens_map.json", "hf/tokenizer.json")
    return (
        Base("generate", ("generate", "hf", "--prompt", "a", "--tokens", "3", "--seed", "1"), files, damaged, weight=3),
        Base("evaluate", ("evaluate", "hf", "--text", "text.txt", "--window", "16", "--overlap", "16"), files, damaged),
        Base("chat", (CHAT, "hf"), files, settings, weight=3),
        Base("train", ("train", "training.initialize_from=hf", "data.text=missing.txt", "layout.tensor=1",
                       "training.sequence_length=32"), files, damaged, ends_with=(2,)),
        Base("plan", ("plan", "tuned.toml", "--gpus", "2", "--gpu", "h100-sxm"), files | {"tuned.toml": "tuned.toml"},
             ("hf/config.json",)),
    )  # fmt: skip


def _checkpoints() -> tuple[Base, ...]:
    run, shards = {"run": "run"}, (f"{_STEP}/*",)
    two, one = run | {"other": "run"}, {"step-00000004": _STEP}
    either = ("step-00000004/*",)
    manifest = ("run/checkpoints/*/*.json", "run/config.toml")
    return (
        Base("verify", ("checkpoint", "verify", "run"), run, shards, statuses=(0, 1, 2, 65), weight=3),
        Base("verify one", ("checkpoint", "verify", "step-00000004"), one, either, statuses=(0, 1, 2, 65), weight=2),
        Base("verify manifest", ("checkpoint", "verify", "run", "--json"), run, manifest, statuses=(0, 1, 2, 65)),
        Base("inspect", ("checkpoint", "inspect", "run"), run, manifest, weight=2),
        Base("inspect one", ("checkpoint", "inspect", "step-00000004", "--json"), one, either),
        Base("diff", ("checkpoint", "diff", "run", "other"), two, (*shards, *manifest), statuses=(0, 1, 2, 65),
             weight=2),
        Base("repair", ("checkpoint", "repair", "run"), run, (*shards, *manifest), weight=3),
        Base("export", ("checkpoint", "export", f"{_STEP}", "out"), run, shards),
        Base("export run", ("checkpoint", "export", "run", "out"), run, (*shards, *manifest, "run/tokens/*"), weight=2),
        Base("generate", ("generate", "run", "--prompt", "a", "--tokens", "2"), run,
             (*shards, *manifest, "run/tokens/*"), weight=3),
        Base("resume", ("train", "run/config.toml", "--resume", "auto", "layout.tensor=1"), run,
             (*shards, *manifest, "run/*.json*"), ends_with=(0, 2)),
    )  # fmt: skip


def _corpora() -> tuple[Base, ...]:
    bases = []
    for source in SOURCES:
        names = (source, f"{source}.toml", "more.jsonl", *(["s.bin"] if source == "s.idx" else []))
        files = {name: f"sources/{name}" for name in names} | {"tokenizer.json": "tokenizer.json"}
        ends_with = (2,) if source == "s.arc" else (0,)
        line = ("prepare", f"{source}.toml")
        bases.append(Base(source, line, files, (source, "s.bin"), ends_with=ends_with))
    finished = {name: f"finished/{name}" for name in ("corpus.toml", "s.jsonl", "more.jsonl", "tokenizer.json", "out")}
    damaged = ("out/*", "out/*/*", "out/*/*/*")
    return (*bases, Base("finished", ("prepare", "corpus.toml"), finished, damaged, weight=3))


def _changed(case: Case, folder: Path, valid: Path, base: Base, *, under: str) -> list[str]:
    """Names of files of a case under a name that differ from the valid ones or are missing."""
    damaged = {edit.file for edit in case.edits if edit.action in _DAMAGES and edit.file.startswith(under)}
    files = {name: file for name, file in files_of(base, valid).items() if name in damaged}
    return [name for name, file in files.items() if _digest(folder / name) != _digest(file)]


def _is_whole(file: Path) -> bool:
    """Whether a compressed file matches its checksums. Edits may cancel each other, or change only a field of the head
    that says nothing about the content, such as the time.
    """
    try:
        (gzip if file.suffix == ".gz" else bz2).decompress(file.read_bytes())
    except (OSError, EOFError, ValueError, zlib.error):
        return False
    return True


def _digest(path: Path) -> str:
    if not path.is_file() or path.stat().st_size > 1 << 28:
        return "no file of this size"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _stored_damage_is_found(case: Case, folder: Path, valid: Path, outcome: Outcome) -> str:
    """A checkpoint with an unchanged manifest and another file of it that has changed must not pass `verify`."""
    base = CHECKPOINTS.base(case)
    if not base.name.startswith("verify") or outcome.status != 0:
        return ""
    changed = _changed(case, folder, valid, base, under="")
    names = [name for name in changed if "/step-" in f"/{name}" and Path(name).name != MARKER_FILE]
    if not names or any(name.endswith("manifest.json") for name in names):
        return ""
    return f"verify exits with 0, but {', '.join(names)} differ"


def _lost_text_is_told(case: Case, folder: Path, valid: Path, outcome: Outcome) -> str:
    """A finished corpus must have its own tokens; a damaged gzip source must be rejected in part or as a whole."""
    base = CORPORA.base(case)
    if outcome.status != 0:
        return ""
    if base.name == "finished":
        names = _changed(case, folder, valid, base, under="out/tokens/")
        return f"prepare exits with 0, but {', '.join(names)} differ" if names else ""
    if not base.name.endswith((".gz", ".bz2")) or not _changed(case, folder, valid, base, under=base.name):
        return ""
    if _is_whole(folder / base.name) or any(edit.action == "delete" for edit in case.edits):
        return ""
    try:
        rejects = json.loads((folder / "out" / "report.json").read_text())["rejects"]
    except (OSError, ValueError, KeyError):
        return "prepare exits with 0, but wrote no report"
    return "" if rejects else f"prepare exits with 0 and counts no rejects, but {base.name} is damaged"


def _requests(folder: str, requests: Mapping[str, tuple[str, object]]) -> tuple[Base, ...]:
    return tuple(
        Base(name, ("whole",), {file: f"{folder}/{name}/{file}" for file in ("head.txt", "body.json")})
        for name in requests
    )


CONFIGS = Kind("configs", "configs and command lines", 100_000, 0.30, _configs(), together=100)
REQUESTS_KIND = Kind("requests", "requests to a running server", 20_000, 0.20, _requests("requests", REQUESTS))
FOLDERS = Kind("folders", "Hugging Face folders and templates", 5_000, 0.20, _folders())
CHECKPOINTS = Kind("checkpoints", "checkpoints", 5_000, 0.20, _checkpoints(), oracle=_stored_damage_is_found)
CORPORA = Kind("corpora", "corpora", 2_000, 0.10, _corpora(), oracle=_lost_text_is_told)

EMBEDDINGS = Kind("embeddings", "requests for embeddings", 2_000, 0.04,
                  _requests("embeddings", EMBEDDING_REQUESTS))  # fmt: skip
TASKS = Kind("tasks", "fine-tunings for tasks", 2_000, 0.10, tasks(_options))
CHATS = Kind("chats", "conversations and adapters", 2_000, 0.10, chats(_options))
ENCODERS = Kind("encoders", "encoders and masked text", 2_000, 0.06, encoders(_options, _RUN_KEYS))
PUBLISHED = Kind(METADATA, "files beside weights, against transformers", 2_000, 0.04, ())
REPEATED = Kind(REPETITION, "files built by repetition", len(repeated_cases()), 0.20, ())

KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        CONFIGS,
        REQUESTS_KIND,
        FOLDERS,
        CHECKPOINTS,
        CORPORA,
        EMBEDDINGS,
        TASKS,
        CHATS,
        ENCODERS,
        PUBLISHED,
        REPEATED,
    )
}
"""All kinds, in the order in which they run."""
