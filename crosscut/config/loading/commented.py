"""Write a run file for people: only the settings that somebody decided, each with its reason as a comment."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from crosscut.config.system.terminal import printable


class Reasoned(NamedTuple):
    """Value of a setting, and the reason for this value."""

    value: object
    reason: str


def nested(settings: Mapping[str, Reasoned]) -> dict[str, object]:
    """Values of the settings as the table of sections that `load_run` takes."""
    sections = {
        section: {key: value for key, (value, _) in inside.items()} for section, inside in _by_section(settings)
    }
    return {**sections.pop("", {}), **sections}


def commented_toml(settings: Mapping[str, Reasoned], heading: Iterable[str]) -> str:
    """Dump settings, keyed by dotted name, as TOML. Each setting has its own line, which ends with its reason as a
    comment. `heading` has the lines of the comment at the top.
    """
    lines = [_comment(line) for line in heading]
    for section, inside in _by_section(settings):
        lines += ["", f"[{section}]"] if section else [""]
        lines += [f"{key} = {_dumped(value)}  {_comment(reason)}" for key, (value, reason) in inside.items()]
    return "\n".join(lines) + "\n"


def _by_section(settings: Mapping[str, Reasoned]) -> Iterable[tuple[str, dict[str, Reasoned]]]:
    """Sections with their settings, beginning with the settings outside of sections."""
    sections: dict[str, dict[str, Reasoned]] = {"": {}}
    for name, setting in settings.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, {})[key] = setting
    return sections.items()


def _dumped(value: object) -> str:
    """Value in TOML on one line."""
    import tomli_w  # imported only here: the rest of the module works without tomli_w

    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_dumped, value))}]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")


def _comment(text: str) -> str:
    """Comment of one line, whatever the names in the text are."""
    return printable(f"# {' '.join(text.split())}")
