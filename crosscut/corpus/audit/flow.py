"""The way of the corpus through the stages: documents, bytes and tokens that came in, went, and were left.

Tokens are counted where a stage has counted them; before that they are the bytes times the tokens of a byte that were
counted later, and say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crosscut.corpus.documents import INGEST
from crosscut.corpus.running import StageResult

Counts = Mapping[str, Any]


def make_flow(results: Sequence[StageResult]) -> list[dict[str, Any]]:
    """An entry for each stage that documents pass, in order.

    `in` and `out` are amounts (`documents`, `bytes`, `tokens`, and `estimated` where tokens are an estimate), `rules`
    the amounts that each rule took, `cut` what passages that were cut out took from documents that stay, and `mended`
    the bytes by which texts became longer (or, below zero, shorter) besides.
    """
    audit: Counts = next((result.counts for result in results if result.name == "audit"), {})
    passed = [result for result in results if "documents_in" in result.counts and result.name not in _NOT_PASSED]
    flow = [_entry(result, audit.get("rules", {}).get(result.name, {})) for result in passed]
    _count_tokens(flow, audit.get("counted", {}))
    return flow


_NOT_PASSED = ("audit", "tokens", "packing")


def _entry(result: StageResult, audited: Counts) -> dict[str, Any]:
    counts = result.counts
    rules = {
        name: {
            "documents": amount.get("documents", 0),
            "bytes": amount.get("bytes", 0),
            "tokens": audited.get(name, {}).get("tokens", 0),
        }
        for name, amount in counts.get("rules", {}).items()
    }
    entry: dict[str, Any] = {"stage": result.name}
    for side in ("in", "out"):
        entry[side] = {
            unit: counts[f"{unit}_{side}"] for unit in ("documents", "bytes") if f"{unit}_{side}" in counts
        }
    entry["rules"] = dict(sorted(rules.items(), key=lambda item: (-item[1]["documents"], item[0])))
    if result.name == INGEST:  # its bytes in and those of its rules are of files on the disk, often packed
        del entry["in"]["bytes"]
        for amount in rules.values():
            del amount["bytes"], amount["tokens"]
        return entry | {"disk": counts["bytes_in"], "notes": counts.get("notes", {})}
    gone = sum(amount["bytes"] for amount in rules.values())
    if counts.get("cut", {}).get("documents"):
        entry["cut"] = dict(counts["cut"])
        gone += counts["cut"]["bytes"]
    if "bytes" in entry["in"] and "bytes" in entry["out"]:
        entry["mended"] = entry["out"]["bytes"] - entry["in"]["bytes"] + gone
    return entry


def _count_tokens(flow: Sequence[dict[str, Any]], counted: Counts) -> None:
    """Put tokens into the amounts of a flow: counted from the stage on that all counted documents came into."""
    ratio = counted["tokens"] / counted["bytes"] if counted.get("bytes") else None
    left: dict[str, Any] | None = None
    for entry in flow:
        if entry["stage"] == "length" and counted and entry["in"]["documents"] == counted["documents"]:
            left = {"tokens": counted["tokens"]}
        for amount in entry["rules"].values():
            if left is None:
                _estimate(amount, ratio)
        if left is None:
            _estimate(entry["in"], ratio)
            _estimate(entry["out"], ratio)
            continue
        entry["in"] |= left
        gone = sum(amount["tokens"] for amount in entry["rules"].values())
        if "cut" in entry:  # what is left of a text that was cut is counted when it is packed
            _estimate(entry["cut"], ratio)
            gone += entry["cut"]["tokens"]
            left = {**left, "estimated": True}
        left = {**left, "tokens": left["tokens"] - gone}
        entry["out"] |= left


def _estimate(amount: dict[str, Any], ratio: float | None) -> None:
    amount.pop("tokens", None)
    if ratio is not None and "bytes" in amount:
        amount |= {"tokens": round(amount["bytes"] * ratio), "estimated": True}
