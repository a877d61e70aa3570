"""Load a checked `RunConfig` or `CorpusConfig` from a TOML file and command-line overrides, and write it as TOML.

All mistakes in the file and on the command line are collected and reported together, each with its line number.
"""

from crosscut.config.loading.load import (
    dump_toml,
    is_corpus,
    load_corpus,
    load_layout,
    load_run,
    meant_settings,
    with_line,
    write_toml,
)

__all__ = [
    "dump_toml",
    "is_corpus",
    "load_corpus",
    "load_layout",
    "load_run",
    "meant_settings",
    "with_line",
    "write_toml",
]
