"""Ranks of a run's layout: memory and messages, planned (`plan.json`) and measured (`measurements.jsonl`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def told_ranks(plan: Mapping[str, Any], measurements: Sequence[Mapping[str, Any]]) -> dict[str, object] | None:
    """Return the ranks as the page draws them. None if neither file says anything that fits."""
    last = measurements[-1] if measurements else {}
    layout = str(plan.get("layout") or last.get("layout") or "")
    if last and plan and last.get("layout") != plan.get("layout"):
        last = {}  # a start with another layout has not reached its third step
    planned = [one for one in plan.get("ranks", ()) if isinstance(one, dict)]
    measured = list(last.get("ranks", ()))
    if not planned and not measured:
        return None
    stages = plan.get("stages", ())
    return {
        "layout": layout,
        "axes": plan.get("axes") or {},
        "step": last.get("step"),
        "ranks": [
            _told(i, _at(planned, i), _at(stages, _at(planned, i).get("stage", -1)), _at(measured, i))
            for i in range(max(len(planned), len(measured)))
        ],
    }


def _told(
    number: int, rank: Mapping[str, Any], stage: Mapping[str, Any], found: Mapping[str, Any]
) -> dict[str, object]:
    sent = [stage.get("messages"), found.get("messages"), stage.get("elements"), found.get("elements")]
    names = ("planned", "measured", "planned_elements", "measured_elements")
    named = [of if isinstance(of, dict) else {} for of in sent]
    axes = dict.fromkeys(axis for of in named for axis in of)
    return {
        "rank": rank.get("rank", number),
        "places": rank.get("places") or {},
        "planned": stage.get("memory_bytes"),
        "measured": found.get("memory_bytes"),
        "parts": stage.get("memory") or {},
        "messages": {axis: {name: of.get(axis) for name, of in zip(names, named, strict=True)} for axis in axes},
    }


def _at(found: Any, place: Any) -> Mapping[str, Any]:
    if isinstance(found, Sequence) and isinstance(place, int) and 0 <= place < len(found):
        one = found[place]
        return one if isinstance(one, dict) else {}
    return {}
