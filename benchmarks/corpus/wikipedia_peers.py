"""Peers of the benchmark of Wikipedia's markup, run with the Python of their own environment.

python wikipedia_peers.py PEER FOLDER

The program reads FOLDER/articles.jsonl (`title`, `markup`, and `rest`, the markup that Crosscut has reduced), or the
dump FOLDER/dump.xml for wikiextractor. It writes the texts and the seconds of processor time to FOLDER/PEER.json.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path


def articles(folder: Path) -> Iterator[dict[str, str]]:
    with (folder / "articles.jsonl").open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def run_mwparserfromhell(folder: Path, key: str = "markup") -> tuple[dict[str, str], float]:
    """Parse each article, and take the text that `strip_code` leaves."""
    import mwparserfromhell

    found = list(articles(folder))
    start = time.process_time()
    texts = {article["title"]: str(mwparserfromhell.parse(article[key]).strip_code()) for article in found}
    return texts, time.process_time() - start


def run_rest(folder: Path) -> tuple[dict[str, str], float]:
    """Parse what Crosscut leaves when it has removed references, tables and templates."""
    return run_mwparserfromhell(folder, "rest")


def run_gensim(folder: Path) -> tuple[dict[str, str], float]:
    """Use `filter_wiki`, with which gensim makes a corpus of a dump."""
    from gensim.corpora.wikicorpus import filter_wiki

    found = list(articles(folder))
    start = time.process_time()
    texts = {article["title"]: filter_wiki(article["markup"]) for article in found}
    return texts, time.process_time() - start


def run_wikiextractor(folder: Path) -> tuple[dict[str, str], float]:
    """Run the command on a dump. The seconds include the start of its processes."""
    command = [sys.executable, "-m", "wikiextractor.WikiExtractor", "dump.xml", "-o", "-", "--json", "--quiet"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*command, "--no-templates"], cwd=folder, check=True, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = map(json.loads, done.stdout.splitlines())
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {article["title"]: article["text"] for article in found}, seconds


PEERS: dict[str, tuple[str, Callable[[Path], tuple[dict[str, str], float]]]] = {
    "mwparserfromhell": ("mwparserfromhell", run_mwparserfromhell),
    "rest": ("mwparserfromhell", run_rest),
    "gensim": ("gensim", run_gensim),
    "wikiextractor": ("wikiextractor", run_wikiextractor),
}
"""Packages and functions of the peers."""


if __name__ == "__main__":
    name, place = sys.argv[1], Path(sys.argv[2])
    package, run = PEERS[name]
    texts, seconds = run(place)
    result = {"version": version(package), "seconds": seconds, "texts": texts}
    (place / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
