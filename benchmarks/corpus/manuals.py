"""Corpus of technical manuals: pages that share templates, and therefore have many near-duplicates.

    python benchmarks/corpus/manuals.py FOLDER

The manuals are those of Linux 6.1, OpenJDK 17, Perl and the C library, as Debian 12 packages them. The command
downloads the packages with `apt-get download` and unpacks them into FOLDER with `dpkg -x`. It installs nothing.
Crosscut's readers extract the text of the HTML pages. All other manuals (man pages, reStructuredText, YAML, POD) are
read as text. All texts are repaired as by the stage `cleaning`. The documents are written to FOLDER/manuals.jsonl.zst.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import zstandard

sys.path.insert(0, str(Path(__file__).parents[2]))

from crosscut.config.corpora import CleaningConfig, CorpusConfig, SourceConfig
from crosscut.corpus.cleaning.repair import repair
from crosscut.corpus.readers import RawText, ReaderSettings, find_reader
from crosscut.corpus.readers.files import File, find_source

PACKAGES = ("linux-doc-6.1", "openjdk-17-doc", "manpages", "manpages-dev", "perl-doc")
SUFFIXES = {"html": (".html",), "text": (".rst.gz", ".yaml.gz", ".txt.gz", ".pod", "/man[0-9]/*.gz")}
"""Names of the files to read, by the reader's format. The `_sources` next to the HTML pages are copies of other files.
"""

DOCUMENTS = "manuals.jsonl.zst"


def build_manuals(folder: Path) -> Path:
    """Return the file with the manuals. If the file does not exist, download the packages and write the file."""
    path = folder / DOCUMENTS
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unpack(folder)
        temporary = path.with_suffix(".unfinished")
        with zstandard.ZstdCompressor().stream_writer(temporary.open("wb")) as file:
            for text in read_manuals(folder / "files"):
                file.write((json.dumps({"text": text}) + "\n").encode())
        temporary.replace(path)
    return path


def unpack(folder: Path) -> None:
    """Download the packages into `folder` and unpack them into `folder/files`."""
    subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(folder / "files")], check=True)


def read_manuals(folder: Path) -> Iterator[str]:
    """Yield the text of every manual below a folder. A file that has several names is read once."""
    seen: set[Path] = set()
    for kind, suffixes in SUFFIXES.items():
        source = SourceConfig(name=kind, files=tuple(f"{folder}/**/*{suffix}" for suffix in suffixes), format=kind)
        reading = ReaderSettings.of(CorpusConfig(sources=(source,), folder="-"), source)
        for file in find_source(source).files:
            resolved = Path(file.url).resolve()
            if resolved not in seen:
                seen.add(resolved)
                yield from texts_of(file, reading)


def texts_of(file: File, reading: ReaderSettings) -> Iterator[str]:
    """Yield the repaired texts of a file. Files that are not UTF-8 are skipped."""
    for item in find_reader(file.format)(file, reading):
        if isinstance(item, RawText) and (text := repair(item.text, CleaningConfig())).strip():
            yield text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Download technical manuals and write them as one jsonl file.")
    parser.add_argument("folder", type=Path, help="folder for the packages, their files and the documents")
    print(build_manuals(parser.parse_args().folder))
