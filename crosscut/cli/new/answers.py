"""The four answers of `crosscut new`: GPUs, size, tokens and data, read from the text that the user typed."""

import re
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from crosscut.cli.arguments import naming_options
from crosscut.cli.plan.forecast import read_number
from crosscut.cli.runs.named import named_preset
from crosscut.config import ConfigError, DataError
from crosscut.config.conventions import TOKENS_FOLDER
from crosscut.config.system.machine import available_memory

if TYPE_CHECKING:
    from crosscut.planner.hardware import Hardware

DEMO_TEXT = "builtin:tales"

_BUILTIN_TOKENS = {DEMO_TEXT: 2.9e5, "builtin:state-of-the-union": 2.7e6}
"""Training tokens of the built-in corpora, which are compressed. Those of the demo's are for the demo's vocabulary."""

_PLAIN_FORMATS = ("text", "jsonl", "tsv")
"""Formats of files whose bytes are mostly text, unless they are compressed."""

_WITHOUT_DATA = "Check the path, or type `--data none` to name the data later."
"""Advice about data that do not exist."""

_BYTES_PER_TOKEN = 4
"""Bytes of English text in a token, roughly."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Answer to `--gpus`: devices of one kind."""

    hardware: "Hardware"
    number: int

    @property
    def has_gpus(self) -> bool:
        """Whether the devices are GPUs."""
        return self.hardware.device == "cuda"


@dataclass(frozen=True, kw_only=True)
class Size:
    """Answer to `--size`: a preset, or a number of parameters."""

    preset: str = ""
    parameters: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Source:
    """Answer to `--data`: text, or tokens that exist. Empty if the user names the data later."""

    text: str = ""
    """File, folder or glob, or the demo's corpus."""

    tokens: str = ""
    """Folder of token shards."""

    vocab_size: int = 0
    """Vocabulary size of the tokens."""

    num_tokens: float = 0.0
    """Number of training tokens. For text, an estimate. 0 if nobody knows, as for compressed files and tables."""

    has_sentences: bool = False
    """Whether the tokens have the index of sentences that masked language modelling needs."""


@naming_options({"--gpu": "--gpus"})
def read_devices(text: str) -> Devices:
    """Read `none`, or a number and the name of a device, such as `8 x h100`.

    Without GPUs, the device is a laptop's processor with the memory of this machine.
    """
    from crosscut.planner.hardware import KNOWN_HARDWARE, named_hardware

    if text.strip().lower() == "none":
        return Devices(hardware=replace(KNOWN_HARDWARE["laptop"], memory=available_memory()), number=1)
    found = re.fullmatch(r"(?:(\d{1,7})(?:\s*[x*]\s*|\s+))?(\S.*)", text.strip(), re.IGNORECASE)
    if found is None or int(found[1] or 1) == 0 or found[2].isdigit():
        raise ConfigError(
            f"`--gpus` must be a number and the name of a device, such as `8 x h100`, or `none`, but is `{text}`. "
            "`crosscut plan --list` lists the devices."
        )
    if several := re.match(r"(?:\d{1,7}\s*[x*]\s*){2,}(?=\S)", text.strip(), re.IGNORECASE):
        number = prod(map(int, re.findall(r"\d+", several[0])))
        raise ConfigError(
            f"`--gpus` must give the devices of all nodes as one number, but is `{text}`. Type `{number} x "
            f"{text.strip()[several.end() :]}`."
        )
    return Devices(hardware=named_hardware(found[2]), number=int(found[1] or 1))


def read_size(text: str) -> Size:
    """Read the name of a preset, or a number of parameters such as 125M."""
    if re.match(r"[\d.+-]+(e\d+)?[kmbt]?$", text.strip(), re.IGNORECASE):
        return Size(parameters=read_number("--size", text, "125M or 1.3B"))
    return Size(preset=named_preset(text.strip(), option="--size"))


def read_tokens(text: str) -> float | None:
    """Read a number of tokens such as 300M. None means as many as suit the size (`auto`)."""
    return None if text.strip().lower() == "auto" else read_number("--tokens", text, "300M or 20B")


def read_data(text: str) -> Source:
    """Read `demo`, `none`, or the name of a folder of token shards or of text: a file, a folder or a glob."""
    from crosscut.data.manifest import MANIFEST_NAME, TokenManifest
    from crosscut.data.text.sources import find_sources

    text = DEMO_TEXT if text.strip() == "demo" else text.strip()
    if text == "none":
        return Source()
    for folder in (Path(text), Path(text, TOKENS_FOLDER)):
        if (folder / MANIFEST_NAME).is_file():
            manifest = TokenManifest.read(folder)
            num_tokens = sum(shard.tokens for shard in manifest.train)
            return Source(
                tokens=folder.as_posix(),
                vocab_size=manifest.vocab_size,
                num_tokens=num_tokens,
                has_sentences=all(shard.sentences_sha256 for shard in (*manifest.train, manifest.validation)),
            )
    if Path(text).suffix == ".toml":
        raise DataError(
            f"`--data` must name text or token shards, but names `{text}`. If this file describes a corpus, type "
            f"`crosscut prepare {text}` first, and then name the folder of the corpus."
        )
    sources = find_sources([text], setting="--data", remedy=_WITHOUT_DATA)
    is_plain = all(source.format in _PLAIN_FORMATS and not source.compression for source in sources)
    num_bytes = sum(source.size for source in sources) if is_plain else 0
    return Source(text=text, num_tokens=_BUILTIN_TOKENS.get(text, num_bytes / _BYTES_PER_TOKEN))
