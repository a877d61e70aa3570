"""Print the summary of a prepared corpus in a terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from crosscut.config import CorpusConfig
from crosscut.config.conventions import TOKENS_FOLDER
from crosscut.config.system.console import facts_panel, folded, plain_table, right
from crosscut.config.system.wording import counted
from crosscut.corpus.audit.corpus_report import Report
from crosscut.corpus.audit.flow import FlowEntry
from crosscut.corpus.execution.stages import Counts

SHOWN_DAMAGED = 3
"""Maximum number of damaged files that the summary names."""

SHOWN_SUFFIXES = 5
"""Maximum number of suffixes in the line about the files that were left out."""

VALIDATION = "validation"
"""Name of the validation shard."""


def print_summary(config: CorpusConfig, report: Report, console: Console) -> None:
    """Print the summary of a prepared corpus: a table of the stages, then lines about duplicates, leakage, totals and
    files.

    The table shows how many documents each stage kept and dropped. The last lines show the command to train on the
    tokens, and the path of the report to open.
    """
    console.print(_flow(report["flow"]))
    lines = (*_left_out(report), *_links(report), *_duplicates(report.get("duplicates")))
    for line in (*lines, *_leakage(report.get("leakage"))):
        console.print(Text(line), soft_wrap=True)
    console.print(facts_panel("done", _result(report)))
    folder = Path(config.folder)
    console.print(
        Text(f"files  {folder}/: {TOKENS_FOLDER}, report.html, report.json, timings.json, config.toml"), soft_wrap=True
    )
    program = shlex.quote(str(Path(sys.argv[0]))) if Path(sys.argv[0]).name == "crosscut" else "crosscut"
    tokens = shlex.quote(f"{folder}/{TOKENS_FOLDER}")
    console.print(Text(f"next   {program} train data.text=[] data.tokens={tokens}"), soft_wrap=True)
    console.print(Text(f"       open {folder}/report.html in a browser"), soft_wrap=True)


def _flow(flow: list[FlowEntry]) -> Table:
    table = plain_table("stage", *right("documents", "MB", "tokens"), folded("dropped"))
    for stage in flow:
        out = stage["out"]
        tokens = _short(out["tokens"], about=out.get("estimated", False)) if out.get("tokens") is not None else ""
        rules = sorted(stage["rules"].items(), key=lambda rule: -rule[1]["documents"])
        went = [f"{amount['documents']:,} {rule}" for rule, amount in rules if amount["documents"]]
        went += [stage["cut"]["words"]] if "cut" in stage else []
        size = f"{out['bytes'] / 1e6:,.1f}"
        table.add_row(stage["stage"], f"{out['documents']:,}", size, tokens, Text(", ".join(went)))
    return table


def _short(tokens: int, *, about: bool) -> str:
    return f"~{tokens / 1e6:,.1f}M" if about else f"{tokens:,}"


def _left_out(report: Report) -> list[str]:
    formats = {source["name"]: source["format"] for source in report["settings"]["sources"]}
    lines = []
    for source, suffixes in report.get("left_out", {}).items():
        ordered = sorted(suffixes.items(), key=lambda one: (-one[1], one[0]))
        shown = ", ".join(f"{number:,} {suffix}" for suffix, number in ordered[:SHOWN_SUFFIXES])
        rest = ", ..." if len(ordered) > SHOWN_SUFFIXES else ""
        total = sum(suffixes.values())
        kind = "of no known format" if formats[source] == "auto" else f"not of the format {formats[source]}"
        files = counted(total, "file is", "files are")
        lines.append(f"left out    {source}: {files} {kind}: {shown}{rest}")
    return lines


def _links(report: Report) -> list[str]:
    links, votes = report.get("links", {}), report["settings"]["urls"]["min_karma"]
    return [
        *(
            f"links       {name}: {one['urls']:,} URLs on {one['lines']:,} lines, {one['enough']:,} with at least "
            f"{votes:g} votes"
            for name, one in links.get("lists", {}).items()
        ),
        *(
            f"links       {source}: {one['with_link']:,} of {one['documents']:,} documents have a link"
            for source, one in links.get("joined", {}).items()
        ),
    ]


def _duplicates(duplicates: Counts | None) -> list[str]:
    planted = (duplicates or {}).get("planted") or {}
    if not planted.get("planted") or planted.get("precision") is None:
        return []
    recall, precision = f"{planted['recall']:.1%}", f"{planted['precision']:.1%}"
    found = f"{recall} of {planted['planted']:,} planted near-duplicates were found"
    return [f"duplicates  {found}; {precision} of the pairs found are near-duplicates"]


def _leakage(leakage: Counts | None) -> list[str]:
    if not leakage:
        return []
    lines = [
        f"leakage     {one['name']}: {one['grams_found']:,} of {one['grams']:,} {leakage['ngram']}-grams occur in the "
        f"corpus, in {one['documents_touched']:,} documents{_left(one)}"
        for one in leakage["sets"]
    ]
    if any("grams_let_through" in one for one in leakage["sets"]):
        paper = " and ".join(f"{share:.1%} of {name}'s" for name, share in leakage["paper"].items())
        lines.append(f"            the paper's filter let {paper} 8-grams through")
    return lines


def _left(one: Counts) -> str:
    """Words for the share of a test set that is left, if the paper's filter measured it too."""
    if "grams_let_through" not in one:
        return ""
    confirmed, through = (one[key] / max(one["grams"], 1) for key in ("grams_left", "grams_let_through"))
    return f"; {confirmed:.2%} are left, {through:.2%} by a Bloom filter alone"


def _amount(totals: Counts, name: str, before: str) -> str:
    amount, words = totals[name], totals["words"].get(name, "")
    return f"{amount['documents']:,} documents, {amount['bytes'] / 1e6:,.1f} MB{before}{words}"


def _result(report: Report) -> Iterator[tuple[str | Text, str | Text]]:
    totals, written = report["summary"], report["written"]
    yield "read", _amount(totals, "read", " ")
    if damaged := report.get("damaged"):
        shown = ", ".join(f"{one['name']} after {one['documents']:,} documents" for one in damaged[:SHOWN_DAMAGED])
        number = counted(len(damaged), "file was", "files were")
        rest = f" and {len(damaged) - SHOWN_DAMAGED:,} more" if len(damaged) > SHOWN_DAMAGED else ""
        told = f"{number} read up to the damage (`ingest.max_damaged_files` allows this): {shown}{rest}"
        yield Text("damaged", style="red"), Text(told, style="red")
    if replaced := totals["words"].get("replaced"):
        yield "replaced", replaced
    yield "kept", _amount(totals, "kept", "; ")
    training = sum(shard["tokens"] for shard in written if shard["name"] != VALIDATION)
    validation = sum(shard["tokens"] for shard in written if shard["name"] == VALIDATION)
    yield "tokens", f"{training:,} for training in {len(written) - 1} shards, {validation:,} for validation"
