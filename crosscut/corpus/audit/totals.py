"""Totals of a corpus: the number of records in the source files, and what became of them.

    found = read + unreadable + skipped
    read  = kept + dropped

A record is a line, row, message or page that should hold a document. A record is `unreadable` if it cannot be read (a
reject). Everything after the damage in a damaged file counts as one unreadable record, because the number of lost
records is unknown. A record is `skipped` if it is not meant to become a document, such as a blank text or a redirect.
All other records are `read` as documents. A document is `dropped` if a rule of a later stage removed it.

The terminal and the report page show these numbers and words, so they always agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from crosscut.config.system.wording import counted
from crosscut.corpus.audit.flow import FlowEntry
from crosscut.corpus.documents import INGEST
from crosscut.corpus.execution.stages import Counts


def make_totals(flow: Sequence[FlowEntry], ingest: Counts) -> Counts:
    """Compute the totals from the flow of the stages and the counts of the stage `ingest`.

    `words` holds phrases. `read` says how many records were found, and how many of them were unreadable or skipped.
    `replaced` says how many characters could not be decoded, if there are any. `kept` says how many documents were
    dropped, and how many passages and pieces were cut. If the flow does not begin with `ingest`, only the documents
    that the first stage received are known. If the flow is empty, the result is empty.
    """
    if not flow:
        return {}
    came = flow[0]["out"] if flow[0]["stage"] == INGEST else flow[0]["in"]
    kept = flow[-1]["out"]
    dropped = came["documents"] - kept["documents"]
    totals: Counts = {"read": came, "dropped": {"documents": dropped}, "kept": kept}
    words = {"kept": _listed(f"{dropped:,} dropped", *_cuts(flow))}
    if flow[0]["stage"] == INGEST:
        sources = ingest.get("sources", {}).values()
        found, unreadable = flow[0]["in"]["documents"], sum(one["rejects"] for one in sources)
        files = sum(one.get("files", 0) for one in sources)
        skipped = found - unreadable - came["documents"]
        totals |= {
            "found": {"documents": found, "files": files},
            "unreadable": {"documents": unreadable},
            "skipped": {"documents": skipped},
        }
        lost = _listed(unreadable and f"{unreadable:,} unreadable", skipped and f"{skipped:,} skipped")
        words["read"] = f"from {counted(found, 'record')} in {counted(files, 'file')}" + (lost and f"; {lost}")
        notes = ingest.get("notes", {})
        if "replaced characters" in notes:
            replaced = counted(notes["replaced characters"], "character")
            documents = counted(notes["with replaced characters"], "document")
            words["replaced"] = f"{replaced} in {documents}, which the charsets of the documents cannot decode"
    return {**totals, "words": words}


def _cuts(flow: Sequence[FlowEntry]) -> list[str]:
    """Phrases for the passages and pieces that were cut from kept documents."""
    cuts = [entry["cut"] for entry in flow if "cut" in entry]
    places, pieces = (sum(cut.get(name, 0) for cut in cuts) for name in ("places", "pieces"))
    phrases = (
        f"{counted(places, 'passage')} cut out" if places else "",
        f"{counted(pieces, 'short piece')} left out" if pieces else "",
    )
    return [phrase for phrase in phrases if phrase]


def cut_words(cut: Counts) -> str:
    """Phrase for the text that a stage cut out of kept documents."""
    size = f"{cut['bytes'] / 1e6:,.3f} MB" if cut["bytes"] >= 1e4 else f"{cut['bytes']:,} B"
    if "pieces" in cut:
        return f"{counted(cut['pieces'], 'short piece')} left out, {size}"
    return f"{counted(cut['places'], 'passage')} cut out of {counted(cut['documents'], 'document')}, {size}"


def _listed(*phrases: str | int) -> str:
    return ", ".join(str(phrase) for phrase in phrases if phrase)
