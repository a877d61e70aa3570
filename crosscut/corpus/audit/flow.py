"""Flow of the corpus through the stages: the documents, bytes and tokens that each stage received, dropped and passed
on.

The stage `length` counts the tokens of each document, without end-of-text tokens. For documents that earlier stages
dropped, the number of tokens is estimated: the number of bytes times the average number of tokens per byte. The number
of tokens that later stages cut out of documents is computed from the final count of the stage `tokens`. If the stage
`tokens` did not run, or if several stages cut text, the tokens of each cut are estimated from the bytes of the cut.
Every estimate is marked in the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crosscut.corpus.documents import INGEST
from crosscut.corpus.execution.running import StageResult
from crosscut.corpus.execution.stages import Counts

FlowEntry = dict[str, Any]
"""Amounts that a stage received, dropped and passed on, as JSON values. `make_flow` explains the keys."""

LENGTH, TOKENS = "length", "tokens"

_NOT_PASSED = ("audit", "packing")


def make_flow(results: Sequence[StageResult]) -> list[FlowEntry]:
    """Describe the amounts that each stage received, dropped and passed on, with one entry per stage in order.

    The stage `tokens` has an entry only if it dropped something. `in` and `out` are the amounts before and after a
    stage. An amount has the keys `documents`, `bytes` and `tokens`, and the key `estimated` if the tokens are an
    estimate. `rules` holds the amount that each rule dropped. `cut` is the amount that was cut from kept documents.
    `mended` is the number of bytes that repairs added to the texts (negative if they made texts shorter), and
    `mended_tokens` is an estimate of this change in tokens.
    """
    counts = {result.name: result.counts for result in results}
    passed = {name: one for name, one in counts.items() if "documents_in" in one and name not in _NOT_PASSED}
    flow = [_entry(name, one) for name, one in passed.items() if name != TOKENS]
    if flow and TOKENS in passed:
        flow += _pieces(flow[-1]["out"], passed[TOKENS])
    _count_tokens(flow, counts)
    return flow


def tokens_of_byte(counts: Counts) -> float | None:
    """Average number of tokens per byte in the counted documents. None if no documents were counted."""
    counted = counts.get("audit", {}).get("counted", {})
    return counted["tokens"] / counted["bytes"] if counted.get("bytes") else None


def with_estimate(amount: Counts, ratio: float | None) -> dict[str, int]:
    """Return the documents, bytes and tokens of an amount, with an estimate for tokens that were not counted.

    `amount` is an `Amount` of the module `samples`. `ratio` is the average number of tokens per byte. If `ratio` is
    None, the result has no tokens.
    """
    known = {unit: amount[unit] for unit in ("documents", "bytes")}
    if ratio is None:
        return known
    if not amount["uncounted"]:
        return {**known, "tokens": amount["tokens"]}
    return {**known, "tokens": amount["tokens"] + round(amount["uncounted"] * ratio), "estimated": True}


def _entry(name: str, counts: Counts) -> FlowEntry:
    sides = {
        side: {unit: counts[f"{unit}_{side}"] for unit in ("documents", "bytes") if f"{unit}_{side}" in counts}
        for side in ("in", "out")
    }
    rules = {rule: dict(amount) for rule, amount in counts.get("rules", {}).items()}
    entry: FlowEntry = {
        "stage": name,
        **sides,
        "rules": dict(sorted(rules.items(), key=lambda item: (-item[1]["documents"], item[0]))),
    }
    if name == INGEST:  # bytes of files on disk, which are often compressed, cannot be compared with bytes of text
        sides["in"].pop("bytes", None)
        for amount in rules.values():
            amount.pop("bytes", None)
        return entry | {"notes": dict(counts.get("notes", {}))}
    gone = sum(amount["bytes"] for amount in rules.values())
    if counts.get("cut", {}).get("places"):
        entry["cut"] = dict(counts["cut"])
        gone += counts["cut"]["bytes"]
    if "bytes" in sides["in"] and "bytes" in sides["out"]:
        entry["mended"] = sides["out"]["bytes"] - sides["in"]["bytes"] + gone
    return entry


def _pieces(before: Counts, counts: Counts) -> list[FlowEntry]:
    """Return a list with the entry of the stage `tokens`, which drops pieces that are too short. Pieces are what
    remains of a document after cuts. The list is empty if the stage dropped nothing.
    """
    lost = before["bytes"] - counts["bytes_out"]
    if not lost and counts["documents_out"] == before["documents"]:
        return []
    entry = {
        "stage": TOKENS,
        "in": {unit: before[unit] for unit in ("documents", "bytes")},
        "out": {"documents": counts["documents_out"], "bytes": counts["bytes_out"]},
        "rules": {rule: {"documents": amount["documents"]} for rule, amount in counts.get("rules", {}).items()},
        "cut": {"pieces": counts.get("short_pieces", 0), "bytes": lost},
        "mended": 0,
    }
    return [entry]


def _count_tokens(flow: Sequence[FlowEntry], counts: Counts) -> None:
    """Add the number of tokens to every amount of a flow, so that the losses of all stages add up to the total loss."""
    ratio = tokens_of_byte(counts)
    audit = counts.get("audit", {})
    if ratio is None:
        return
    counted = audit["counted"]
    places = [
        place
        for place, entry in enumerate(flow)
        if entry["stage"] == LENGTH and entry["in"]["documents"] == counted["documents"]
    ]
    first = places[0] if places else len(flow)
    for entry in flow[:first]:
        _estimate(entry, ratio)
    behind = flow[first:]
    for entry in behind:
        for rule, amount in entry["rules"].items():
            if "bytes" in amount:
                amount["tokens"] = audit["rules"][entry["stage"]][rule]["tokens"]
    _subtract(behind, counted["tokens"], ratio, counts.get(TOKENS, {}))


def _losses(entry: FlowEntry) -> list[dict[str, int]]:
    """Amounts that a stage dropped by its rules or cut from kept documents."""
    return [*entry["rules"].values(), *([entry["cut"]] if "cut" in entry else [])]


def _estimate(entry: FlowEntry, ratio: float) -> None:
    """Estimate the tokens of a stage's input, output and losses.

    Each loss is computed as the difference between the estimate before it and the estimate after it. The losses then
    add up to the total. Estimating and rounding each loss on its own would break this sum.
    """
    for side in (entry["in"], entry["out"]):
        if "bytes" in side:
            side |= {"tokens": round(side["bytes"] * ratio), "estimated": True}
    if "bytes" not in entry["in"]:
        return
    left = entry["in"]["bytes"]
    for amount in _losses(entry):
        before, left = left, left - amount["bytes"]
        amount |= {"tokens": round(before * ratio) - round(left * ratio), "estimated": True}
    if entry.get("mended"):
        entry["mended_tokens"] = entry["out"]["tokens"] - round(left * ratio)


def _subtract(flow: Sequence[FlowEntry], tokens: int, ratio: float, counts: Counts) -> None:
    """Write the number of tokens before and after each stage into the flow.

    `tokens` is the number before the first stage of `flow`. The number after a stage is the number before the stage
    minus the losses to rules and cuts. If the stage `tokens` has counted the final texts, the total number of tokens in
    all cuts is exact. This total is divided among several cuts in proportion to their bytes. Otherwise, the tokens of
    cuts are estimates.
    """
    ruled = sum(amount.get("tokens", 0) for entry in flow for amount in entry["rules"].values())
    cuts = [entry["cut"] for entry in flow if "cut" in entry]
    num_bytes = sum(cut["bytes"] for cut in cuts)
    exact = bool(flow) and "tokens" in counts and flow[-1]["out"].get("documents") == counts["documents_out"]
    gone = num_bytes * ratio
    if exact:
        gone = tokens - ruled - (sum(counts["tokens"].values()) - counts["texts"])
    done = 0
    for cut in cuts:
        before, done = done, done + cut["bytes"]
        cut["tokens"] = round(gone * done / max(num_bytes, 1)) - round(gone * before / max(num_bytes, 1))
        if not exact or len(cuts) > 1:
            cut["estimated"] = True
    left = {"tokens": tokens}
    for entry in flow:
        entry["in"] |= left
        left = {**left, "tokens": left["tokens"] - sum(amount.get("tokens", 0) for amount in _losses(entry))}
        if entry.get("cut", {}).get("estimated"):
            left["estimated"] = True
        if exact and entry is flow[-1]:
            left.pop("estimated", None)
        entry["out"] |= left
