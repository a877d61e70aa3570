"""Keys of older versions that newer keys have replaced. Files and command lines with the old keys still load."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from crosscut.config.checks import shown
from crosscut.config.corpora import CleaningConfig
from crosscut.config.errors import ConfigError
from crosscut.config.loading.building import Override, parsed
from crosscut.config.loading.keys import quoted
from crosscut.config.loading.mistakes import Mistakes

UNICODE = "cleaning.unicode"
"""Key of older versions that switched all repairs of `[cleaning]` on or off."""


def replace_moved(table: dict[str, Any], mistakes: Mistakes, tell: Callable[[str], None] | None) -> None:
    """Replace the key `cleaning.unicode` in the table of a corpus with the keys of `[cleaning]` for which it stands.

    If the file also gives one of these keys, that key takes precedence over `cleaning.unicode`. A key on the command
    line takes precedence over all keys of the file. `tell` receives a line that names the new keys. A value that is
    neither true nor false is recorded as a mistake.
    """
    section = parsed(table.get("cleaning"))
    if not isinstance(section, Mapping) or "unicode" not in section:
        return
    given = section["unicode"]
    value, others = parsed(given), {key: one for key, one in section.items() if key != "unicode"}
    table["cleaning"] = others
    if not isinstance(value, bool):
        mistakes.note(ConfigError(f"`{UNICODE}` must be true or false, but is {shown(value)}."), UNICODE)
        return
    if isinstance(given, Override):
        others = {key: one for key, one in others.items() if isinstance(one, Override)}
    keys = asdict(CleaningConfig.all_or_none(value))
    table["cleaning"] = {**keys, **others}
    if tell:
        switched = "on" if value else "off"
        tell(f"`{UNICODE}` is now one key per repair. {shown(value)} switches {quoted(list(keys))} {switched}.")
